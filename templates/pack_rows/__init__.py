"""Rows of numbers as the bytes of a block-scaled format, as caches hold them.

Bound by memory and small: a program has the rows of a token, and nothing but its warps is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import (
    Call,
    Case,
    KernelSpec,
    Limits,
    Refused,
    alignment,
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.packed import FORMS, row_bytes
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.write_rows.batch import spread

DTYPES = (torch.float32, torch.bfloat16)
MOST = 16384
"""Numbers of a token, which lie in the registers of a program."""
WARPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Params:
    """heads: rows of a token. bits, group, powers: the form. align: elements, of which every row starts at a
    multiple."""

    heads: int
    width: int
    bits: int
    group: int
    powers: bool
    largest: float
    least: float
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if (self.bits, self.group, int(self.powers)) not in FORMS or self.width % self.group or self.heads < 1:
            raise ValueError(f"{self.heads} rows of {self.width} in {self.bits} bits, a scale for {self.group}")


@dataclass(frozen=True)
class Config:
    """Warps of a program."""

    num_warps: int


def row_shape(x: Tensor) -> tuple[int, int] | Refused:
    """(heads, width) of [..., T, D] or [..., T, H, D], where no other dimension has more than one element."""
    if not isinstance(x.shape[-1], int) or x.dim() < 2:
        return Refused("its rows have no one fixed width")
    if all(statically_known_true(n == 1) for n in x.shape[:-2]):
        return 1, x.shape[-1]
    if not isinstance(x.shape[-2], int) or not all(statically_known_true(n == 1) for n in x.shape[:-3]):
        return Refused("rows under more than two sizes; collapse them")
    return x.shape[-2], x.shape[-1]


def bind(call: Call) -> Params | Refused:
    """Params of a call of pack_rows."""
    x, form = call.arguments["x"], tuple(call.arguments["form"])
    found = row_shape(x)
    if isinstance(found, Refused):
        return found
    heads, width = found
    if x.dtype not in DTYPES or form not in FORMS or width % form[1]:
        return Refused(f"rows of {width} {x.dtype} in the form {form}")
    if next_power_of_2(heads) * next_power_of_2(width) > MOST:
        return Refused(f"{heads} rows of {width} numbers a token, more than {MOST}")
    if not side_by_side(x):
        return Refused("the elements of its rows do not lie side by side")
    largest, least = (float(call.arguments[n]) for n in ("largest", "least"))
    return Params(heads, width, form[0], form[1], bool(form[2]), largest, least, x.dtype, alignment(x))


class Token(Protocol):
    """What configurations depend on: the rows of a token."""

    @property
    def heads(self) -> int: ...

    @property
    def width(self) -> int: ...


def default(params: Token, limits: Limits, tokens: int) -> Config:
    """As few warps as hold 16 numbers a lane."""
    held = next_power_of_2(params.heads) * next_power_of_2(params.width)
    return Config(max(1, min(WARPS[-1], limits.max_warps, held // (32 * 16))))


def space(params: Token, limits: Limits) -> Iterator[Config]:
    """Warps, of whose lanes at most half have no number, and none more than 128."""
    held = next_power_of_2(params.heads) * next_power_of_2(params.width)
    for warps in WARPS:
        if warps <= limits.max_warps and warps * 16 <= held <= warps * 32 * 128:
            yield Config(warps)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all tokens."""
    form = (params.bits, params.group, int(params.powers))
    several = params.heads > 1
    dims = (None, params.heads, params.width) if several else (None, params.width)
    token, head = (-3, -2) if several else (-2, -2)
    arguments = (
        pointer("x", params.dtype, params.align),
        pointer("out", torch.uint8),
        Argument("x_token", "i64", ("stride", "x", token), params.align),
        Argument("x_head", "i64", ("stride", "x", head), params.align),
    )
    size = ("size", "x", token)
    out = Buffer("out", "uint8", (size, params.heads, row_bytes(params.width, form)))
    launch = Launch("pack", (size,), arguments, {"num_warps": config.num_warps})
    return LaunchPlan((Operand("x", type_name(params.dtype), dims),), (out,), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Numbers are read once and their bytes written."""
    rows = sum(new) * params.heads
    stored = row_bytes(params.width, (params.bits, params.group, int(params.powers)))
    return Work(3 * rows * params.width, rows * (params.width * params.dtype.itemsize + stored))


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows of many sizes, one of zeros, and one of halves between two numbers of the format."""
    p, tokens = case.params, sum(case.new)
    lead = (tokens, p.heads) if p.heads > 1 else (tokens,)
    x = spread(lead, p.width, p.align, p.dtype, generator)
    sizes = torch.logspace(-6, 4, tokens).view(-1, *[1] * (x.dim() - 1))
    x.mul_(sizes.to(p.dtype))
    if tokens > 2:
        ties = torch.tensor([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5.0, -p.largest]).to(p.dtype)
        x[0], x[1] = 0.0, ties.repeat(math.ceil(p.width / 8))[: p.width]
    return {"x": x, "form": [p.bits, p.group, int(p.powers)], "largest": p.largest, "least": p.least}


WINDOW = {"bits": 8, "group": 32, "powers": True, "largest": 448.0, "least": 1e-4}
ROWS = {"bits": 4, "group": 16, "powers": False, "largest": 6.0, "least": 6 * 2.0**-9}
KEYS = {"bits": 4, "group": 32, "powers": True, "largest": 6.0, "least": 6 * 2.0**-126}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    usual = Params(1, 64, 8, 32, True, 448.0, 1e-4, torch.float32, 4)
    return Case(name, replace(usual, **changes), (tokens,), (tokens,))


BF16 = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", 1, width=32, **WINDOW),
    _case("window", 9, **WINDOW),
    _case("rows", 9, width=96, **ROWS),
    _case("keys", 7, width=32, align=1, **KEYS),
    _case("queries", 5, heads=3, width=96, **KEYS, **BF16),
    _case("fine", 6, width=48, align=16, **{**ROWS, "bits": 8, "largest": 448.0, "least": 0.875}),
    _case("typical", 64, width=512, **WINDOW, **BF16),
    _case("largest", 8192, heads=32, width=128, **KEYS, **BF16),
)

SPECS = (
    KernelSpec(
        name="pack_rows",
        op=ops.PACK_ROWS,
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
