"""How a sublayer reads and writes a token's streams: norm, product, gates and balance in two launches.

All streams of a token are one long row, which is multiplied in pieces: with few tokens one program would read the whole
weight alone. Matrix units take the streams as they are, since the norm is one factor of a token, applied afterwards. An
fp32 weight of bf16 streams is multiplied as three bf16 terms, which loses nothing.
"""

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
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
MOST = 8
"""Streams, whose square lies in registers."""
TOKENS = (16, 32, 64)
COLUMNS = (32, 64, 128)
PIECES = (1, 4, 16, 64, 128)
FINISHED = (1, 4, 16)
HELD = 64
"""Elements of a lane at most."""


@dataclass(frozen=True)
class Params:
    """count: streams of a token. channels: elements of each. align: elements, of which rows start at a multiple."""

    count: int
    channels: int
    rounds: int
    norm_eps: float
    eps: float
    dtype: torch.dtype
    weight_dtype: torch.dtype
    base_dtype: torch.dtype
    scale_dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST or self.channels < 1 or self.rounds < 1 or self.eps <= 0:
            raise ValueError(f"{self.count} streams of {self.channels} channels, {self.rounds} rounds, eps {self.eps}")

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.count * self.channels

    @property
    def outputs(self) -> int:
        """Rows of the weight."""
        return self.count * (2 + self.count)


