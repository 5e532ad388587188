"""Batches to test and to measure with: whatever a kernel must not read is NaN, or -1 in a table."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_compile.kernels import Case

if TYPE_CHECKING:
    from deepinfer_compile.templates.latent_attention import Params


def paged_batch(case: Case[Any], generator: torch.Generator) -> dict[str, Any]:
    """Operands of cached_latent_attention for the Params of either of its kernels, on shuffled pages. A request with
    fewer positions than new tokens has padding tokens (slot -1)."""
    params, tokens = case.params, sum(case.new)
    latent, table, slot = _cache(case, generator)
    return {
        "q_nope": rows(params, (tokens, params.heads), params.nope, generator),
        "q_rope": rows(params, (tokens, params.heads), params.rope, generator),
        "c": rows(params, (tokens,), params.latent, generator),
        "k_rope": rows(params, (tokens,), params.rope, generator),
        **_weights(params, generator),
        "latent": latent,
        "query_start": torch.tensor([0, *case.new]).cumsum(0).to(torch.int32),
        "seq_len": torch.tensor(case.lengths, dtype=torch.int32),
        "block_table": table,
        "slot": slot,
        "scale": params.scale,
        "form": "absorbed",
    }


def whole_batch(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of latent_attention. Under a boolean mask request r sees the first `lengths[r]` keys, the first third of
    them hidden in every second request, and what no token sees is large; else all lengths are one."""
    params, count, keys = case.params, len(case.new), max(*case.lengths, 1)
    q_nope = rows(params, (count, params.queries, params.heads), params.nope, generator).transpose(1, 2)
    q_rope = rows(params, (count, params.queries, params.heads), params.rope, generator).transpose(1, 2)
    c = rows(params, (count, keys), params.latent, generator)
    k_rope = rows(params, (count, keys), params.rope, generator)
    weights = _weights(params, generator)
    found = {"q_nope": q_nope, "q_rope": q_rope, "c": c, "k_rope": k_rope, **weights, "scale": params.scale}
    return {**found, "mask": _mask(case, keys, generator)}


def _mask(case: Case[Params], keys: int, generator: torch.Generator) -> Tensor | None:
    params = case.params
    if params.mask == "causal":
        return None
    shape = (len(case.lengths), 1, params.queries, keys)
    if params.mask == "additive":
        return torch.randn(shape, generator=generator).to(params.dtype)
    length = torch.tensor(case.lengths).view(-1, 1, 1, 1) - torch.arange(params.queries).flip(0).view(1, 1, -1, 1)
    hidden = torch.tensor([n // 3 * (r % 2) for r, n in enumerate(case.lengths)]).view(-1, 1, 1, 1)
    position = torch.arange(keys)
    seen: Tensor = (position < length) & (position >= hidden)
    return seen


def rows(params: Any, shape: tuple[int, ...], width: int, generator: torch.Generator) -> Tensor:
    """Random [*shape, width] inside NaN, its rows at odd multiples of `align`."""
    gap = (-(-width // params.align) | 1) * params.align
    wide = torch.full((*shape[:-1], shape[-1] + 1, gap), math.nan, dtype=params.dtype)
    found: Tensor = wide[..., 1:, :width]
    found.copy_(torch.randn(found.shape, generator=generator))
    return found


def _weights(params: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """The two up-projections, of about unit gain."""
    uk = rows(params, (params.heads, params.nope), params.latent, generator)
    sizes = (params.value, params.latent) if params.value_rows else (params.latent, params.value)
    uv = rows(params, (params.heads, sizes[0]), sizes[1], generator)
    uv.mul_(params.latent**-0.5)
    return {"w_uk": uk.mul_(params.nope**-0.5), "w_uv": uv.transpose(1, 2) if params.value_rows else uv}


def _cache(case: Case[Any], generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Cache with the past of every request, block table, and slots of the new tokens."""
    params, page = case.params, case.params.page
    counts = [-(-n // page) for n in case.lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    width = params.latent + params.rope
    cache = torch.full((sum(counts) + 3, page, width), math.nan, dtype=params.dtype)
    table = torch.full((len(counts), max(*counts, 1) + 1), -1, dtype=torch.int32)
    slot = torch.full((sum(case.new),), -1, dtype=torch.int64)
    token = taken = 0
    for r, (count, length) in enumerate(zip(case.new, case.lengths)):
        own = order[taken : taken + counts[r]]
        table[r, : counts[r]] = own.to(torch.int32)
        at = torch.arange(length)
        home = own[at // page] * page + at % page
        old = max(0, length - count)
        past = torch.randn(old, width, generator=generator).to(params.dtype)
        cache[home[:old] // page, home[:old] % page] = past
        slot[token : token + length - old] = home[old:]
        token, taken = token + count, taken + counts[r]
    return cache, table, slot
