"""Attention over keys and values: the plain causal form, the paged form, and the merge of partial results.

Scores are `scale * q.k`, then `softcap * tanh(s / softcap)` where softcap > 0. A query at absolute position p sees
keys j <= p, and j > p - window where window > 0. `sinks[h]` is one more logit in the softmax denominator that carries
no value (GPT-OSS). The causal corner is bottom-right: with S keys and T queries, query i sits at position S - T + i.
A row that sees no key gives 0, never NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes, wide


def masked_softmax(scores: Tensor, visible: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of f32 scores [..., H, T, S] where `visible` is true; a row with nothing visible is
    0."""
    scores = scores.masked_fill(~visible, -math.inf)
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), -math.inf)
    if sinks is not None:
        top = torch.maximum(top, wide(sinks).view(-1, 1, 1))
    top = top.masked_fill(top == -math.inf, 0.0)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(wide(sinks).view(-1, 1, 1) - top)
    return weight / total.masked_fill(total == 0, 1.0)


def visibility(query_positions: Tensor, keys: int, window: int) -> Tensor:
    """bool[T, keys]: which key positions 0..keys-1 a query at the given absolute position may read."""
    key = torch.arange(keys, device=query_positions.device)
    seen = key[None, :] <= query_positions[:, None]
    if window > 0:
        seen = seen & (key[None, :] > query_positions[:, None] - window)
    return seen


def scores_of(q: Tensor, k: Tensor, scale: float, softcap: float) -> Tensor:
    """f32 scores [..., H, T, S] of q [..., H, T, D] against k [..., Hkv, S, D], heads grouped."""
    group = q.shape[-3] // k.shape[-3]
    s = torch.matmul(wide(q), wide(k).repeat_interleave(group, dim=-3).transpose(-1, -2)) * scale
    return softcap * torch.tanh(s / softcap) if softcap > 0 else s


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    causal: bool,
) -> Tensor:
    tokens, keys = q.shape[-2], k.shape[-2]
    s = scores_of(q, k, scale, softcap)
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=q.device)
    if causal:
        visible = visibility(torch.arange(keys - tokens, keys, device=q.device), keys, window)
    if mask is not None and mask.dtype == torch.bool:
        visible = visible & mask
    elif mask is not None:
        s = s + wide(mask)
    p = masked_softmax(s, visible.expand(s.shape), sinks)
    group = q.shape[-3] // v.shape[-3]
    out = torch.matmul(p, wide(v).repeat_interleave(group, dim=-3))
    return out.to(q.dtype).transpose(-3, -2).contiguous()


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:-3], q.shape[-2], q.shape[-3], v.shape[-1])


def _attention_work(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Work:
    batch = math.prod(q.shape[:-3])
    heads, tokens, keys = q.shape[-3], q.shape[-2], k.shape[-2]
    flops = 2 * batch * heads * tokens * keys * (q.shape[-1] + v.shape[-1])
    return Work(flops, size_bytes(q, k, v) + batch * tokens * heads * v.shape[-1] * q.element_size())


ATTENTION = define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor? sinks, float scale, int window, float softcap, "
    "bool causal) -> Tensor",
    reference=_attention,
    fake=_attention_fake,
    work=_attention_work,
)
"""q [B, H, T, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], mask bool (true = visible) or additive, broadcast to
[B, H, T, S], sinks [H] -> [B, T, H, Dv] in q's dtype, accumulated in fp32."""


