"""The write of rows that stand for several tokens each: of every `ratio` tokens of a request the last one's is stored.

Bound by memory, so nothing but the number of tokens of a program is chosen. Which row a token completes follows from
its slot alone, because pages hold whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
    next_power_of_2,
    pointer,
    side_by_side,
    type_name,
)
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.write_rows.batch import paged, spread

DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.int64)
BYTES = torch.uint8
"""Of rows that are packed."""
WIDEST = 4096
"""Elements of a row, which lies in the registers of a program."""
MANY = 1024
"""Tokens from which on a program has several."""


@dataclass(frozen=True)
class Params:
    """width: elements of a row. page: rows of a page. align: elements, of which every row starts at a multiple."""

    width: int
    page: int
    ratio: int
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if min(self.width, self.page, self.ratio) < 1:
            raise ValueError(f"rows of {self.width} elements for {self.ratio} tokens, {self.page} a page")


@dataclass(frozen=True)
class Config:
    """tokens: tokens of a program, a power of two."""

    tokens: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of write_rows."""
    rows, cache = call.arguments["rows"], call.arguments["cache"]
    if rows.dtype not in (*DTYPES, BYTES) or cache.dtype != rows.dtype:
        return Refused(f"{rows.dtype} rows with a {cache.dtype} cache")
    if rows.dim() != 2 or cache.dim() != 3 or not all(isinstance(n, int) for n in (rows.shape[1], *cache.shape[1:])):
        return Refused("its rows have no one fixed width")
    if not 1 <= rows.shape[1] <= WIDEST:
        return Refused(f"rows of {rows.shape[1]} elements are not of 1 to {WIDEST}")
    if not side_by_side(rows, cache):
        return Refused("the elements of its rows do not lie side by side")
    return Params(rows.shape[1], cache.shape[1], int(call.arguments["ratio"]), rows.dtype, alignment(rows, cache))


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    held = config.tokens * next_power_of_2(params.width)
    # a lane has at most 64 elements; from two warps on each has some
    return (
        config.num_warps <= limits.max_warps
        and held <= config.num_warps * 32 * 64
        and config.num_warps * 32 <= (max(32, held))
    )


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """A token a program, a few where there are many, and the fewest warps that hold 16 elements a lane."""
    several = 4 if tokens >= MANY else 1
    held = several * next_power_of_2(params.width)
    return Config(several, max(1, min(4, limits.max_warps, held // (32 * 16))))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    for tokens, warps in product((1, 2, 4, 8, 16), (1, 2, 4, 8)):
        config = Config(tokens, warps)
        if _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all tokens."""
    name, align = type_name(params.dtype), params.align
    count: Expr = ("size", "rows", 0)
    operands = (
        Operand("rows", name, (None, params.width)),
        Operand("cache", name, (None, params.page, params.width), packed=2),
        Operand("slot", "int64", (None,)),
    )
    arguments = (
        pointer("rows", params.dtype, align),
        pointer("cache", params.dtype, align),
        pointer("slot", torch.int64, 1),
        pointer("out", torch.int64),
        Argument("count", "i32", count),
        Argument("rows_token", "i64", ("stride", "rows", 0), align),
        Argument("cache_page", "i64", ("stride", "cache", 0), align),
    )
    launch = Launch("store", (("cdiv", count, config.tokens),), arguments, {"num_warps": config.num_warps})
    return LaunchPlan(operands, (Buffer("out", "int64", (count,)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """What is stored is read and written once."""
    return Work(0, 2 * sum(new) * params.width * params.dtype.itemsize // params.ratio)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of a case."""
    p = case.params
    pages = paged(case.new, case.lengths, p.page * p.ratio, generator)
    return {
        "rows": spread((sum(case.new),), p.width, p.align, p.dtype, generator),
        "cache": pages.blank(p.page, p.width, dtype=p.dtype),
        "slot": pages.slot,
        "ratio": p.ratio,
    }


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], ratio: int, **changes: Any) -> Case[Params]:
    usual = Params(20, PAGE_SIZE // ratio, ratio, torch.float32, 4)
    return Case(name, replace(usual, **changes), new, lengths)


BF16 = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", (1,), (4,), 4),
    _case("every", (3, 0, 70), (3, 5, 100), 1, width=12),
    _case("padding", (3, 1, 70, 1), (2, 8, 100, 0), 2, width=24, dtype=torch.bfloat16, align=8),
    _case("numbers", (9, 0, 5), (67, 0, 128), 4, width=1, dtype=torch.int64, align=1),
    _case("packed", (9, 0, 70), (67, 0, 100), 2, width=68, dtype=BYTES),
    _case("steps", (1,) * 9, (4, 5, 8, 63, 64, 65, 0, 12, 128), 4, width=8, align=8),
    _case("wide", (33, 2), (40, 66), 4, width=96, **BF16),
    _case("typical", (1,) * 64, (4096,) * 64, 4, width=512, **BF16),
    _case("largest", (8192,), (8192,), 4, width=512, **BF16),
)

SPECS = (
    KernelSpec(
        name="write_rows",
        op=ops.WRITE_ROWS,
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
        tolerance=dict.fromkeys((*DTYPES, BYTES), 0.0),
    ),
)
