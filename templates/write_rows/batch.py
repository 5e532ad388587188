"""Batches on shuffled pages, to test and to measure with: what a kernel must not read is poison, or -1 in a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.ops.packed import PACK_ROWS

POISON = -(1 << 30)
"""What stands for NaN among whole numbers."""
BYTE_POISON = 0x7F
"""The same of bytes: the largest number of either sort of scale but one, NaN as an e4m3 number."""
LARGEST = {4: 6.0, 8: 448.0}
"""Of the numbers of a packed row, by their bits."""


@dataclass(frozen=True)
class Pages:
    """Metadata of a batch. places: of each request, where its positions lie, in tokens from the cache's start. count:
    pages there are."""

    query_start: Tensor
    seq_len: Tensor
    table: Tensor
    slot: Tensor
    places: tuple[Tensor, ...]
    count: int

    def blank(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A cache [pages, *shape] of poison."""
        return torch.full((self.count, *shape), poison(dtype), dtype=dtype)


def paged(
    new: Sequence[int], lengths: Sequence[int], page: int, generator: torch.Generator, behind: int | None = None
) -> Pages:
    """Pages of requests. The first tokens of one with fewer positions than new tokens are nobody's (slot -1). behind:
    positions before the first new one that are read, None for all; pages before those are not in the table."""
    counts = [-(-n // page) for n in lengths]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    table = torch.full((len(counts), max(*counts, 1) + 1), -1, dtype=torch.int32)
    slots, places, taken = [torch.zeros(0, dtype=torch.int64)], [], 0
    for r, (count, length) in enumerate(zip(new, lengths)):
        own = order[taken : taken + counts[r]]
        old = max(0, length - count)
        first = 0 if behind is None else max(0, old - behind)
        table[r, first // page : counts[r]] = own[first // page :].to(torch.int32)
        at = torch.arange(length)
        places.append(own[at // page] * page + at % page)
        slots += [torch.full((max(0, count - length),), -1), places[r][old:]]
        taken += counts[r]
    start = torch.tensor([0, *new]).cumsum(0).to(torch.int32)
    return Pages(
        start, torch.tensor(lengths, dtype=torch.int32), table, torch.cat(slots), tuple(places), sum(counts) + 3
    )


def spread(shape: tuple[int, ...], width: int, align: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random [*shape, width] inside poison, its rows at odd multiples of `align`. Whole numbers are up to 1000."""
    gap = (-(-width // align) | 1) * align
    wide = torch.full((*shape[:-1], shape[-1] + 1, gap), poison(dtype), dtype=dtype)
    found: Tensor = wide[..., 1:, :width]
    return found.copy_(drawn((*shape, width), dtype, generator))


def drawn(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random numbers of a type."""
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(1000, shape, generator=generator).to(dtype)


def drawn_rows(shape: tuple[int, ...], dtype: torch.dtype, form: Sequence[int], generator: torch.Generator) -> Tensor:
    """Random rows [..., D] as a cache holds them: of a type, or packed in a form."""
    if not form:
        return drawn(shape, dtype, generator)
    rows = torch.randn(shape, generator=generator)
    return PACK_ROWS.reference(rows, form, LARGEST[form[0]], 1e-4)  # type: ignore[no-any-return]


def poison(dtype: torch.dtype) -> float:
    """What a kernel must not read."""
    if dtype == torch.uint8:
        return BYTE_POISON
    return math.nan if dtype.is_floating_point else POISON
