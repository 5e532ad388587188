"""Attention over a window of latents and over chosen rows of a shared cache; what came just before each token.

A latent is key and value at once. Rows of the shared cache stand for `ratio` tokens each; which of them a token attends
to is a list of numbers, made by `select_rows` from small keys. Plain forms take one sequence from its start, a row or a
key at every token, of which those that complete a row count; cached forms take packed requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from deepinfer_compile.ops.attention import masked_softmax, visibility, write_rows
from deepinfer_compile.ops.packed import read_rows
from deepinfer_compile.ops.registry import Work, define, size_bytes, wide


def token_places(slot: Tensor, query_start: Tensor, seq_len: Tensor) -> tuple[Tensor, Tensor]:
    """Of each packed token: its request, and its position, -1 where its slot is."""
    at = torch.arange(slot.shape[0], dtype=query_start.dtype, device=slot.device)
    request = torch.searchsorted(query_start[1:].contiguous(), at, right=True).clamp(max=seq_len.shape[0] - 1)
    position = seq_len[request] - (query_start[request + 1] - at)
    return request, torch.where(slot >= 0, position.long(), -1)


def paged_rows(cache: Tensor, table: Tensor, number: Tensor) -> Tensor:
    """Rows number [T, K] of requests with page tables [T, P]: [T, K, ...]. Numbers below 0 give any row."""
    at = number.clamp(min=0)
    page = table.gather(1, at // cache.shape[1]).clamp(min=0).long()
    return cache[page, at % cache.shape[1]]


# -- what came before -------------------------------------------------------------------------------------------------


def _recent(x: Tensor, fill: Tensor | None, count: int) -> Tensor:
    before = x.new_zeros(x.shape[0], count - 1, *x.shape[2:])
    line = torch.cat((before if fill is None else before + fill.to(x.dtype), x), dim=1)
    return torch.stack([line[:, i : i + x.shape[1]] for i in range(count)], dim=2)


RECENT = define(
    "recent(Tensor x, Tensor? fill, int count) -> Tensor",
    reference=_recent,
    fake=lambda x, fill, count: x.new_empty(*x.shape[:2], count, *x.shape[2:]),
    work=lambda x, fill, count: Work(0, (count + 1) * size_bytes(x)),
)
"""x [B, T, ...] -> [B, T, count, ...]: each token's row and those of the count - 1 tokens before it, oldest first;
before the start `fill` [], or 0."""


def _cached_recent(
    x: Tensor,
    cache: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    slot: Tensor,
    fill: Tensor | None,
    count: int,
) -> Tensor:
    write_rows(cache, x, slot)
    request, position = token_places(slot, query_start, seq_len)
    number = position[:, None] - torch.arange(count - 1, -1, -1, device=x.device)
    rows = paged_rows(cache, block_table[request], number).to(x.dtype)
    missing = x.new_zeros(()) if fill is None else fill.to(x.dtype)
    return torch.where((number >= 0).view(*number.shape, *[1] * (x.dim() - 1)), rows, missing)


CACHED_RECENT = define(
    "cached_recent(Tensor x, Tensor(a!) cache, Tensor query_start, Tensor seq_len, Tensor block_table, Tensor slot, "
    "Tensor? fill, int count) -> Tensor",
    reference=_cached_recent,
    fake=lambda x, cache, *rest: x.new_empty(x.shape[0], rest[-1], *x.shape[1:]),
    work=lambda x, cache, *rest: Work(0, (rest[-1] + 2) * size_bytes(x)),
)
"""x [T, ...], cache [pages, page, ...], batch metadata as in `runtime/batch.py` -> [T, count, ...], see `recent`.
Writes the new rows. A token of slot -1 gives `fill`."""


# -- choosing rows ----------------------------------------------------------------------------------------------------


def best(scores: Tensor, count: int) -> Tensor:
    """Numbers i32 [..., count] of the highest scores [..., S], of equal ones the first; -1 for those of minus
    infinity."""
    scores = pad(scores, (0, count), value=-math.inf)
    order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.where(scores.gather(-1, order) > -math.inf, order, -1).to(torch.int32)


def _choice(
    scores: Tensor, seen: Tensor, candidates: Tensor | None, top: int, block: int, blocks: int
) -> tuple[Tensor, Tensor]:
    """Of scores [..., T, S] of the rows, of which a token sees the first seen [..., T]: chosen rows and blocks."""
    number = torch.arange(scores.shape[-1], device=scores.device)
    visible = number < seen[..., None]
    if candidates is not None:
        visible = visible & (candidates[..., None] == number // block).any(-2)
    scores = scores.masked_fill(~visible, -math.inf)
    if blocks == 0:
        return best(scores, top), scores.new_empty((*scores.shape[:-1], 0), dtype=torch.int32)
    short = -scores.shape[-1] % block
    peaks = pad(scores, (0, short), value=-math.inf).unflatten(-1, (-1, block)).amax(-1)
    newest = (seen[..., None] - 1) // block == torch.arange(peaks.shape[-1], device=scores.device)
    return best(scores, top), best(peaks.masked_fill(newest & (peaks > -math.inf), math.inf), blocks)


def _select_rows(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    candidates: Tensor | None,
    scale: float,
    ratio: int,
    top: int,
    block: int,
    blocks: int,
) -> tuple[Tensor, Tensor]:
    rows = keys[:, ratio - 1 :: ratio]
    match = torch.einsum("bthd,bsd->bths", wide(q), wide(rows)).relu() * scale
    scores = (match * wide(weights).unsqueeze(-1)).sum(2)
    seen = (torch.arange(q.shape[1], device=q.device) + 1) // ratio
    return _choice(scores, seen.expand(q.shape[:2]), candidates, top, block, blocks)


def _lists(q: Tensor, top: int, blocks: int) -> tuple[Tensor, Tensor]:
    shape = q.shape[:-2]
    return q.new_empty((*shape, top), dtype=torch.int32), q.new_empty((*shape, blocks), dtype=torch.int32)


SELECT_ROWS = define(
    "select_rows(Tensor q, Tensor weights, Tensor keys, Tensor? candidates, float scale, int ratio, int top, "
    "int block, int blocks) -> (Tensor, Tensor)",
    reference=_select_rows,
    fake=lambda q, weights, keys, candidates, scale, ratio, top, block, blocks: _lists(q, top, blocks),
    work=lambda q, weights, keys, *rest: Work(2 * q.numel() * (keys.shape[1] // rest[2]), size_bytes(q, weights, keys)),
)
"""q [B, T, H, D], weights [B, T, H], keys [B, T, D], candidates i32 [B, T, C] -> chosen i32 [B, T, top], candidates i32
[B, T, blocks], -1 where there are fewer.

