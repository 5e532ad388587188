"""Some rows of a tensor: of a stored one without reading the others, of a derived one without making more than it must.

A rank that holds a few experts of many reads those and no others, from the bundle's files or from a checkpoint of one
tensor an expert. Only quantised checkpoint tensors that hold all experts in one are dequantised whole first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_compile.bundle.checkpoint import TensorSource
from deepinfer_compile.bundle.execute import check_values, execute, execute_into
from deepinfer_compile.bundle.mapped import MappedFile, torch_dtype
from deepinfer_compile.bundle.recipes import Operand, infer
from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES, TensorEntry

Pair = tuple[int, int]
"""(row of the result, row of the tensor)."""


def stored_rows(mapped: MappedFile, name: str, entry: TensorEntry, rows: Sequence[int]) -> Tensor:
    """Those rows [len(rows), ...] of a stored tensor, zeros for -1. A run of rows stays mapped, others are copied."""
    count, *rest = entry.shape
    size = (entry.end - entry.start) // max(count, 1)

    def part(first: int, many: int) -> Tensor:
        start = entry.start + first * size
        shape = (many, *rest)
        return mapped.tensor(name, dataclasses.replace(entry, shape=shape, start=start, end=start + many * size))

    if rows and min(rows) >= 0 and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return part(rows[0], len(rows))
    out = torch.zeros((len(rows), *rest), dtype=torch_dtype(FILE_DTYPES[entry.dtype]))
    for i, row in enumerate(rows):
        if row >= 0 and 0 not in rest:
            out[i].copy_(part(row, 1)[0])
    return out


def derived_rows(recipe: Operand, source: TensorSource, rows: Sequence[int]) -> Tensor:
    """Those rows of a recipe's tensor, zeros for -1. Raises what `execute` raises."""
    dtype, shape = infer(recipe, source)
    out = torch.zeros((len(rows), *shape[1:]), dtype=dtype)
    _into(recipe, source, [(i, row) for i, row in enumerate(rows) if row >= 0], out)
    return out


def _into(recipe: Operand, source: TensorSource, pairs: Sequence[Pair], out: Tensor) -> None:
    op = recipe["op"] if isinstance(recipe, dict) else ""
    if isinstance(recipe, dict) and op == "stack" and recipe["dim"] == 0:
        for i, row in pairs:
            check_values(recipe["of"][row], source)
            execute_into(recipe["of"][row], source, out[i])
    elif isinstance(recipe, dict) and op == "concat" and recipe["dim"] > 0:
        start = 0
        for item in recipe["of"]:
            size = infer(item, source)[1][recipe["dim"]]
            _into(item, source, pairs, out.narrow(recipe["dim"], start, size))
            start += size
    elif isinstance(recipe, dict) and op == "transpose" and 0 not in recipe["dims"]:
        _into(recipe["of"], source, pairs, out.transpose(*recipe["dims"]))
    else:
        whole = execute(recipe, source)
        for i, row in pairs:
            out[i].copy_(whole[row])


__all__ = ["derived_rows", "stored_rows"]
