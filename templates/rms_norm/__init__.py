"""Root-mean-square normalisation, alone and after a residual addition: two operations, one template.

A row is read once and kept in registers, because the kernel is bound by memory; rows that are too long for that are
refused rather than read twice. Small rows share a program, which tuning decides by the number of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.registry import Op, Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

LONGEST = 32768
"""Elements of a row that fit the registers of one program."""
DTYPES = (torch.float32, torch.bfloat16)
ROWS = (1, 2, 4, 8, 16, 32, 64)
WARPS = (1, 2, 4, 8, 16)
TILE = 4096
"""Most elements of a program that holds several rows."""
HEADS = 3
"""Heads of a token in the cases with two sizes before the row."""


@dataclass(frozen=True)
class Params:
    """size: elements of a row. leading: how many sizes before it may differ from 1. align: elements, of which every row
    starts at a multiple. residual: normalise x + residual and return both."""

    size: int
    leading: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    weighted: bool
    residual: bool
    eps: float
    offset: float
    cast_first: bool
    align: int

    def __post_init__(self) -> None:
        if not 1 <= self.size <= LONGEST or self.leading not in (1, 2):
            raise ValueError(f"rows of {self.size} elements under {self.leading} sizes cannot be normalised")


@dataclass(frozen=True)
class Config:
    """rows: rows of one program, a power of two. pdl: the next launch may start before this one has ended."""

    rows: int
    num_warps: int
    pdl: bool = False


def bind(call: Call) -> Params | Refused:
    """Params of a call of rms_norm or add_rms_norm."""
    given = call.arguments
    x, weight, residual = given["x"], given["weight"], given.get("residual")
    size = x.shape[-1]
    if x.dtype not in DTYPES or (residual is not None and residual.dtype != x.dtype):
        return Refused(f"rows of {x.dtype} have no kernel")
    if weight is not None and (weight.dtype not in DTYPES or (given["cast_first"] and weight.dtype != x.dtype)):
        return Refused(f"a weight of {weight.dtype} for rows of {x.dtype}")
    if not isinstance(size, int) or size > LONGEST:
        return Refused(f"rows of {size} elements are longer than {LONGEST}")
    many = [i for i, n in enumerate(x.shape[:-1]) if not statically_known_true(n == 1)]
    leading = 1 if not many or many[0] == x.dim() - 2 else x.dim() - 1 - many[0]
    if leading > 2 or x.dim() < 2:
        return Refused(f"rows under {leading} sizes; collapse them to two")
    if leading == 2 and residual is not None:
        return Refused("an addition before the norm of heads")
    for tensor in (x, residual, weight):
        if tensor is not None and not side_by_side(tensor):
            return Refused("the elements of a row do not lie side by side")
    return Params(
        size=size,
        leading=leading,
        dtype=x.dtype,
        weight_dtype=x.dtype if weight is None else weight.dtype,
        weighted=weight is not None,
        residual=residual is not None,
        eps=float(given["eps"]),
        offset=float(given["offset"]),
        cast_first=bool(given["cast_first"]),
        align=alignment(x, residual, weight),
    )


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """One row a program while that fills the target, then as many as fit a tile; 1024 elements a warp."""
    columns = 1 << (params.size - 1).bit_length()
    spare = max(1, tokens // (2 * limits.cores))
    rows = min(ROWS[-1], max(1, TILE // columns), 1 << (spare.bit_length() - 1))
    return Config(rows, max(1, min(WARPS[-1], limits.max_warps, rows * columns // 1024)), limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Rows a program and warps, from 32 to 8192 elements a warp."""
    columns = 1 << (params.size - 1).bit_length()
    for rows in ROWS:
        if rows > 1 and rows * columns > TILE:
            continue
        for warps in WARPS:
            if warps <= limits.max_warps and (warps == 1 or 32 <= rows * columns // warps <= 8192):
                yield Config(rows, warps, limits.pdl)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all rows."""
    name, align = type_name(params.dtype), params.align
    rows: Expr = ("size", "x", -2)
    if params.leading == 2:
        rows = ("mul", ("size", "x", -3), rows)
    inner: Expr = ("size", "x", -2)
    shape = (None, None, params.size)[-1 - params.leading :]

    def steps(tensor: str) -> list[Argument]:
        outer: Expr = ("stride", tensor, -3) if params.leading == 2 else 0
        return [
            Argument(f"{tensor}_outer", "i64", outer, params.align),
            Argument(f"{tensor}_inner", "i64", ("stride", tensor, -2), params.align),
        ]

    arguments = [pointer("x", params.dtype, align)]
    operands = [Operand("x", name, shape)]
    results = [Buffer("out", name, (rows, params.size))]
    if params.residual:
        operands.append(Operand("residual", name, shape))
        results.append(Buffer("total", name, (rows, params.size)))
        arguments += [pointer("residual", params.dtype, align), pointer("total", params.dtype), *steps("residual")]
    if params.weighted:
        operands.append(Operand("weight", type_name(params.weight_dtype), (params.size,)))
        arguments.append(pointer("weight", params.weight_dtype, align))
    arguments += [pointer("out", params.dtype), Argument("rows", "i32", rows), Argument("inner", "i32", inner)]
    arguments += steps("x")
    grid = (("cdiv", rows, config.rows),)
    launch = Launch("rms_norm", grid, tuple(arguments), {"num_warps": config.num_warps})
    return LaunchPlan(tuple(operands), tuple(results), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Every operand moved once, four operations an element or five; a new token is a row here."""
    elements = sum(new) * params.size
    moved = (4 if params.residual else 2) * elements * params.dtype.itemsize
    weight = params.size * params.weight_dtype.itemsize if params.weighted else 0
    return Work((5 if params.residual else 4) * elements, moved + weight)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows in a larger tensor of NaN, as far apart as `align` allows."""
    params = case.params
    gap = ((params.size // params.align) | 1) + 2
    rows = (1, sum(case.new)) if params.leading == 1 else (1, sum(case.new) // HEADS, HEADS)

    def random(*shape: int, dtype: torch.dtype = params.dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    def scattered() -> Tensor:
        wide = torch.full((*rows, gap * params.align), math.nan, dtype=params.dtype)
        inner = wide[..., params.align : params.align + params.size]
        inner.copy_(random(*inner.shape))
        return inner.transpose(1, 2) if params.leading == 2 else inner

    found: dict[str, Any] = {"x": scattered()}
    if params.residual:
        found["residual"] = scattered()
    found["weight"] = random(params.size, dtype=params.weight_dtype) if params.weighted else None
    return {**found, "eps": params.eps, "offset": params.offset, "cast_first": params.cast_first}


def _params(size: int, dtype: torch.dtype, **changes: Any) -> Params:
    usual = Params(size, 1, dtype, dtype, True, False, 1e-6, 0.0, True, 1)
    return replace(usual, **changes)


def _cases(*, residual: bool) -> tuple[Case[Params], ...]:
    """Sizes around a power of two, every option once, then the widths of published models."""
    f32, bf16 = DTYPES
    made = partial(_params, residual=residual)
    heads = {} if residual else {"leading": 2}
    return (
        Case("one", made(1, f32), (1,), (1,)),
        Case("five", made(5, bf16), (3,), (3,)),
        Case("127", made(127, f32, cast_first=False, offset=1.0), (7,), (7,)),
        Case("128", made(128, bf16, align=16), (5,), (5,)),
        Case("129", made(129, bf16, cast_first=False, weight_dtype=f32), (4,), (4,)),
        Case("bare", made(96, bf16, weighted=False, align=16), (9,), (9,)),
        Case("heads", made(80, bf16, align=8, eps=1e-5, **heads), (12,), (12,)),
        Case("offset", made(64, bf16, offset=1.0, align=16), (33,), (33,)),
        Case("latent", made(512, bf16, align=16), (6,), (6,)),
        Case("typical", made(2048, bf16, align=16), (1024,), (1024,)),
        Case("largest", made(16384, bf16, align=16), (8192,), (8192,)),
    )


def _spec(op: Op, *, residual: bool) -> KernelSpec[Params, Config]:
    return KernelSpec(
        name="rms_norm",
        op=op,
        params=Params,
        config=Config,
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=_cases(residual=residual),
        inputs=inputs,
        tolerance={torch.float32: 2e-6, torch.bfloat16: 2**-7},
    )


SPECS = (_spec(ops.RMS_NORM, residual=False), _spec(ops.ADD_RMS_NORM, residual=True))