Row s is complete at token ratio * (s + 1) - 1, whose key is its, and is seen from there on. Its score is the sum over
heads of weights * relu(q . key) * scale, wide. `top` rows with the highest scores are chosen, with `candidates` of
these blocks of `block` rows; of equal ones the first. The candidates made are the `blocks` blocks with the highest
score, and always the newest (DeepSeek-V3.2 report, 2.1; two levels as DeepSeek-V4.1 has them)."""


def _cached_select_rows(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    written: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    candidates: Tensor | None,
    scale: float,
    ratio: int,
    top: int,
    block: int,
    blocks: int,
    form: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    request, position = token_places(written, query_start, seq_len)
    rows = read_rows(keys[block_table.clamp(min=0).long()].flatten(1, 2), form, wide(q).dtype)
    match = torch.einsum("thd,tsd->ths", wide(q), rows[request]).relu() * scale
    scores = (match * wide(weights).unsqueeze(-1)).sum(1)
    return _choice(scores, (position + 1) // ratio, candidates, top, block, blocks)


CACHED_SELECT_ROWS = define(
    "cached_select_rows(Tensor q, Tensor weights, Tensor keys, Tensor written, Tensor query_start, Tensor seq_len, "
    "Tensor block_table, Tensor? candidates, float scale, int ratio, int top, int block, int blocks, int[] form=[]) "
    "-> (Tensor, Tensor)",
    reference=_cached_select_rows,
    fake=lambda q, *rest: _lists(q, rest[9], rest[11]),
    work=lambda q, weights, keys, written, query_start, seq_len, *rest: Work(
        2 * q.numel() * int(seq_len.sum()) // (rest[3] * max(1, seq_len.shape[0])),
        size_bytes(q, weights) + int(seq_len.sum()) // rest[3] * keys.shape[2] * keys.element_size(),
    ),
)
"""The same of packed requests: q [T, H, D], weights [T, H], keys [pages, page / ratio, D] as `write_rows` fills them,
written i64[T] what it gave -> i32 [T, top], i32 [T, blocks]. A token of slot -1 chooses nothing. Keys may be packed in
a form (`ops/packed.py`)."""


def _write_rows(rows: Tensor, cache: Tensor, slot: Tensor, ratio: int) -> Tensor:
    write_rows(cache, rows, torch.where((slot + 1) % ratio == 0, slot // ratio, -1))
    return slot.clone()


WRITE_ROWS = define(
    "write_rows(Tensor rows, Tensor(a!) cache, Tensor slot, int ratio) -> Tensor",
    reference=_write_rows,
    fake=lambda rows, cache, slot, ratio: torch.empty_like(slot),
    work=lambda rows, cache, slot, ratio: Work(0, 2 * size_bytes(rows) // ratio),
)
"""rows [T, D], of which the last of each `ratio` tokens is stored, cache [pages, page / ratio, D], slot i64[T] of
tokens, -1 stores nothing -> slot."""


# -- attention --------------------------------------------------------------------------------------------------------


def _selected_attention(
    q: Tensor,
    latents: Tensor,
    rows: Tensor | None,
    chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    ratio: int,
) -> Tensor:
    tokens = q.shape[1]
    visible = visibility(torch.arange(tokens, device=q.device), tokens, window).expand(q.shape[0], -1, -1)
    keys = latents
    if rows is not None and chosen is not None:
        found = rows[:, ratio - 1 :: ratio]
        number = torch.arange(found.shape[1], device=q.device)
        visible = torch.cat((visible, (chosen[..., None] == number).any(-2)), dim=2)
        keys = torch.cat((latents, found), dim=1)
    scores = torch.einsum("bthd,bnd->bhtn", wide(q), wide(keys)) * scale
    shares = masked_softmax(scores, visible.unsqueeze(1), sinks)
    return torch.einsum("bhtn,bnd->bthd", shares, wide(keys)).to(q.dtype)


SELECTED_ATTENTION = define(
    "selected_attention(Tensor q, Tensor latents, Tensor? rows, Tensor? chosen, Tensor? sinks, float scale, "
    "int window, int ratio) -> Tensor",
    reference=_selected_attention,
    fake=lambda q, *rest: torch.empty_like(q),
    work=lambda q, latents, rows, chosen, sinks, scale, window, ratio: Work(
        4 * q.numel() * (window + (0 if chosen is None else chosen.shape[-1])), 2 * size_bytes(q) + size_bytes(latents)
    ),
)
"""q [B, T, H, D] over latents [B, T, D] of the last `window` tokens and over the `chosen` i32 [B, T, K] rows of
[B, T, D] (see `select_rows`; -1 is none), keys and values both, in one softmax with `sinks` [H] -> [B, T, H, D]."""


def _cached_selected_attention(
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    query_start: Tensor,
    seq_len: Tensor,
    block_table: Tensor,
    slot: Tensor,
    rows: Tensor | None,
    written: Tensor | None,
    rows_table: Tensor | None,
    chosen: Tensor | None,
    sinks: Tensor | None,
    scale: float,
    window: int,
    form: Sequence[int] = (),
    rows_form: Sequence[int] = (),
) -> Tensor:
    write_rows(cache, latents, slot)
    request, position = token_places(slot, query_start, seq_len)
    number = position[:, None] - torch.arange(window - 1, -1, -1, device=q.device)
    keys, visible = read_rows(paged_rows(cache, block_table[request], number), form, wide(q).dtype), number >= 0
    if rows is not None and rows_table is not None and chosen is not None:
        found = paged_rows(rows, rows_table[request], chosen.long())
        keys = torch.cat((keys, read_rows(found, rows_form, wide(q).dtype)), dim=1)
        visible = torch.cat((visible, chosen >= 0), dim=1)
    keys = keys.masked_fill(~visible.unsqueeze(-1), 0)
    scores = torch.einsum("thd,tnd->thn", wide(q), keys).unsqueeze(2) * scale
    shares = masked_softmax(scores, visible[:, None, None], sinks)
    return torch.einsum("thn,tnd->thd", shares.squeeze(2), keys).to(q.dtype)


def _cached_selected_attention_work(q: Tensor, latents: Tensor, cache: Tensor, *rest: Any) -> Work:
    rows, chosen, window = rest[4], rest[7], rest[10]
    tokens, top = q.shape[0], 0 if chosen is None else chosen.shape[-1]
    row = 0 if rows is None else rows.shape[-1] * rows.element_size()
    moved = tokens * (window * cache.shape[-1] * cache.element_size() + top * row)
    return Work(4 * q.numel() * (window + top), 2 * size_bytes(q, latents) + moved)


CACHED_SELECTED_ATTENTION = define(
    "cached_selected_attention(Tensor q, Tensor latents, Tensor(a!) cache, Tensor query_start, Tensor seq_len, "
    "Tensor block_table, Tensor slot, Tensor? rows, Tensor? written, Tensor? rows_table, Tensor? chosen, "
    "Tensor? sinks, float scale, int window, int[] form=[], int[] rows_form=[]) -> Tensor",
    reference=_cached_selected_attention,
    fake=lambda q, *rest: torch.empty_like(q),
    work=_cached_selected_attention_work,
)
"""The same of packed requests: q [T, H, D], latents [T, D], cache [pages, page, D] of the window, rows [pages, page /
ratio, D] with their page table, written i64[T] what `write_rows` gave -> [T, H, D]. Writes the new latents. A token of
slot -1 gives 0, or anything finite where there are sinks. Latents and their cache may be packed in a form, rows in
rows_form (`ops/packed.py`)."""