def gather_pages(cache: Tensor, table: Tensor, first: int, length: int) -> Tensor:
    """Rows first..length-1 of one request, read through its page table [P]. cache [pages, page, ...] -> [n, ...]."""
    page = cache.shape[1]
    if length <= first:
        return cache.new_empty(0, *cache.shape[2:])
    begin = first // page
    pages = table[begin : -(-length // page)].long()
    return cache[pages].flatten(0, 1)[first - begin * page : length - begin * page]


def write_rows(cache: Tensor, rows: Tensor, slot: Tensor) -> None:
    """Store rows [T, ...] at slot [T] of cache [pages, page, ...]; slot -1 stores nothing."""
    page = cache.shape[1]
    keep = slot >= 0
    at = slot[keep]
    cache[at // page, at % page] = rows[keep].to(cache.dtype)


def write_keys(k: Tensor, v: Tensor, kv: Tensor, slot: Tensor) -> None:
    """Store keys [T, Hkv, D] and values [T, Hkv, Dv] at slots [T] of kv [pages, 2, page, Hkv, max(D, Dv)]."""
    write_rows(kv[:, 0, :, :, : k.shape[-1]], k, slot)
    write_rows(kv[:, 1, :, :, : v.shape[-1]], v, slot)


def attend_pages(
    q: Tensor,
    kv: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    slot: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    value_width: int,
) -> Tensor:
    """Queries [T, H, D] of packed requests over the keys and values in their pages -> [T, H, value_width]."""
    out = q.new_zeros(q.shape[0], q.shape[1], value_width)
    for r in range(seq_len.shape[0]):
        a, b, length = int(query_start[r]), int(query_start[r + 1]), int(seq_len[r])
        if a == b:
            continue
        first = max(0, length - (b - a) - window + 1) if window > 0 else 0
        keys = gather_pages(kv[:, 0, :, :, : q.shape[-1]], block_table[r], first, length)
        values = gather_pages(kv[:, 1, :, :, :value_width], block_table[r], first, length)
        s = scores_of(q[a:b].transpose(0, 1), keys.transpose(0, 1), scale, softcap)
        positions = torch.arange(length - (b - a) - first, length - first, device=q.device)
        p = masked_softmax(s, visibility(positions, length - first, window).expand(s.shape), sinks)
        spread = wide(values).transpose(0, 1).repeat_interleave(q.shape[1] // values.shape[1], dim=0)
        out[a:b] = torch.matmul(p, spread).transpose(0, 1).to(q.dtype)
    return out.masked_fill((slot < 0).view(-1, 1, 1), 0)


def _cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    slot: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    write_keys(k, v, kv, slot)
    meta = (query_start, seq_len, block_table, slot)
    return attend_pages(q, kv, *meta, scale, window, softcap, sinks, v.shape[-1])


def _cached_attention_fake(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v.shape[-1])


def _cached_attention_work(
    q: Tensor, k: Tensor, v: Tensor, kv: Tensor, query_start: Tensor, seq_len: Tensor, *rest: object
) -> Work:
    context = int(seq_len.sum())
    flops = 2 * q.shape[1] * context * (q.shape[2] + v.shape[2]) * max(1, q.shape[0] // max(1, seq_len.shape[0]))
    row = k.shape[1] * (k.shape[2] + v.shape[2]) * kv.element_size()
    return Work(flops, context * row + size_bytes(q, k, v))


CACHED_ATTENTION = define(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv, Tensor query_start, Tensor seq_len, "
    "Tensor block_table, Tensor slot, float scale, int window, float softcap, Tensor? sinks) -> Tensor",
    reference=_cached_attention,
    fake=_cached_attention_fake,
    work=_cached_attention_work,
)
"""q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], kv [pages, 2, page, Hkv, max(D, Dv)]; batch metadata as in
`runtime/batch.py` -> [T, H, Dv]. Writes the new rows, then attends. Table entries left of the window are not read."""


def _merge_attention(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Online-softmax merge; a piece with lse -inf is neutral whatever its output holds."""
    empty_a, empty_b = lse_a == -math.inf, lse_b == -math.inf
    top = torch.maximum(lse_a, lse_b)
    safe = top.masked_fill(top == -math.inf, 0.0)
    wa, wb = torch.exp(lse_a - safe), torch.exp(lse_b - safe)
    total = (wa + wb).masked_fill(empty_a & empty_b, 1.0)
    clean_a = wide(out_a).masked_fill(empty_a.unsqueeze(-1), 0.0)
    clean_b = wide(out_b).masked_fill(empty_b.unsqueeze(-1), 0.0)
    mixed = (clean_a * (wa / total).unsqueeze(-1) + clean_b * (wb / total).unsqueeze(-1)).to(out_a.dtype)
    lse = torch.where(empty_a & empty_b, top, safe + torch.log(total))
    # a neutral piece must leave the other bit for bit, so it is chosen, not multiplied by one
    out = torch.where(empty_b.unsqueeze(-1), clean_a.to(out_a.dtype), mixed)
    out = torch.where(empty_a.unsqueeze(-1), clean_b.to(out_a.dtype), out)
    lse = torch.where(empty_b, lse_a, lse)
    return out, torch.where(empty_a, lse_b, lse)


MERGE_ATTENTION = define(
    "merge_attention(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    reference=_merge_attention,
    fake=lambda out_a, lse_a, out_b, lse_b: (torch.empty_like(out_a), torch.empty_like(lse_a)),
    work=lambda out_a, lse_a, out_b, lse_b: Work(4 * out_a.numel(), 3 * size_bytes(out_a)),
)
"""out [T, H, D] and natural-log sum of exponentials lse f32[T, H] of two disjoint key sets -> the same for their
union. An empty piece is marked by lse -inf."""
