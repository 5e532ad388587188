"""What came just before each token: a row of few elements to a whole stream, read back from pages.

Bound by memory; a token a program, because the tokens before it are its own request's and pages may change between any
two. Rows that the same call stores are taken from where they come from, so one launch does both.
"""

from __future__ import annotations

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
    type_name,
)
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.write_rows import DTYPES
from deepinfer_compile.templates.write_rows.batch import drawn, paged, spread

LONGEST = 64
"""Tokens that are looked back at, which lie in the registers of a program."""
HELD = 64
"""Elements of a lane at most."""
BLOCKS = (1, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Params:
    """outer, inner: elements of a row by its dimensions, 0 where it has no such one. page: tokens of a page. count:
    rows of a token. filled: whether there is a value for what lies before the start. align: elements, of which every
    row starts at a multiple."""

    outer: int
    inner: int
    page: int
    count: int
    filled: bool
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if min(self.outer, self.inner) < 0 or self.page < 1 or not 1 <= self.count <= LONGEST:
            raise ValueError(f"{self.count} rows of {self.outer} times {self.inner} elements")

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of a row."""
        return tuple(n for n in (self.outer, self.inner) if n)

    @property
    def row(self) -> int:
        """Elements of a row."""
        return max(1, self.outer) * max(1, self.inner)


@dataclass(frozen=True)
class Config:
    """block: elements of a row that a program has, a power of two."""

    block: int
    num_warps: int


def _rows_packed(tensor: Tensor, dims: int) -> bool:
    """Whether the elements of the last dimensions provably lie without gaps."""
    step = 1
    for size, stride in list(zip(tensor.shape, tensor.stride()))[::-1][:dims]:
        if size != 1 and not statically_known_true(stride == step):
            return False
        step *= size
    return True


def bind(call: Call) -> Params | Refused:
    """Params of a call of cached_recent."""
    x, cache, fill, count = (call.arguments[name] for name in ("x", "cache", "fill", "count"))
    if x.dtype not in DTYPES or cache.dtype != x.dtype or (fill is not None and fill.dtype != x.dtype):
        return Refused(f"{x.dtype} rows with a {cache.dtype} cache{'' if fill is None else f', fill {fill.dtype}'}")
    shape = tuple(x.shape[1:])
    if len(shape) > 2 or not all(isinstance(n, int) and n > 0 for n in (*shape, *cache.shape[1:])):
        return Refused("its rows have more than two dimensions, none at all, or unknown ones")
    if not 1 <= count <= LONGEST:
        return Refused(f"{count} rows of a token are not of 1 to {LONGEST}")
    if not _rows_packed(x, len(shape)) or not _rows_packed(cache, len(shape) + 1):
        return Refused("the elements of a row do not lie side by side")
    if fill is not None and fill.dim():
        return Refused("what stands before the start is not one number")
    lines = (x, cache) if shape else (x.unsqueeze(-1), cache.unsqueeze(-1))
    outer, inner = shape if len(shape) == 2 else (0, *shape) if shape else (0, 0)
    return Params(outer, inner, cache.shape[1], int(count), fill is not None, x.dtype, alignment(*lines))


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    held = config.block * next_power_of_2(params.count)
    useful = config.num_warps == 1 or held >= config.num_warps * 32
    fits = held <= config.num_warps * 32 * HELD and config.num_warps <= limits.max_warps
    return useful and fits and config.block < 2 * max(16, params.row)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """A row, or the part of it of which a lane of one warp holds half of what it may."""
    most = [b for b in BLOCKS if b * next_power_of_2(params.count) <= HELD // 2 * 32]
    return Config(next((b for b in most if b >= params.row), most[-1]), 1)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    for block, warps in product(BLOCKS, (1, 2, 4, 8)):
        config = Config(block, warps)
        if _is_legal(params, config, limits) and (block > 1 or params.row <= 16):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over all tokens and parts of their rows."""
    name, dtype, align, dims = type_name(params.dtype), params.dtype, params.align, len(params.shape)
    tokens: Expr = ("size", "x", 0)
    operands = [
        Operand("x", name, (None, *params.shape), packed=dims),
        Operand("cache", name, (None, params.page, *params.shape), packed=dims + 1),
        Operand("query_start", "int32", (None,)),
        Operand("seq_len", "int32", (None,)),
        Operand("block_table", "int32", (None, None)),
        Operand("slot", "int64", (None,)),
        *([Operand("fill", name, ())] if params.filled else []),
    ]
    arguments = (
        pointer("x", dtype, align),
        pointer("cache", dtype, align),
        *(pointer(n, torch.int32, 1) for n in ("query_start", "seq_len", "block_table")),
        pointer("slot", torch.int64, 1),
        *([pointer("fill", dtype, 1)] if params.filled else []),
        pointer("out", dtype),
        Argument("requests", "i32", ("size", "seq_len", 0)),
        Argument("x_token", "i64", ("stride", "x", 0), align),
        Argument("table_row", "i64", ("stride", "block_table", 0)),
        Argument("cache_page", "i64", ("stride", "cache", 0), align),
    )
    grid = (tokens, -(-params.row // config.block))
    out = Buffer("out", name, (tokens, params.count, *params.shape))
    launch = Launch("recent", grid, arguments, {"num_warps": config.num_warps})
    return LaunchPlan(tuple(operands), (out,), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """A new row is read and stored, and `count` of a token are written."""
    return Work(0, (params.count + 2) * sum(new) * params.row * params.dtype.itemsize)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of a case: only the rows that are looked back at are in the cache."""
    p = case.params
    behind = p.count - 1
    pages = paged(case.new, case.lengths, p.page, generator, behind)
    cache = pages.blank(p.page, p.row, dtype=p.dtype)
    for count, length, places in zip(case.new, case.lengths, pages.places):
        old = max(0, length - count)
        where = places[max(0, old - behind) : old]
        cache[where // p.page, where % p.page] = drawn((len(where), p.row), p.dtype, generator)
    x = spread((sum(case.new),), p.row, p.align, p.dtype, generator)
    return {
        "x": x.unflatten(1, p.shape) if p.shape else x[:, 0],
        "cache": cache.view(*cache.shape[:2], *p.shape),
        "query_start": pages.query_start,
        "seq_len": pages.seq_len,
        "block_table": pages.table,
        "slot": pages.slot,
        "fill": torch.tensor(7).to(p.dtype) if p.filled else None,
        "count": p.count,
    }


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(0, 20, PAGE_SIZE, 3, False, torch.float32, 4)
    return Case(name, replace(usual, **changes), new, lengths)


IDS = {"inner": 0, "dtype": torch.int64, "filled": True, "align": 1}
BF16 = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", (1,), (1,)),
    _case("ids", (1, 1, 1), (1, 66, 200), **IDS, count=4),
    _case("alone", (2, 1), (9, 1), count=1, inner=12),
    _case("empty", (3, 0, 1, 5, 1), (2, 0, 65, 4, 0), inner=24, filled=True, dtype=torch.bfloat16, align=8),
    _case("streams", (1, 3, 1), (130, 64, 2), outer=3, inner=8, count=2, align=8),
    _case("pairs", (4, 1), (66, 20), outer=5, inner=4, count=4, dtype=torch.int32, filled=True),
    _case("verify", (3, 1, 8, 11), (3, 64, 70, 130), count=5),
    _case("prompts", (70, 1, 0, 33), (100, 1, 65, 33), **IDS),
    _case("chunk", (19, 9), (150, 9), inner=96, count=4, **BF16),
    _case("typical", (1,) * 64, (4096,) * 64, inner=512, count=4, **BF16),
    _case("largest", (8192,), (8192,), outer=4, inner=4096, count=4, **BF16),
)

SPECS = (
    KernelSpec(
        name="recent_rows",
        op=ops.CACHED_RECENT,
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
