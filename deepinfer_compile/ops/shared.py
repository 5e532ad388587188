"""Attention over keys that other layers share: the cache is written once for all tokens, and read by each of them.

`write_kv` gives back the slots that it filled, and `shared_attention` takes them as its own, so that no order of a
graph can put a reader before the writer. Which tokens attend is a matter of the batch metadata alone: `row_batch`
describes chosen tokens as requests of one token each, and what was not chosen is not computed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.ops.attention import attend_pages, write_keys
from deepinfer_compile.ops.registry import Work, define, size_bytes
from deepinfer_compile.runtime.batch import PAGE_SIZE


def _write_kv(k: Tensor, v: Tensor, kv: Tensor, slot: Tensor) -> Tensor:
    write_keys(k, v, kv, slot)
    return slot.clone()


WRITE_KV = define(
    "write_kv(Tensor k, Tensor v, Tensor(a!) kv, Tensor slot) -> Tensor",
    reference=_write_kv,
    fake=lambda k, v, kv, slot: torch.empty_like(slot),
    work=lambda k, v, kv, slot: Work(0, 2 * size_bytes(k, v)),
)
"""k [T, Hkv, D], v [T, Hkv, Dv], kv [pages, 2, page, Hkv, max(D, Dv)], slot i64[T], -1 stores nothing -> slot."""


def _shared_attention_fake(q: Tensor, *rest: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], rest[-1]))


def _shared_attention_work(q: Tensor, kv: Tensor, query_start: Tensor, seq_len: Tensor, *rest: Any) -> Work:
    context, value_width = int(seq_len.sum()), int(rest[-1])
    queries = max(1, q.shape[0] // max(1, seq_len.shape[0]))
    flops = 2 * q.shape[1] * context * (q.shape[2] + value_width) * queries
    return Work(flops, context * kv.shape[3] * (q.shape[2] + value_width) * kv.element_size() + size_bytes(q))


SHARED_ATTENTION = define(
    "shared_attention(Tensor q, Tensor kv, Tensor query_start, Tensor seq_len, Tensor block_table, Tensor slot, "
    "float scale, int window, float softcap, Tensor? sinks, int value_width) -> Tensor",
    reference=attend_pages,
    fake=_shared_attention_fake,
    work=_shared_attention_work,
)
"""q [T, H, D] over the cache kv of `write_kv`; batch metadata as in `runtime/batch.py` -> [T, H, value_width]. Writes
nothing; the rows of the tokens must be written. A token of slot -1 gives 0."""


def _row_batch(
    rows: Tensor, query_start: Tensor, seq_len: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    found = torch.searchsorted(query_start, rows.to(query_start.dtype), right=True) - 1
    request = found.clamp(min=0, max=seq_len.shape[0] - 1)
    behind = (query_start[request + 1] - 1 - rows).clamp(min=0)
    starts = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=rows.device)
    lengths = (seq_len[request] - behind).clamp(min=0).to(torch.int32)
    return starts, lengths, block_table.index_select(0, request)


def _row_batch_fake(
    rows: Tensor, query_start: Tensor, seq_len: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    starts, lengths = (rows.new_empty(n, dtype=torch.int32) for n in (rows.shape[0] + 1, rows.shape[0]))
    return starts, lengths, block_table.new_empty(rows.shape[0], block_table.shape[1])


ROW_BATCH = define(
    "row_batch(Tensor rows, Tensor query_start, Tensor seq_len, Tensor block_table) -> (Tensor, Tensor, Tensor)",
    reference=_row_batch,
    fake=_row_batch_fake,
    work=lambda rows, query_start, seq_len, block_table: Work(0, size_bytes(rows, block_table)),
)
"""Chosen tokens as requests of one token that see what the token sees: rows i64[N] of the packed tokens, metadata of R
requests -> query_start i32[N + 1], seq_len i32[N], block_table i32[N, P]."""


def _kept_batch(
    kept: Tensor, kept_start: Tensor | None, query_start: Tensor, seq_len: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    starts = torch.searchsorted(kept, query_start.to(kept.dtype)).to(torch.int32)
    if kept_start is None:
        return starts, seq_len.clone(), block_table.clone()
    lengths = (seq_len - kept_start).clamp(min=0).to(torch.int32)
    columns = torch.arange(block_table.shape[1], device=kept.device) + kept_start[:, None] // PAGE_SIZE
    inside = columns < block_table.shape[1]
    table = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
    return starts, lengths, table.masked_fill(~inside, -1)


def _kept_batch_fake(
    kept: Tensor, kept_start: Tensor | None, query_start: Tensor, seq_len: Tensor, block_table: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query_start), torch.empty_like(seq_len), torch.empty_like(block_table)


KEPT_BATCH = define(
    "kept_batch(Tensor kept, Tensor? kept_start, Tensor query_start, Tensor seq_len, Tensor block_table) "
    "-> (Tensor, Tensor, Tensor)",
    reference=_kept_batch,
    fake=_kept_batch_fake,
    work=lambda kept, kept_start, query_start, seq_len, block_table: Work(0, 2 * size_bytes(block_table)),
)
"""A batch of which only the last tokens of each request are left: kept i64[K] of the packed tokens, in order;
kept_start i64[R], multiples of a page, or None. Gives the metadata of requests that begin at their kept_start, so that
no key before it is seen: query_start i32[R + 1], seq_len i32[R], block_table i32[R, P]."""
