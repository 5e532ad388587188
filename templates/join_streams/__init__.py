"""Residual streams around a sublayer: their weighted sum before it, all of them anew after it. One template.

Bound by memory: every stream is read once, for all the streams it goes into; weights are a few numbers of a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.mix_streams import DTYPES, MOST, rows_of

BLOCKS = (64, 128, 256, 512, 1024, 2048)
HELD = 64
"""Elements of a lane at most."""


@dataclass(frozen=True)
class Params:
    """count: streams of a token. channels: elements of each. joins: new streams, else their sum. align: elements, of
    which every row of streams and of what is added starts at a multiple."""

    count: int
    channels: int
    joins: bool
    dtype: torch.dtype
    weight_dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST or self.channels < 1:
            raise ValueError(f"{self.count} streams of {self.channels} channels")


@dataclass(frozen=True)
class Config:
    """block_c: channels of one program, a power of two."""

    block_c: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of join_streams or collapse_streams."""
    given = call.arguments
    streams, y = given["streams"], given.get("y")
    weights = [given[name] for name in ("pre", "post", "comb") if name in given]
    kind = weights[0].dtype
    if streams.dtype not in DTYPES or kind not in DTYPES or (y is not None and y.dtype != streams.dtype):
        return Refused(f"streams in {streams.dtype} with weights in {kind}{'' if y is None else f', y in {y.dtype}'}")
    if any(w.dtype != kind for w in weights):
        return Refused("weights of several types")
    count, channels = streams.shape[-2:]
    if not isinstance(count, int) or not isinstance(channels, int) or not 1 <= count <= MOST:
        return Refused(f"{count} streams of {channels} channels are not 1 to {MOST} of a fixed size")
    if streams.dim() < 3 or not all(statically_known_true(n == 1) for n in streams.shape[:-3]):
        return Refused("streams under more sizes than tokens")
    rows = (streams,) if y is None else (streams, y)
    if not side_by_side(*rows, *weights):
        return Refused("the elements of a row do not lie side by side")
    return Params(count, channels, y is not None, streams.dtype, kind, alignment(*rows))


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    held = config.block_c * (next_power_of_2(params.count) if params.joins else 1)
    fits = held <= HELD * 32 * config.num_warps and config.num_warps <= limits.max_warps
    useful = config.num_warps == 1 or config.block_c >= 32 * config.num_warps
    return fits and useful and config.block_c < 2 * max(BLOCKS[1], params.channels)


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Channels in as few programs as keep all cores busy, eight of them a lane."""
    legal = list(space(params, limits))
    wanted = params.channels * tokens // (2 * limits.cores)
    block = max((c.block_c for c in legal if c.block_c <= max(wanted, 256)), default=legal[0].block_c)
    return min((c for c in legal if c.block_c == block), key=lambda c: abs(c.num_warps - block // 256))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    for block, warps in product(BLOCKS, (1, 2, 4, 8)):
        config = Config(block, warps)
        if _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch over tokens and parts of their channels."""
    count, channels, align = params.count, params.channels, params.align
    name, kind = type_name(params.dtype), type_name(params.weight_dtype)
    tokens: Expr = ("size", "streams", -3)

    def step(argument: str, tensor: str, dimension: int, align: int = 1) -> Argument:
        return Argument(argument, "i64", ("stride", tensor, dimension), align)

    operands = [Operand("streams", name, (None, count, channels))]
    steps = [step("stream_token", "streams", -3, align), step("stream_row", "streams", -2, align)]
    if params.joins:
        operands += [Operand("y", name, (None, channels)), Operand("post", kind, (None, count))]
        operands.append(Operand("comb", kind, (None, count, count)))
        steps += [step("y_token", "y", -2, align), step("post_token", "post", -2)]
        steps += [step("comb_token", "comb", -3), step("comb_row", "comb", -2)]
        shape: tuple[Expr, ...] = (tokens, count, channels)
    else:
        operands.append(Operand("pre", kind, (None, count)))
        steps.append(step("pre_token", "pre", -2))
        shape = (tokens, channels)
    given = {"streams": align, "y": align}
    arguments = (
        *(pointer(o.name, getattr(torch, o.dtype), given.get(o.name, 1)) for o in operands),
        pointer("out", params.dtype),
        *steps,
    )
    entry = "join" if params.joins else "collapse"
    grid = (tokens, -(-channels // config.block_c))
    launch = Launch(entry, grid, arguments, {"num_warps": config.num_warps})
    return LaunchPlan(tuple(operands), (Buffer("out", name, shape),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Streams are read, and written anew or summed."""
    count, elements = params.count, sum(new) * params.channels
    weights = sum(new) * count * ((1 + count) if params.joins else 1) * params.weight_dtype.itemsize
    moved = elements * ((2 * count + 1) if params.joins else (count + 1)) * params.dtype.itemsize
    return Work(2 * elements * count * ((1 + count) if params.joins else 1), moved + weights)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Streams that lie apart in NaN, and so do their weights."""
    p, tokens = case.params, sum(case.new)

    def weights(*shape: int) -> Tensor:
        return rows_of((1, tokens, *shape), 1, p.weight_dtype, generator)

    streams = rows_of((1, tokens, p.count, p.channels), p.align, p.dtype, generator)
    if not p.joins:
        return {"streams": streams, "pre": weights(p.count)}
    y = rows_of((1, tokens, p.channels), p.align, p.dtype, generator)
    return {"streams": streams, "y": y, "post": weights(p.count), "comb": weights(p.count, p.count)}


def _cases(*, joins: bool) -> tuple[Case[Params], ...]:
    usual = Params(4, 96, joins, torch.float32, torch.float32, 4)
    half = {"dtype": torch.bfloat16, "align": 16}

    def made(name: str, tokens: int, **changes: Any) -> Case[Params]:
        return Case(name, replace(usual, **changes), (tokens,), (tokens,))

    return (
        made("one", 2, count=1, channels=5, align=1),
        made("three", 7, count=3, channels=48),
        made("odd", 9, count=5, channels=330, align=2),
        made("mixed", 4, weight_dtype=torch.bfloat16),
        made("half", 19, channels=272, **half),
        made("narrow", 3, count=8, weight_dtype=torch.bfloat16, **half),
        made("typical", 64, channels=5120, **half),
        made("largest", 8192, channels=7168, **half),
    )


def _spec(op: Op, *, joins: bool) -> KernelSpec[Params, Config]:
    make = partial(KernelSpec, name="join_streams", op=op, params=Params, config=Config)
    return make(
        sources={"triton": "triton.py.j2"},
        bind=bind,
        default=default,
        space=space,
        plan=plan,
        work=work,
        cases=_cases(joins=joins),
        inputs=inputs,
        tolerance={torch.float32: 2e-6, torch.bfloat16: 2**-8},
    )


SPECS = (_spec(ops.JOIN_STREAMS, joins=True), _spec(ops.COLLAPSE_STREAMS, joins=False))
