"""Rotary position embedding of whole heads or of a part of each: a token's tables are read once for all its heads."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

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
from deepinfer_compile.ops.registry import Op, Work
from deepinfer_compile.ops.rope import STYLES
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
TILE = 4096
"""Most pairs of a program."""


@dataclass(frozen=True)
class Params:
    """width: elements that are turned, with so many before and behind them that are not. wide: tables have as many,
    else half of them. style, inverse: as in the operation. token_first: tokens are the dimension before heads, else
    behind. align: elements, of which every row starts at a multiple."""

    heads: int
    width: int
    before: int
    behind: int
    inverse: bool
    token_first: bool
    dtype: torch.dtype
    table_dtype: torch.dtype
    wide: bool
    style: str
    align: int

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 2 or self.width % 2 or self.style not in STYLES:
            raise ValueError(f"{self.heads} heads of {self.width} elements, style {self.style!r}")
        if min(self.before, self.behind) < 0:
            raise ValueError(f"{self.before} elements before and {self.behind} behind those that are turned")

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.before + self.width + self.behind

    @property
    def lanes(self) -> int:
        """Elements of a row that a program works on at a time."""
        return next_power_of_2(max(self.width // 2, (self.size - self.width) // 2, 1))


@dataclass(frozen=True)
class Config:
    """heads_block: heads of one program, a power of two. pdl: the next launch may start before this one has ended."""

    heads_block: int
    num_warps: int
    pdl: bool = False


def bind(call: Call) -> Params | Refused:
    """Params of a call of rope or partial_rope."""
    given = call.arguments
    x, cos, sin = given["x"], given["cos"], given["sin"]
    if x.dtype not in DTYPES or cos.dtype not in DTYPES or sin.dtype != cos.dtype:
        return Refused(f"rows of {x.dtype} with tables of {cos.dtype}")
    size = x.shape[-1]
    width, start = given.get("width", size), given.get("start", 0)
    if x.dim() < 3 or not all(isinstance(n, int) for n in (size, cos.shape[-1])):
        return Refused("its width is not fixed")
    if not all(statically_known_true(n == 1) for n in x.shape[:-3]) or cos.shape[-1] not in (width, width // 2):
        return Refused("rows under more sizes than heads and tokens, or tables that do not fit them")
    layout = next((first for first in (False, True) if _fits(x, cos, token_first=first)), None)
    if layout is None or not _fits(x, sin, token_first=layout):
        return Refused("its head count is not fixed, or tables are not one row a token")
    if not side_by_side(x, cos, sin):
        return Refused("the elements of a row do not lie side by side")
    return Params(
        heads=x.shape[-2 if layout else -3],
        width=width,
        before=start,
        behind=size - start - width,
        inverse=given.get("inverse", False),
        token_first=layout,
        dtype=x.dtype,
        table_dtype=cos.dtype,
        wide=cos.shape[-1] == width,
        style=given["style"],
        align=alignment(x, cos, sin),
    )


def _fits(x: Tensor, table: Tensor, *, token_first: bool) -> bool:
    """Whether a table has a row for each token of x [..., heads, tokens, D], or of [..., tokens, heads, D]."""
    tokens, heads = (x.shape[-3], x.shape[-2]) if token_first else (x.shape[-2], x.shape[-3])
    if not isinstance(heads, int):
        return False
    if token_first:
        rows = table.dim() >= 3 and statically_known_true(table.shape[-2] == 1)
        lead, found = table.shape[:-3], table.shape[-3] if rows else None
    else:
        lead, found = table.shape[:-2], table.shape[-2] if table.dim() >= 2 else None
    ones = all(statically_known_true(n == 1) for n in lead)
    return found is not None and ones and statically_known_true(found == tokens)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """All heads of a token as far as a tile goes, fewer while there are fewer tokens than cores."""
    half = params.lanes
    most = max(1, min(next_power_of_2(params.heads), TILE // half))
    spread = max(1, limits.cores // max(1, tokens))
    block = max(1, most // next_power_of_2(spread))
    return Config(block, max(1, min(4, limits.max_warps, block * half // 128)), limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Heads a program and warps."""
    half = params.lanes
    for block, warps in product(HEADS, WARPS):
        small = block <= next_power_of_2(params.heads) and (block == 1 or block * half <= TILE)
        if small and warps <= limits.max_warps:
            yield Config(block, warps, limits.pdl)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch."""
    name, table, align = type_name(params.dtype), type_name(params.table_dtype), params.align
    at, head_at = (-3, -2) if params.token_first else (-2, -3)
    tokens: Expr = ("size", "x", at)
    columns = params.width if params.wide else params.width // 2
    arguments = (
        pointer("x", params.dtype, align),
        pointer("cos", params.table_dtype, align),
        pointer("sin", params.table_dtype, align),
        pointer("out", params.dtype),
        Argument("tokens", "i32", tokens),
        Argument("x_head", "i64", ("stride", "x", head_at), align),
        Argument("x_token", "i64", ("stride", "x", at), align),
        Argument("cos_token", "i64", ("stride", "cos", at), align),
        Argument("sin_token", "i64", ("stride", "sin", at), align),
    )
    order = (None, params.heads) if params.token_first else (params.heads, None)
    row = (None, 1, columns) if params.token_first else (None, columns)
    operands = (Operand("x", name, (*order, params.size)), Operand("cos", table, row), Operand("sin", table, row))
    grid: tuple[Expr, ...] = (tokens, -(-params.heads // config.heads_block))
    launch = Launch("rope", grid, arguments, {"num_warps": config.num_warps})
    shape = (tokens, params.heads) if params.token_first else (params.heads, tokens)
    return LaunchPlan(operands, (Buffer("out", name, (*shape, params.size)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Three operations an element; rows are read and written, tables read."""
    elements = sum(new) * params.heads * params.size
    tables = 2 * sum(new) * (params.width if params.wide else params.width // 2)
    turned = elements * params.width // params.size
    return Work(3 * turned, 2 * elements * params.dtype.itemsize + tables * params.table_dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator, *, partial: bool) -> dict[str, Any]:
    """Heads that lie beside each other in a token's row, as a projection leaves them, apart in NaN."""
    params, tokens = case.params, sum(case.new)
    gap = ((-(-params.size // params.align)) | 1) * params.align
    wide = torch.full((1, tokens, params.heads + 1, gap), math.nan, dtype=params.dtype)
    x = wide[:, :, 1:, : params.size]
    x.copy_(torch.randn(x.shape, generator=generator))

    def table() -> Tensor:
        columns = params.width if params.wide else params.width // 2
        room = torch.full((1, 1, tokens, (-(-columns // params.align)) * params.align), math.nan)
        held = room.to(params.table_dtype)[..., :columns]
        held.copy_(torch.rand(held.shape, generator=generator) * 2 - 1)
        return held.transpose(1, 2) if params.token_first else held

    found = {"x": x if params.token_first else x.transpose(1, 2), "cos": table(), "sin": table(), "style": params.style}
    part = {"start": params.before, "width": params.width, "inverse": params.inverse}
    return {**found, **(part if partial else {})}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    usual = Params(4, 16, 0, 0, False, False, torch.float32, torch.float32, True, "half", 4)
    return Case(name, replace(usual, **changes), (tokens,), (tokens,))


BF16 = {"dtype": torch.bfloat16, "align": 16}
ONCE = {"wide": False, "token_first": True}
CASES = (
    _case("one", 2, heads=1, width=2, align=1),
    _case("half", 5, heads=6, width=80),
    _case("pair", 7, heads=3, width=24, style="pair", wide=False),
    _case("turned", 3, heads=5, width=12, style="pair_to_half", wide=False, align=2),
    _case("mixed", 4, heads=8, width=64, **BF16),
    _case("narrow", 6, heads=1, width=64, style="pair_to_half", table_dtype=torch.bfloat16, wide=False, **BF16),
    _case("beside", 5, heads=6, width=24, style="pair", **ONCE),
    _case("beside half", 3, heads=3, width=32, **{**ONCE, "wide": True}, **BF16),
    _case("typical", 64, heads=128, width=64, style="pair_to_half", wide=False, **BF16),
    _case("largest", 8192, heads=128, width=128, **BF16),
)
PARTIAL = (
    _case("last", 5, heads=6, width=8, before=12, style="pair", **ONCE),
    _case("back", 3, heads=6, width=8, before=12, inverse=True, style="pair", **ONCE),
    _case("first", 4, heads=3, width=20, behind=60),
    _case("middle", 6, heads=1, width=16, before=5, behind=2, align=1, inverse=True, **ONCE),
    _case("row", 9, heads=1, width=64, before=64, style="pair", **ONCE, **BF16),
    _case("halves", 7, heads=9, width=16, behind=48, style="pair_to_half", wide=False, **BF16),
    _case("typical", 64, heads=64, width=64, before=448, style="pair", **ONCE, **BF16),
    _case("largest", 8192, heads=128, width=64, before=448, inverse=True, style="pair", **ONCE, **BF16),
)


def _spec(op: Op, cases: tuple[Case[Params], ...], *, partial: bool) -> KernelSpec[Params, Config]:
    return KernelSpec(
        name="rope",
        op=op,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=cases,
        inputs=functools.partial(inputs, partial=partial),
        tolerance={torch.float32: 2e-6, torch.bfloat16: 2**-8},
    )


SPECS = (_spec(ops.ROPE, CASES, partial=False), _spec(ops.PARTIAL_ROPE, PARTIAL, partial=True))
