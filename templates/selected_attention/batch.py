"""Batches to test and to measure with: a window's latents and chosen rows, and NaN wherever nothing may be read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_compile.kernels import Case
from deepinfer_compile.ops.packed import stored_type
from deepinfer_compile.templates.write_rows.batch import Pages, drawn_rows, paged, spread

if TYPE_CHECKING:
    from deepinfer_compile.templates.selected_attention import Params


def batch(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of cached_selected_attention. The rows lie on other pages than the window."""
    p, tokens = case.params, sum(case.new)
    pages = paged(case.new, case.lengths, p.page, generator, p.window - 1)
    cache = pages.blank(p.page, p.stored(p.form), dtype=stored_type(p.dtype, p.form))
    for count, length, places in zip(case.new, case.lengths, pages.places):
        old = max(0, length - count)
        _fill(cache, places[max(0, old - p.window + 1) : old], p, p.form, generator)
    latents = spread((tokens,), p.stored(p.form), p.bytes_align if p.form else p.align, cache.dtype, generator)
    if p.form:
        latents.copy_(drawn_rows((tokens, p.width), cache.dtype, p.form, generator))
    found = {
        "q": spread((tokens, p.heads), p.width, p.align, p.dtype, generator),
        "latents": latents,
        "cache": cache,
        "query_start": pages.query_start,
        "seq_len": pages.seq_len,
        "block_table": pages.table,
        "slot": pages.slot,
        **dict.fromkeys(("rows", "written", "rows_table", "chosen")),
    }
    found |= _rows(case, generator) if p.rows_page else {}
    sinks = torch.randn(p.heads, generator=generator).to(p.sinks_dtype) if p.sinks else None
    forms = {"form": list(p.form), "rows_form": list(p.rows_form)}
    return {**found, "sinks": sinks, "scale": p.scale, "window": p.window, **forms}


def _fill(cache: Tensor, where: Tensor, p: Params, form: tuple[int, ...], generator: torch.Generator) -> None:
    size = cache.shape[1]
    cache[where // size, where % size] = drawn_rows((len(where), p.width), cache.dtype, form, generator)


def _rows(case: Case[Params], generator: torch.Generator) -> dict[str, Tensor]:
    p = case.params
    pages = paged(case.new, case.lengths, p.page, generator)
    ratio = p.page // p.rows_page
    rows = pages.blank(p.rows_page, p.stored(p.rows_form), dtype=stored_type(p.dtype, p.rows_form))
    for length, places in zip(case.lengths, pages.places):
        _fill(rows, places[ratio - 1 :: ratio][: length // ratio] // ratio, p, p.rows_form, generator)
    chosen = _chosen(case, pages, ratio, generator)
    return {"rows": rows, "written": pages.slot, "rows_table": pages.table, "chosen": chosen}


def _chosen(case: Case[Params], pages: Pages, ratio: int, generator: torch.Generator) -> Tensor:
    """Of every token some of the rows that it sees, in any order, with gaps; of one of nobody none."""
    top = case.params.top
    lists = []
    for count, length in zip(case.new, case.lengths):
        for position in range(length - count, length):
            seen = max(0, position + 1) // ratio
            some = torch.randperm(max(seen, top), generator=generator)[:top]
            lists.append(torch.where(some < seen, some, -1))
    found = torch.stack(lists) if lists else torch.empty(0, top)
    found[pages.slot < 0] = -1
    wide = torch.full((len(found) + 1, top + 3), -7, dtype=torch.int32)
    wide[1:, :top] = found
    return wide[1:, :top]
