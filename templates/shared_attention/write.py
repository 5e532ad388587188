"""The write of keys and values that several layers read: bound by memory, a token a program, nothing to choose."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.paged_attention import DTYPES, WIDEST
from deepinfer_compile.templates.paged_attention import Params as Attending
from deepinfer_compile.templates.paged_attention.batch import paged_batch


@dataclass(frozen=True)
class Params:
    """key_width, value_width: elements of a key and of a value; a cache row has the larger. align: elements, of which
    every row starts at a multiple."""

    kv_heads: int
    key_width: int
    value_width: int
    page: int
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if min(self.kv_heads, self.key_width, self.value_width) < 1:
            raise ValueError(f"{self.kv_heads} heads of {self.key_width} and {self.value_width} elements")


@dataclass(frozen=True)
class Config:
    """Nothing but the warps of a program."""

    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of write_kv."""
    k, v, kv = (call.arguments[name] for name in ("k", "v", "kv"))
    if k.dtype not in DTYPES or any(t.dtype != k.dtype for t in (v, kv)):
        return Refused(f"{k.dtype} keys with a {kv.dtype} cache")
    if not all(isinstance(n, int) for n in (*k.shape[1:], *v.shape[1:], *kv.shape[1:])):
        return Refused("its head counts and widths are not fixed")
    if max(k.shape[2], v.shape[2]) > WIDEST:
        return Refused(f"heads wider than {WIDEST} elements")
    if not side_by_side(k, v, kv):
        return Refused("the elements of its rows do not lie side by side")
    return Params(k.shape[1], k.shape[2], v.shape[2], kv.shape[2], k.dtype, alignment(k, v, kv))


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """One warp: a token's keys and values are a few kilobytes."""
    return Config(1)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    yield from (Config(n) for n in (1, 2, 4) if n <= limits.max_warps)


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch, a program a token."""
    name, align, row = type_name(params.dtype), params.align, max(params.key_width, params.value_width)
    tokens: Expr = ("size", "k", 0)
    operands = (
        Operand("k", name, (None, params.kv_heads, params.key_width)),
        Operand("v", name, (None, params.kv_heads, params.value_width)),
        Operand("kv", name, (None, 2, params.page, params.kv_heads, row), packed=4),
        Operand("slot", "int64", (None,)),
    )
    arguments = (
        *(pointer(t, params.dtype, align) for t in ("k", "v", "kv")),
        pointer("slot", torch.int64, 1),
        pointer("out", torch.int64),
        *(
            Argument(f"{t}_{part}", "i64", ("stride", t, i), align)
            for t in "kv"
            for i, part in enumerate(("token", "head"))
        ),
        Argument("kv_page", "i64", ("stride", "kv", 0), align),
    )
    launch = Launch("store", (tokens,), arguments, {"num_warps": config.num_warps})
    return LaunchPlan(operands, (Buffer("out", "int64", (tokens,)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Keys and values are read and stored once."""
    width = params.kv_heads * (params.key_width + params.value_width) * params.dtype.itemsize
    return Work(0, sum(new) * 2 * width)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of a case."""
    p = case.params
    like = Attending(
        p.kv_heads, p.kv_heads, p.key_width, p.value_width, p.page, p.dtype, 1.0, 0, 0.0, False, 1, False, p.align
    )
    given = paged_batch(Case(case.name, like, case.new, case.lengths), generator)
    return {name: given[name] for name in ("k", "v", "kv", "slot")}


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], *params: Any) -> Case[Params]:
    heads, keys, values, dtype, align = params
    return Case(name, Params(heads, keys, values, PAGE_SIZE, dtype, align), new, lengths)


CASES = (
    _case("one", (1,), (1,), 1, 1, 1, torch.float32, 1),
    _case("padding", (3, 0, 70, 1), (3, 5, 100, 0), 3, 20, 12, torch.float32, 4),
    _case("wide", (33, 2), (40, 66), 2, 96, 192, torch.bfloat16, 16),
    _case("typical", (2048,), (4096,), 8, 128, 128, torch.bfloat16, 16),
    _case("largest", (8192,), (8192,), 8, 256, 256, torch.bfloat16, 16),
)

SPEC = KernelSpec(
    name="shared_attention",
    op=ops.WRITE_KV,
    params=Params,
    config=Config,
    sources={"triton": "write.py.j2"},
    bind=bind,
    default=default,
    space=space,
    plan=plan,
    work=work,
    cases=CASES,
    inputs=inputs,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
)
