"""A linear layer for few tokens, bound by reading the weight once.

Libraries choose their tiles for many rows; with a handful, what counts is that every core has enough of the weight in
flight. Narrow tiles give wide layers that many programs, and layers too narrow for that are split over their terms,
the parts added in a fixed order by a second launch. A single token leaves the matrix units out: whole rows of the
weight are multiplied and added up as they come, which needs no parts.

A wide linear (half precision in, fp32 out) is ours at any number of tokens: a library would be given casts of both
operands, and products in fp32. Many tokens take larger tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
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
from deepinfer_compile.runtime.launch import EARLY, Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
BLOCK_T = 16
"""Tokens of a tile: the least that the matrix units take."""
FEW = 4
"""Tokens up to which this beats a library."""
HELD = 128
"""Products that a thread adds up side by side."""
JOINED = 512
LEAST_TERMS = 1024
"""Terms of a part, below which its beginning and end cost more than what it reads."""
MOST_PARTS = 16
MOST_SHARES = 4
"""Parts of a wide linear, whose larger tiles need fewer."""
SHAPES = ((128, 128), (128, 64), (64, 64), (BLOCK_T, 64), (BLOCK_T, 32), (BLOCK_T, 16))
"""Tokens and weight rows of the tiles that a wide linear chooses from."""
BEGIN = 20_000
"""Elements that a core reads in the time in which a program begins and ends."""


@dataclass(frozen=True)
class Params:
    """terms: elements of a token. lines: rows of the weight. chosen: only of the tokens that `rows` names. align:
    elements, of which rows start at a multiple. wide: results are fp32 whatever the operands are."""

    terms: int
    lines: int
    dtype: torch.dtype
    biased: bool
    align: int
    chosen: bool = False
    wide: bool = False

    @property
    def result(self) -> torch.dtype:
        """What the results are."""
        return torch.float32 if self.wide else self.dtype

    def __post_init__(self) -> None:
        if min(self.terms, self.lines) < 1:
            raise ValueError(f"a weight of {self.lines} x {self.terms}")


@dataclass(frozen=True)
class Config:
    """block_t: tokens of a tile, 1 for a token a program without matrix units. block_n: weight rows of a tile.
    block_k: terms read at a time. split: parts of the terms, a power of two. pdl: a token a program starts before the
    launch before it has ended, and lets the next one do so."""

    block_t: int
    block_n: int
    block_k: int
    split: int
    num_warps: int
    num_stages: int
    pdl: bool = False


def bind(call: Call) -> Params | Refused:
    """Params of a call of linear, wide_linear or output_projection."""
    given = call.arguments
    x, weight, bias, chosen = given["x"], given["weight"], given["bias"], given.get("rows")
    if weight.dtype not in DTYPES or any(t is not None and t.dtype != weight.dtype for t in (x, bias)):
        return Refused(f"a weight of {weight.dtype} for rows of {x.dtype}")
    result = given.get("dtype", weight.dtype)
    if result not in (weight.dtype, torch.float32):
        return Refused(f"results in {result} of a weight of {weight.dtype}")
    if x.dim() < 2 or weight.dim() != 2:
        return Refused(f"{x.dim()} dimensions by {weight.dim()}; give rows and a matrix")
    if not all(isinstance(n, int) for n in weight.shape) or not all(
        statically_known_true(n == 1) for n in x.shape[:-2]
    ):
        return Refused("rows under more than one size; collapse them to one")
    if chosen is not None and (chosen.dtype != torch.int64 or not statically_known_true(chosen.stride(0) == 1)):
        return Refused(f"tokens chosen by {chosen.dtype}, or by numbers with gaps")
    for tensor in (x, weight, bias):
        if tensor is not None and not side_by_side(tensor):
            return Refused("the elements of a row do not lie side by side")
    lines, terms = weight.shape
    align = alignment(x, weight, bias)
    return Params(terms, lines, weight.dtype, bias is not None, align, chosen is not None, result != weight.dtype)


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    tile = (config.block_t + config.block_n) * config.block_k * params.dtype.itemsize
    parts = config.split == 1 or params.terms // config.split >= min(LEAST_TERMS, config.block_k)
    fits = tile * config.num_stages <= limits.shared_bytes and config.num_warps <= limits.max_warps
    held = config.block_n * config.block_k // (32 * config.num_warps)
    light = config.block_t > 1 or held <= HELD
    return fits and parts and light and config.block_k <= max(16, next_power_of_2(params.terms))


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """The widest tile with which programs fill the cores one and a half times; for one token, long rows."""
    if tokens == 1:
        return _single(params, limits)
    wanted = limits.cores * 3 // 2
    for block_n in (64, 32, 16):
        programs = -(-params.lines // block_n)
        most = min(MOST_PARTS, max(1, params.terms // LEAST_TERMS))
        if programs * most >= wanted or block_n == 16:
            split = min(next_power_of_2(max(1, -(-wanted // programs))), 1 << (most.bit_length() - 1))
            for block_k, stages in product((256 if block_n < 64 else 128, 128, 64, 32, 16), (4, 2, 1)):
                config = Config(BLOCK_T, block_n, block_k, split, min(4, limits.max_warps), stages)
                if _is_legal(params, config, limits):
                    return config
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def default_wide(params: Params, limits: Limits, tokens: int) -> Config:
    """The tile and the parts with which a core reads least, and waits least for programs to begin; for one token, long
    rows."""
    if tokens == 1:
        return _single(params, limits)
    most = min(MOST_SHARES, max(1, params.terms // LEAST_TERMS))
    splits = [n for n in (1, 2, 4) if n <= most]

    def cost(shape: tuple[int, int], split: int) -> float:
        programs = -(-tokens // shape[0]) * -(-params.lines // shape[1]) * split
        joined = 0.0 if split == 1 else 4 * split * tokens * params.lines / limits.cores + 2 * BEGIN
        return -(-programs // limits.cores) * (sum(shape) * params.terms / split + BEGIN) + joined

    for shape, split in sorted(product(SHAPES, splits), key=lambda chosen: cost(*chosen)):
        warps = min(8 if shape[0] == 128 else 4, limits.max_warps)
        for block_k, stages in product((256, 128, 64, 32, 16) if shape[0] == BLOCK_T else (64, 32, 16), (4, 2, 1)):
            config = Config(*shape, block_k, split, warps, stages)
            if _is_legal(params, config, limits):
                return config
    raise ValueError(f"no tile of {params} fits {limits.shared_bytes} bytes")


def space_wide(params: Params, limits: Limits) -> Iterator[Config]:
    """As `space`, and tiles of many tokens."""
    yield from space(params, limits)
    least = min(32, next_power_of_2(params.terms))
    for values in product((64, 128), (64, 128), (16, 32, 64, 128), (1, 2, 4), (4, 8), (1, 2, 3, 4)):
        config = Config(*values)
        if config.block_k >= least and _is_legal(params, config, limits):
            yield config


def _single(params: Params, limits: Limits) -> Config:
    most = max(16, next_power_of_2(params.terms))
    block_k = next((k for k in (1024, 512, 256) if params.terms % k == 0), min(1024, most))
    block_n = next((n for n in (8, 4, 2) if -(-params.lines // n) >= limits.cores), 1)
    warps = max(1, min(4, block_n * block_k // 512, limits.max_warps))
    return Config(1, block_n, block_k, 1, warps, 1, limits.pdl)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order; of terms, none that would leave most of a row's read unused."""
    least = min(64, next_power_of_2(params.terms))
    tiles = product((BLOCK_T,), (16, 32, 64, 128), (16, 32, 64, 128, 256), (1, 2, 4, 8, 16), (2, 4, 8), (1, 2, 3, 4))
    rows = product((1,), (1, 2, 4, 8, 16), (16, 32, 64, 128, 256, 512, 1024), (1, 2, 4), (1, 2, 4, 8), (1, 3))
    for config in (Config(*values, limits.pdl and values[0] == 1) for values in chain(rows, tiles)):
        if config.block_k >= least and _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """The products, and their sum where there are parts."""
    name, align = type_name(params.dtype), params.align
    tokens: Expr = ("size", "rows", 0) if params.chosen else ("size", "x", -2)
    operands = [
        Operand("x", name, (None, params.terms)),
        Operand("weight", name, (params.lines, params.terms)),
        *([Operand("bias", name, (params.lines,))] if params.biased else []),
        *([Operand("rows", "int64", (None,))] if params.chosen else []),
    ]
    bias = [pointer("bias", params.dtype, align)] if params.biased else []
    out = pointer("out", params.result)
    split = config.split > 1
    ends = [pointer("part", torch.float32)] if split else [*bias, out]
    given = [pointer("x", params.dtype, align), pointer("weight", params.dtype, align), *ends]
    given += [Argument("chosen", "*i64", "rows", torch.int64.itemsize)] if params.chosen else []
    given.append(Argument("tokens", "i32", tokens))
    given += [Argument("x_token", "i64", ("stride", "x", -2), align)]
    given += [Argument("weight_line", "i64", ("stride", "weight", 0), align)]
    grid: tuple[Expr, ...] = (-(-params.lines // config.block_n), config.split, ("cdiv", tokens, config.block_t))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = [Launch("linear", grid, tuple(given), {**options, EARLY: 1} if config.pdl else options)]
    if split:
        joined = (pointer("part", torch.float32), *bias, out, Argument("tokens", "i32", tokens))
        launches.append(Launch("join", (tokens, -(-params.lines // JOINED)), joined, {"num_warps": 4}))
    scratch = (Buffer("part", "float32", (config.split, tokens, params.lines)),) if split else ()
    results = (Buffer("out", type_name(params.result), (tokens, params.lines)),)
    return LaunchPlan(tuple(operands), results, scratch, tuple(launches))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Weight and bias are read once, tokens and results moved once."""
    tokens = sum(new)
    read = (params.lines * (params.terms + params.biased) + tokens * params.terms) * params.dtype.itemsize
    places = tokens * torch.int64.itemsize if params.chosen else 0
    written = tokens * params.lines * params.result.itemsize
    return Work(2 * tokens * params.lines * params.terms, read + places + written)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows apart from each other in NaN. With chosen tokens there are as many as the first length, and those that
    nobody names are NaN."""
    params, tokens = case.params, sum(case.new)

    def rows(count: int) -> Tensor:
        gap = ((params.terms // params.align) | 1) + 2
        wide = torch.full((count + 1, gap * params.align), math.nan, dtype=params.dtype)
        found: Tensor = wide[1:, params.align : params.align + params.terms]
        found.copy_(torch.randn(found.shape, generator=generator))
        return found

    bias = torch.randn(params.lines, generator=generator).to(params.dtype) if params.biased else None
    found: dict[str, Any] = {"weight": rows(params.lines).mul_(params.terms**-0.5), "bias": bias}
    if params.wide:
        return {"x": rows(tokens), **found, "dtype": params.result}
    if not params.chosen:
        return {"x": rows(tokens), **found}
    chosen = torch.randint(0, case.lengths[0], (tokens,), generator=generator)
    x = rows(case.lengths[0])
    x[torch.ones(len(x), dtype=torch.bool).index_fill(0, chosen, False)] = math.nan
    return {"x": x, "rows": chosen, **found}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    return Case(name, replace(Params(96, 80, torch.float32, False, 4), **changes), (tokens,), (tokens,))


BF16 = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", 2, terms=1, lines=1, align=1),
    _case("odd", 3, terms=130, lines=67, biased=True, align=1),
    _case("even", 16, terms=256, lines=64, **BF16),
    _case("single", 1, terms=300, lines=37, biased=True, align=1),
    _case("row", 1, terms=2048, lines=520, **BF16),
    _case("many", 33, terms=40, lines=24, biased=True, **BF16),
    _case("split", 5, terms=2100, lines=40, align=2),
    _case("narrow", 1, terms=4096, lines=48, biased=True, **BF16),
    replace(_case("typical", 16, terms=7168, lines=18432, **BF16), lengths=(4096,)),
    replace(_case("largest", 16, terms=18432, lines=129280, **BF16), lengths=(4096,)),
)

CHOSEN = tuple(
    replace(_case(name, tokens, chosen=True, **changes), lengths=(length,))
    for name, tokens, length, changes in (
        ("one", 1, 2, {"terms": 1, "lines": 1, "align": 1}),
        ("single", 1, 9, {"terms": 300, "lines": 37, "biased": True, "align": 1}),
        ("some", 3, 70, {"terms": 130, "lines": 67, "biased": True, "align": 1}),
        ("twice", 7, 2, BF16),
        ("typical", 4, 4096, {"terms": 7168, "lines": 129280, **BF16}),
    )
)

WIDE = tuple(
    _case(name, tokens, wide=True, **{**BF16, **changes})
    for name, tokens, changes in (
        ("one", 2, {"terms": 1, "lines": 1, "align": 1}),
        ("odd", 3, {"terms": 130, "lines": 67, "biased": True, "align": 1}),
        ("single", 1, {"terms": 2048, "lines": 40}),
        ("many", 150, {"terms": 72, "lines": 72, "biased": True}),
        ("split", 5, {"terms": 2100, "lines": 40, "align": 2}),
        ("typical", 2048, {"terms": 7168, "lines": 256}),
    )
)


def _spec(op: Op, cases: tuple[Case[Params], ...]) -> KernelSpec[Params, Config]:
    return KernelSpec(
        name="linear",
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
        inputs=inputs,
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
        few=FEW,
    )


SPECS = (
    _spec(ops.LINEAR, CASES),
    _spec(ops.OUTPUT_PROJECTION, CHOSEN),
    replace(
        _spec(ops.WIDE_LINEAR, WIDE),
        default=default_wide,
        space=space_wide,
        tolerance={torch.bfloat16: 5e-6},
        few=None,
    ),
)
