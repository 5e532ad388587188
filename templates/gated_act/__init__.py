"""A gated activation where no expert or library fuses it: bound by memory, so one pass and no more."""

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
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.activation import KINDS
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
COLUMNS = (256, 512, 1024, 2048)
WARPS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Params:
    """size: elements of a row. act, alpha, limit: as in the operation. align: elements, of which every row starts at a
    multiple."""

    size: int
    dtype: torch.dtype
    act: str
    alpha: float
    limit: float
    align: int

    def __post_init__(self) -> None:
        if self.size < 1 or self.act not in KINDS:
            raise ValueError(f"rows of {self.size} elements under {self.act!r}")


@dataclass(frozen=True)
class Config:
    """columns: of one program, a power of two. pdl: the next launch may start before this one has ended."""

    columns: int
    num_warps: int
    pdl: bool = False


def bind(call: Call) -> Params | Refused:
    """Params of a call of gated_act."""
    given = call.arguments
    gate, up = given["gate"], given["up"]
    if gate.dtype not in DTYPES or up.dtype != gate.dtype or not isinstance(gate.shape[-1], int):
        return Refused(f"rows of {gate.dtype} and {up.dtype}")
    if gate.dim() < 2 or not all(statically_known_true(n == 1) for n in gate.shape[:-2]):
        return Refused("rows under more than one size; collapse them to one")
    if not side_by_side(gate, up):
        return Refused("the elements of a row do not lie side by side")
    fields = {"act": given["kind"], "alpha": float(given["alpha"]), "limit": float(given["limit"])}
    return Params(size=gate.shape[-1], dtype=gate.dtype, align=alignment(gate, up), **fields)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Narrow programs while rows are few, so that every core has one."""
    narrow = tokens * -(-params.size // COLUMNS[-1]) < limits.cores
    return Config(COLUMNS[1] if narrow else COLUMNS[-1], min(4, limits.max_warps), limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Columns and warps."""
    for columns, warps in product(COLUMNS, WARPS):
        if warps <= limits.max_warps and columns >= 32 * warps:
            yield Config(columns, warps, limits.pdl)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch."""
    name, rows = type_name(params.dtype), ("size", "gate", -2)
    arguments = (
        pointer("gate", params.dtype, params.align),
        pointer("up", params.dtype, params.align),
        pointer("out", params.dtype),
        Argument("gate_row", "i64", ("stride", "gate", -2), params.align),
        Argument("up_row", "i64", ("stride", "up", -2), params.align),
    )
    grid: tuple[Expr, ...] = (rows, -(-params.size // config.columns))
    operands = tuple(Operand(n, name, (None, params.size)) for n in ("gate", "up"))
    launch = Launch("gated_act", grid, arguments, {"num_warps": config.num_warps})
    return LaunchPlan(operands, (Buffer("out", name, (rows, params.size)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Six operations an element; two are read and one is written."""
    elements = sum(new) * params.size
    return Work(6 * elements, 3 * elements * params.dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Two halves of one tensor, apart in NaN, some elements beyond the limits."""
    params, tokens = case.params, sum(case.new)
    gap = -(-params.size // params.align) * params.align
    wide = torch.full((tokens, 2 * gap + params.align), math.nan, dtype=params.dtype)

    def half(at: int) -> Tensor:
        found = wide[:, at : at + params.size]
        found.copy_(torch.randn(found.shape, generator=generator) * 4)
        return found

    found = {"gate": half(0), "up": half(gap)}
    return {**found, "kind": params.act, "alpha": params.alpha, "limit": params.limit}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    return Case(name, replace(Params(96, torch.float32, "silu", 0.0, 0.0, 4), **changes), (tokens,), (tokens,))


CLAMPED = {"alpha": 1.702, "limit": 3.0}
CASES = (
    _case("one", 2, size=1, align=1),
    _case("silu", 3, size=300, dtype=torch.bfloat16),
    _case("gelu", 5, act="gelu", size=513, align=1),
    _case("tanh", 4, act="gelu_tanh"),
    _case("relu", 3, act="relu", size=40),
    _case("oai", 7, act="swiglu_oai", size=257, align=1, **CLAMPED),
    _case("clamp", 6, act="swiglu_clamp", dtype=torch.bfloat16, **CLAMPED),
    _case("typical", 64, size=18432, dtype=torch.bfloat16, align=16),
    _case("largest", 8192, size=18432, dtype=torch.bfloat16, align=16),
)

SPECS = (
    KernelSpec(
        name="gated_act",
        op=ops.GATED_ACT,
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
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-8},
    ),
)
