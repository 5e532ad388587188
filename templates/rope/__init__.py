"""Rotary position embedding: a token's tables are read once for all its heads."""

from __future__ import annotations

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
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.ops.rope import STYLES
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
WARPS = (1, 2, 4, 8)
TILE = 4096
"""Most pairs of a program."""


@dataclass(frozen=True)
class Params:
    """width: elements that are turned. wide: tables have as many, else half of them. style: as in the operation. align:
    elements, of which every row starts at a multiple."""

    heads: int
    width: int
    dtype: torch.dtype
    table_dtype: torch.dtype
    wide: bool
    style: str
    align: int

    def __post_init__(self) -> None:
        if self.heads < 1 or self.width < 2 or self.width % 2 or self.style not in STYLES:
            raise ValueError(f"{self.heads} heads of {self.width} elements, style {self.style!r}")


@dataclass(frozen=True)
class Config:
    """heads_block: heads of one program, a power of two. pdl: the next launch may start before this one has ended."""

    heads_block: int
    num_warps: int
    pdl: bool = False


def bind(call: Call) -> Params | Refused:
    """Params of a call of rope."""
    given = call.arguments
    x, cos, sin = given["x"], given["cos"], given["sin"]
    if x.dtype not in DTYPES or cos.dtype not in DTYPES or sin.dtype != cos.dtype:
        return Refused(f"rows of {x.dtype} with tables of {cos.dtype}")
    if x.dim() < 3 or not all(isinstance(n, int) for n in (x.shape[-3], x.shape[-1], cos.shape[-1])):
        return Refused("its head count and width are not fixed")
    before = [*x.shape[:-3], *cos.shape[:-2], *sin.shape[:-2]]
    if not all(statically_known_true(n == 1) for n in before) or cos.shape[-1] not in (x.shape[-1], x.shape[-1] // 2):
        return Refused("rows or tables under more sizes than heads and tokens")
    if not all(statically_known_true(t.shape[-2] == x.shape[-2]) for t in (cos, sin)):
        return Refused("tables that are not one row a token")
    if not side_by_side(x, cos, sin):
        return Refused("the elements of a row do not lie side by side")
    return Params(
        heads=x.shape[-3],
        width=x.shape[-1],
        dtype=x.dtype,
        table_dtype=cos.dtype,
        wide=cos.shape[-1] == x.shape[-1],
        style=given["style"],
        align=alignment(x, cos, sin),
    )


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """All heads of a token as far as a tile goes, fewer while there are fewer tokens than cores."""
    half = next_power_of_2(params.width // 2)
    most = max(1, min(next_power_of_2(params.heads), TILE // half))
    spread = max(1, limits.cores // max(1, tokens))
    block = max(1, most // next_power_of_2(spread))
    return Config(block, max(1, min(4, limits.max_warps, block * half // 128)), limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Heads a program and warps."""
    half = next_power_of_2(params.width // 2)
    for block, warps in product(HEADS, WARPS):
        small = block <= next_power_of_2(params.heads) and (block == 1 or block * half <= TILE)
        if small and warps <= limits.max_warps:
            yield Config(block, warps, limits.pdl)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch."""
    name, table, align = type_name(params.dtype), type_name(params.table_dtype), params.align
    tokens: Expr = ("size", "x", -2)
    columns = params.width if params.wide else params.width // 2
    arguments = (
        pointer("x", params.dtype, align),
        pointer("cos", params.table_dtype, align),
        pointer("sin", params.table_dtype, align),
        pointer("out", params.dtype),
        Argument("tokens", "i32", tokens),
        Argument("x_head", "i64", ("stride", "x", -3), align),
        Argument("x_token", "i64", ("stride", "x", -2), align),
        Argument("cos_token", "i64", ("stride", "cos", -2), align),
        Argument("sin_token", "i64", ("stride", "sin", -2), align),
    )
    operands = (
        Operand("x", name, (params.heads, None, params.width)),
        Operand("cos", table, (None, columns)),
        Operand("sin", table, (None, columns)),
    )
    grid: tuple[Expr, ...] = (tokens, -(-params.heads // config.heads_block))
    launch = Launch("rope", grid, arguments, {"num_warps": config.num_warps})
    return LaunchPlan(operands, (Buffer("out", name, (params.heads, tokens, params.width)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Three operations an element; rows are read and written, tables read."""
    elements = sum(new) * params.heads * params.width
    tables = 2 * sum(new) * (params.width if params.wide else params.width // 2)
    return Work(3 * elements, 2 * elements * params.dtype.itemsize + tables * params.table_dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Heads that lie beside each other in a token's row, as a projection leaves them, apart in NaN."""
    params, tokens = case.params, sum(case.new)
    gap = ((-(-params.width // params.align)) | 1) * params.align
    wide = torch.full((1, tokens, params.heads + 1, gap), math.nan, dtype=params.dtype)
    x = wide[:, :, 1:, : params.width]
    x.copy_(torch.randn(x.shape, generator=generator))

    def table() -> Tensor:
        columns = params.width if params.wide else params.width // 2
        room = torch.full((1, 1, tokens, (-(-columns // params.align)) * params.align), math.nan)
        held = room.to(params.table_dtype)[..., :columns]
        held.copy_(torch.rand(held.shape, generator=generator) * 2 - 1)
        return held

    return {"x": x.transpose(1, 2), "cos": table(), "sin": table(), "style": params.style}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    usual = Params(4, 16, torch.float32, torch.float32, True, "half", 4)
    return Case(name, replace(usual, **changes), (tokens,), (tokens,))


BF16 = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", 2, heads=1, width=2, align=1),
    _case("half", 5, heads=6, width=80),
    _case("pair", 7, heads=3, width=24, style="pair", wide=False),
    _case("turned", 3, heads=5, width=12, style="pair_to_half", wide=False, align=2),
    _case("mixed", 4, heads=8, width=64, **BF16),
    _case("narrow", 6, heads=1, width=64, style="pair_to_half", table_dtype=torch.bfloat16, wide=False, **BF16),
    _case("typical", 64, heads=128, width=64, style="pair_to_half", wide=False, **BF16),
    _case("largest", 8192, heads=128, width=128, **BF16),
)

SPECS = (
    KernelSpec(
        name="rope",
        op=ops.ROPE,
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
        tolerance={torch.float32: 2e-6, torch.bfloat16: 2**-8},
    ),
)
