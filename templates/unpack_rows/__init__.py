"""Rows of a block-scaled format as numbers again. Bound by memory and small, like their packing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
    Case,
    KernelSpec,
    Refused,
    alignment,
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.packed import FORMS, row_bytes, row_width
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.pack_rows import DTYPES, MOST, Config, default, row_shape, space
from deepinfer_compile.templates.write_rows.batch import drawn_rows, spread


@dataclass(frozen=True)
class Params:
    """heads: rows of a token. bits, group, powers: the form. dtype: of the numbers. align: bytes, of which every row
    starts at a multiple."""

    heads: int
    width: int
    bits: int
    group: int
    powers: bool
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if self.form not in FORMS or self.width % self.group or self.heads < 1:
            raise ValueError(f"{self.heads} rows of {self.width} in {self.bits} bits, a scale for {self.group}")

    @property
    def form(self) -> tuple[int, int, int]:
        """As in `ops/packed.py`."""
        return self.bits, self.group, int(self.powers)


def bind(call: Call) -> Params | Refused:
    """Params of a call of unpack_rows."""
    stored, form, dtype = call.arguments["stored"], tuple(call.arguments["form"]), call.arguments["dtype"]
    found = row_shape(stored)
    if isinstance(found, Refused):
        return found
    heads, nbytes = found
    if stored.dtype != torch.uint8 or dtype not in DTYPES or form not in FORMS:
        return Refused(f"rows of {stored.dtype} in the form {form} as {dtype}")
    width = row_width(nbytes, form)
    if row_bytes(width, form) != nbytes or next_power_of_2(heads) * next_power_of_2(width) > MOST:
        return Refused(f"{heads} rows of {nbytes} bytes a token")
    if not side_by_side(stored):
        return Refused("the bytes of its rows do not lie side by side")
    return Params(heads, width, *form[:2], bool(form[2]), dtype, alignment(stored))


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all tokens."""
    nbytes, several = row_bytes(params.width, params.form), params.heads > 1
    dims = (None, params.heads, nbytes) if several else (None, nbytes)
    token, head = (-3, -2) if several else (-2, -2)
    arguments = (
        pointer("stored", torch.uint8, params.align),
        pointer("out", params.dtype),
        Argument("stored_token", "i64", ("stride", "stored", token), params.align),
        Argument("stored_head", "i64", ("stride", "stored", head), params.align),
    )
    size = ("size", "stored", token)
    out = Buffer("out", type_name(params.dtype), (size, params.heads, params.width))
    launch = Launch("unpack", (size,), arguments, {"num_warps": config.num_warps})
    return LaunchPlan((Operand("stored", "uint8", dims),), (out,), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Bytes are read once and numbers written."""
    rows = sum(new) * params.heads
    return Work(
        rows * params.width, rows * (params.width * params.dtype.itemsize + row_bytes(params.width, params.form))
    )


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows that were packed, in poison."""
    p, tokens = case.params, sum(case.new)
    lead = (tokens, p.heads) if p.heads > 1 else (tokens,)
    stored = spread(lead, row_bytes(p.width, p.form), p.align, torch.uint8, generator)
    stored.copy_(drawn_rows((*lead, p.width), torch.uint8, p.form, generator))
    return {"stored": stored, "form": list(p.form), "dtype": p.dtype}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    return Case(name, replace(Params(1, 64, 8, 32, True, torch.float32, 4), **changes), (tokens,), (tokens,))


ROWS = {"bits": 4, "group": 16, "powers": False}
KEYS = {"bits": 4, "group": 32, "powers": True}
BF16 = {"dtype": torch.bfloat16}
CASES = (
    _case("one", 1, width=32, align=1),
    _case("window", 9, **BF16),
    _case("rows", 9, width=96, **ROWS),
    _case("queries", 5, heads=3, width=96, **KEYS, **BF16),
    _case("fine", 6, width=48, align=16, **{**ROWS, "bits": 8}),
    _case("typical", 64, heads=32, width=128, **KEYS, **BF16),
    _case("largest", 8192, heads=32, width=128, **KEYS, **BF16),
)

SPECS = (
    KernelSpec(
        name="unpack_rows",
        op=ops.UNPACK_ROWS,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=CASES,
        inputs=inputs,
        tolerance=dict.fromkeys(DTYPES, 0.0),
    ),
)
