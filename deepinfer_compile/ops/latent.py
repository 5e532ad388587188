"""Latent attention (MLA; DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values are up-projections of one
latent row a token, shared by all heads, beside one rotary key.

score(h, i, j) = scale * (q_nope[i, h] . (w_uk[h] c[j]) + q_rope[i, h] . k_rope[j]);  out[i, h] = w_uv[h]^T sum_j p
c[j]. Two orders of the same products: `expanded` up-projects the context (cheaper for many queries), `absorbed` moves
the up-projections to the query and the result (cheaper for few), so only the latent rows are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import torch
from torch import Tensor

from deepinfer_compile.ops.attention import gather_pages, masked_softmax, visibility, write_rows
from deepinfer_compile.ops.registry import Work, define, size_bytes, wide

FORMS = ("absorbed", "expanded")


def _attend(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    form: str,
    mask: Tensor | None = None,
) -> Tensor:
    """q_* [T, H, d], c [S, dl], k_rope [S, dr] -> [T, H, dv]; without a mask [H or 1, T, S] the queries are the last
    of the S positions and see what comes before them."""
    qn, qr, lat, kr = (wide(t) for t in (q_nope, q_rope, c, k_rope))
    uk, uv = wide(w_uk), wide(w_uv)
    tokens, keys = qn.shape[0], lat.shape[0]
    rope_score = torch.einsum("thd,sd->hts", qr, kr)
    if form == "absorbed":
        nope_score = torch.einsum("thl,sl->hts", torch.einsum("thd,hdl->thl", qn, uk), lat)
    else:
        nope_score = torch.einsum("thd,shd->hts", qn, torch.einsum("sl,hdl->shd", lat, uk))
    s = (nope_score + rope_score) * scale
    visible = visibility(torch.arange(keys - tokens, keys, device=qn.device), keys, 0)
    if mask is not None and mask.dtype == torch.bool:
        visible = mask
    elif mask is not None:
        s, visible = s + wide(mask), torch.ones_like(visible)
    p = masked_softmax(s, visible.expand(s.shape), None)
    if form == "absorbed":
        out = torch.einsum("thl,hlv->thv", torch.einsum("hts,sl->thl", p, lat), uv)
    else:
        out = torch.einsum("hts,shv->thv", p, torch.einsum("sl,hlv->shv", lat, uv))
    return out.to(q_nope.dtype)


def _latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    mask: Tensor | None = None,
) -> Tensor:
    spread: Iterable[Tensor | None] = repeat(None)
    if mask is not None:
        batch, _, tokens, _ = q_nope.shape
        spread = mask.expand(batch, mask.shape[-3] if mask.dim() > 2 else 1, tokens, c.shape[1])
    rows = [
        _attend(qn.transpose(0, 1), qr.transpose(0, 1), lat, kr, w_uk, w_uv, scale, "expanded", m)
        for qn, qr, lat, kr, m in zip(q_nope, q_rope, c, k_rope, spread)
    ]
    return torch.stack(rows)


def _work(queries: int, keys: int, heads: int, widths: tuple[int, int, int, int], moved: int) -> Work:
    nope, rope, latent, value = widths
    flops = 2 * queries * heads * (nope * latent + latent * value + keys * (2 * latent + rope))
    return Work(flops, moved)


LATENT_ATTENTION = define(
    "latent_attention(Tensor q_nope, Tensor q_rope, Tensor c, Tensor k_rope, Tensor w_uk, Tensor w_uv, float scale, "
    "Tensor? mask=None) -> Tensor",
    reference=_latent_attention,
    fake=lambda q_nope, q_rope, c, k_rope, w_uk, w_uv, scale, mask=None: q_nope.new_empty(
        q_nope.shape[0], q_nope.shape[2], q_nope.shape[1], w_uv.shape[2]
    ),
    work=lambda q_nope, q_rope, c, k_rope, w_uk, w_uv, scale, mask=None: _work(
        q_nope.shape[0] * q_nope.shape[2],
        c.shape[1],
        q_nope.shape[1],
        (q_nope.shape[3], q_rope.shape[3], c.shape[2], w_uv.shape[2]),
        size_bytes(q_nope, q_rope, c, k_rope, w_uk, w_uv),
    ),
)
"""q_nope [B, H, T, dn], q_rope [B, H, T, dr], c [B, S, dl], k_rope [B, S, dr], w_uk [H, dn, dl], w_uv [H, dl, dv]
-> [B, T, H, dv]; causal, or with a mask (bool, true = visible, or additive) broadcast to [B, H, T, S]."""


def _cached_latent_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    c: Tensor,
    k_rope: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    latent: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    slot: Tensor,
    scale: float,
    form: str,
) -> Tensor:
    if form not in FORMS:
        raise ValueError(f"latent attention has the forms {FORMS}, not {form!r}")
    write_rows(latent, torch.cat([c, k_rope], -1), slot)
    out = q_nope.new_zeros(q_nope.shape[0], q_nope.shape[1], w_uv.shape[2])
    for r in range(seq_len.shape[0]):
        a, b = int(query_start[r]), int(query_start[r + 1])
        if a == b:
            continue
        rows = gather_pages(latent, block_table[r], 0, int(seq_len[r]))
        ctx, rope = rows[:, : c.shape[-1]], rows[:, c.shape[-1] :]
        out[a:b] = _attend(q_nope[a:b], q_rope[a:b], ctx, rope, w_uk, w_uv, scale, form)
    return out.masked_fill((slot < 0).view(-1, 1, 1), 0)


CACHED_LATENT_ATTENTION = define(
    "cached_latent_attention(Tensor q_nope, Tensor q_rope, Tensor c, Tensor k_rope, Tensor w_uk, Tensor w_uv, "
    "Tensor(a!) latent, Tensor query_start, Tensor seq_len, Tensor block_table, Tensor slot, float scale, str form) "
    "-> Tensor",
    reference=_cached_latent_attention,
    fake=lambda q_nope, q_rope, c, k_rope, w_uk, w_uv, *rest: q_nope.new_empty(
        q_nope.shape[0], q_nope.shape[1], w_uv.shape[2]
    ),
    work=lambda q_nope, q_rope, c, k_rope, w_uk, w_uv, latent, query_start, seq_len, *rest: _work(
        q_nope.shape[0],
        int(seq_len.max()) if seq_len.numel() else 0,
        q_nope.shape[1],
        (q_nope.shape[2], q_rope.shape[2], c.shape[1], w_uv.shape[2]),
        size_bytes(q_nope, q_rope, w_uk, w_uv) + int(seq_len.sum()) * latent.shape[-1] * latent.element_size(),
    ),
)
"""q_nope [T, H, dn], q_rope [T, H, dr], c [T, dl], k_rope [T, dr], latent [pages, page, dl + dr] (latent first)
-> [T, H, dv]. `form` is "absorbed" or "expanded"."""