@dataclass(frozen=True)
class Config:
    """block_t tokens and block_c elements are multiplied at a time, in `pieces` of a token. finish_t: tokens of a
    program that puts them together. All are powers of two."""

    block_t: int
    block_c: int
    pieces: int
    num_warps: int
    num_stages: int
    finish_t: int
    finish_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of mix_streams."""
    given = call.arguments
    streams, weight, base, scale = (given[name] for name in ("streams", "weight", "base", "scale"))
    kinds = [t.dtype for t in (streams, weight, base, scale)]
    if not all(kind in DTYPES for kind in kinds):
        return Refused(f"streams, weight, base and scale in {kinds}")
    count, channels = streams.shape[-2:]
    if not isinstance(count, int) or not isinstance(channels, int) or not 1 <= count <= MOST:
        return Refused(f"{count} streams of {channels} channels are not 1 to {MOST} of a fixed size")
    if streams.dim() < 3 or not all(statically_known_true(n == 1) for n in streams.shape[:-3]):
        return Refused("streams under more sizes than tokens")
    if given["rounds"] < 1 or given["eps"] <= 0:
        return Refused(f"{given['rounds']} rounds with eps {given['eps']}")
    if not side_by_side(streams, weight, base, scale):
        return Refused("the elements of a row do not lie side by side")
    return Params(
        count=count,
        channels=channels,
        rounds=int(given["rounds"]),
        norm_eps=float(given["norm_eps"]),
        eps=float(given["eps"]),
        dtype=streams.dtype,
        weight_dtype=weight.dtype,
        base_dtype=base.dtype,
        scale_dtype=scale.dtype,
        align=alignment(streams, weight),
    )


def _tile(params: Params) -> int:
    """Rows of the weight's tile."""
    return max(16, next_power_of_2(params.outputs))


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    steps, outputs = next_power_of_2(-(-params.width // config.block_c)), _tile(params)
    size = max(params.dtype.itemsize, params.weight_dtype.itemsize)
    shared = config.num_stages * (config.block_t + outputs) * config.block_c * size
    # fp32 is multiplied out of registers, and an fp32 weight of bf16 streams is taken apart there
    kinds = {params.dtype, params.weight_dtype}
    factor = 1 if kinds == {torch.bfloat16} else 4 if params.dtype == torch.float32 else 2
    smallest = (config.block_t, config.block_c) == (TOKENS[0], COLUMNS[0])
    light = smallest or (config.block_t + outputs) * config.block_c * factor <= HELD * 32 * config.num_warps
    square = next_power_of_2(params.count) ** 2
    light = light and config.pieces * config.finish_t * square <= HELD * 32 * config.finish_warps
    warps = max(config.num_warps, config.finish_warps) <= limits.max_warps
    return shared <= limits.shared_bytes and light and config.pieces <= steps and warps


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Pieces until every core has two programs; tokens of one that finishes, as many as keep the cores busy."""
    legal = list(space(params, limits))
    block_t = next((n for n in TOKENS if tokens <= n * limits.cores), TOKENS[-1])
    wanted = max(1, 2 * limits.cores // -(-tokens // block_t))

    def distance(config: Config) -> tuple[int, ...]:
        pieces = abs(next_power_of_2(wanted).bit_length() - config.pieces.bit_length())
        finish = abs(config.finish_t - max(1, min(FINISHED[-1], tokens // limits.cores)))
        tile = (abs(config.block_t - block_t), finish, -config.block_c)
        return (pieces, -config.pieces, *tile, -config.num_stages, config.finish_warps)

    return min(legal, key=distance)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    for choice in product(TOKENS, COLUMNS, PIECES, (4,), (1, 3), FINISHED, (1, 4)):
        config = Config(*choice)
        if _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """Products of pieces, and what is made of them."""
    align, count = params.align, params.count
    tokens: Expr = ("size", "streams", -3)
    outputs = _tile(params)
    kinds = ("dtype", "weight_dtype", "base_dtype", "scale_dtype")
    name, weight_name, base_name, scale_name = (type_name(getattr(params, kind)) for kind in kinds)
    operands = (
        Operand("streams", name, (None, count, params.channels)),
        Operand("weight", weight_name, (params.outputs, params.width)),
        Operand("base", base_name, (params.outputs,)),
        Operand("scale", scale_name, (3,)),
    )
    results = (
        Buffer("pre", "float32", (tokens, count)),
        Buffer("post", "float32", (tokens, count)),
        Buffer("comb", "float32", (tokens, count, count)),
    )
    scratch = (
        Buffer("sums", "float32", (config.pieces, tokens, outputs)),
        Buffer("squares", "float32", (config.pieces, tokens)),
    )
    parts = tuple(pointer(b.name, torch.float32) for b in scratch)
    many = Argument("tokens", "i32", tokens)
    first = (
        pointer("streams", params.dtype, align),
        pointer("weight", params.weight_dtype, align),
        *parts,
        many,
        Argument("stream_token", "i64", ("stride", "streams", -3), align),
        Argument("stream_row", "i64", ("stride", "streams", -2), align),
        Argument("weight_row", "i64", ("stride", "weight", 0), align),
    )
    second = (
        *parts,
        pointer("base", params.base_dtype, 1),
        pointer("scale", params.scale_dtype, 1),
        *(pointer(b.name, torch.float32) for b in results),
        many,
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = (
        Launch("multiply", (("cdiv", tokens, config.block_t), config.pieces), first, options),
        Launch("finish", (("cdiv", tokens, config.finish_t),), second, {"num_warps": config.finish_warps}),
    )
    return LaunchPlan(operands, results, scratch, launches)


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Streams and weight are read once, the three results are written."""
    tokens, weights = sum(new), params.width * params.outputs
    read = tokens * params.width * params.dtype.itemsize + weights * params.weight_dtype.itemsize
    return Work(2 * tokens * weights, read + 4 * tokens * params.outputs)


def rows_of(shape: tuple[int, ...], align: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Random rows [..., N] that start at odd multiples of `align`, apart in NaN."""
    width = shape[-1]
    gap = ((-(-width // align)) | 1) * align
    room = torch.full((*shape[:-1], gap), math.nan, dtype=dtype)
    held: Tensor = room[..., :width]
    return held.copy_(torch.randn(shape, generator=generator))


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Streams and weights whose rows lie apart; the weight gives values of order 1."""
    p, tokens = case.params, sum(case.new)
    weight = rows_of((p.outputs, p.width), p.align, p.weight_dtype, generator)
    weight *= p.width**-0.5
    return {
        "streams": rows_of((1, tokens, p.count, p.channels), p.align, p.dtype, generator),
        "weight": weight,
        "base": torch.randn(p.outputs, generator=generator).to(p.base_dtype),
        "scale": torch.rand(3, generator=generator).to(p.scale_dtype) + 0.5,
        "norm_eps": p.norm_eps,
        "rounds": p.rounds,
        "eps": p.eps,
    }


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    wide = torch.float32
    usual = Params(4, 96, 20, 1e-6, 1e-6, wide, wide, wide, wide, 4)
    return Case(name, replace(usual, **changes), (tokens,), (tokens,))


HALF = {"dtype": torch.bfloat16, "align": 16}
ALL_HALF = {**HALF, **dict.fromkeys(("weight_dtype", "base_dtype", "scale_dtype"), torch.bfloat16)}
CASES = (
    _case("one", 2, count=1, channels=5, rounds=1, align=1),
    _case("three", 7, count=3, channels=48, rounds=3),
    _case("odd", 33, count=5, channels=30, align=2, norm_eps=1e-3, eps=1e-3),
    _case("mixed", 20, weight_dtype=torch.bfloat16, rounds=2),
    _case("half", 19, **ALL_HALF),
    _case("wide", 5, channels=112, **HALF),
    _case("typical", 64, channels=5120, **HALF),
    _case("largest", 8192, channels=7168, **ALL_HALF),
)

SPECS = (
    KernelSpec(
        name="mix_streams",
        op=ops.MIX_STREAMS,
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
        tolerance={torch.float32: 4e-6, torch.bfloat16: 4e-6},
    ),
)
