"""Batches on shuffled pages, to test and to measure with: whatever a kernel must not read is NaN, or -1 in a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_compile.kernels import Case

if TYPE_CHECKING:
    from deepinfer_compile.templates.paged_attention import Params


def paged_batch(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of cached_attention. A request with fewer positions than new tokens has padding tokens (slot -1)."""
    params, tokens = case.params, sum(case.new)
    kv, table, slot = _cache(case, generator)
    return {
        "q": _rows(params, tokens, params.heads, params.key_width, generator),
        "k": _rows(params, tokens, params.kv_heads, params.key_width, generator),
        "v": _rows(params, tokens, params.kv_heads, params.value_width, generator),
        "kv": kv,
        "query_start": torch.tensor([0, *case.new]).cumsum(0).to(torch.int32),
        "seq_len": torch.tensor(case.lengths, dtype=torch.int32),
        "block_table": table,
        "slot": slot,
        "scale": params.scale,
        "window": params.window,
        "softcap": params.softcap,
        "sinks": torch.randn(params.heads, generator=generator).to(params.dtype) if params.sinks else None,
    }


def _rows(params: Params, count: int, heads: int, width: int, generator: torch.Generator) -> Tensor:
    """Random [count, heads, width] inside NaN, its rows and heads at odd multiples of `align`."""
    gap = (-(-width // params.align) | 1) * params.align
    wide = torch.full((count + 1, heads * gap + (1 + heads % 2) * params.align), math.nan, dtype=params.dtype)
    found: Tensor = wide[1:, : heads * gap].unflatten(1, (heads, gap))[..., :width]
    found.copy_(torch.randn(found.shape, generator=generator))
    return found


def _cache(case: Case[Params], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Cache with the past of every request, block table, and slots of the new tokens."""
    params, page = case.params, case.params.page
    counts = [-(-n // page) for n in case.lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    row = max(params.key_width, params.value_width)
    kv = torch.full((sum(counts) + 3, 2, page, params.kv_heads, row), math.nan, dtype=params.dtype)
    table = torch.full((len(counts), max(*counts, 1) + 1), -1, dtype=torch.int32)
    slot = torch.full((sum(case.new),), -1, dtype=torch.int64)
    token = taken = 0
    for r, (count, length) in enumerate(zip(case.new, case.lengths)):
        own = order[taken : taken + counts[r]]
        first = max(0, length - count - params.window + 1) if params.window else 0
        table[r, first // page : counts[r]] = own[first // page :].to(torch.int32)
        at = torch.arange(length)
        home = own[at // page] * page + at % page
        old = max(0, length - count)
        for side, width in enumerate((params.key_width, params.value_width)):
            where = home[min(old, first) : old]
            past = torch.randn(len(where), params.kv_heads, width, generator=generator)
            kv[where // page, side, where % page, :, :width] = past.to(params.dtype)
        slot[token : token + length - old] = home[old:]
        token, taken = token + count, taken + counts[r]
    return kv, table, slot
