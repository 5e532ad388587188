"""Batches to test and to measure with. Scores are exact in fp32 whatever the order of their sums, and many are equal,
so that which rows are chosen is certain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from deepinfer_compile.kernels import Case
from deepinfer_compile.ops.packed import PACK_ROWS, row_bytes, stored_type
from deepinfer_compile.templates.write_rows.batch import LARGEST, Pages, drawn, paged, spread

if TYPE_CHECKING:
    from deepinfer_compile.templates.select_rows import Params


def batch(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of cached_select_rows: small whole numbers, and quarters for the weights."""
    p, tokens = case.params, sum(case.new)
    pages = paged(case.new, case.lengths, p.page * p.ratio, generator)
    row = row_bytes(p.width, p.form) if p.form else p.width
    keys = pages.blank(p.page, row, dtype=stored_type(p.dtype, p.form))
    for length, places in zip(case.lengths, pages.places):
        where = places[p.ratio - 1 :: p.ratio][: length // p.ratio] // p.ratio
        made = drawn((len(where), p.width), p.dtype, generator).round_()
        made = PACK_ROWS.reference(made, p.form, LARGEST[p.form[0]], 1.0) if p.form else made
        keys[where // p.page, where % p.page] = made
    weights = spread((tokens,), p.heads, p.align, p.weights_dtype, generator).mul_(4).round_().div_(4)
    return {
        "q": spread((tokens, p.heads), p.width, p.align, p.dtype, generator).round_(),
        "weights": weights,
        "keys": keys,
        "written": pages.slot,
        "query_start": pages.query_start,
        "seq_len": pages.seq_len,
        "block_table": pages.table,
        "candidates": _candidates(case, pages, generator) if p.limit else None,
        "scale": p.scale,
        "ratio": p.ratio,
        "top": p.top,
        "block": p.block,
        "blocks": p.blocks,
        "form": list(p.form),
    }


def _candidates(case: Case[Params], pages: Pages, generator: torch.Generator) -> Tensor:
    """Of every token some of the blocks that it sees and one that it does not, in any order, with gaps."""
    p = case.params
    wide = torch.full((len(pages.slot) + 1, p.limit + 3), -7, dtype=torch.int32)
    found = wide[1:, : p.limit]
    token = 0
    for count, length in zip(case.new, case.lengths):
        for position in range(length - count, length):
            blocks = -(-max(0, position + 1) // (p.ratio * p.block))
            some = torch.randperm(max(blocks, p.limit), generator=generator)[: p.limit]
            found[token] = torch.where(some <= blocks, some, -1)
            token += 1
    return found
