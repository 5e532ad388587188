"""The choice of a token of each row of logits, without sorting a vocabulary.

What top_k and top_p keep is found by halving the range of the threshold; a pass over the row, or over the blocks of it
that reach so high, says which half. The largest logits of the blocks give a first bound, so that a row as language
models make them needs a pass or two before what is left fits the registers of a program. The configuration does not
depend on the number of rows: a row is summed in one order, so that a seed gives the same tokens whatever the batch.
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
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, alignment, pointer, type_name
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.ops.sample import NUMBERS, first_above, running_weights
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand

DTYPES = (torch.float32, torch.bfloat16)
LONGEST = 1 << 20
"""Logits of a row, such that the largest of each block fit a program."""
BLOCKS = (128, 1024, 2048, 4096, 8192)
HELD = (256, 1024, 2048)
WARPS = (1, 2, 4, 8, 16)
COLUMNS_A_WARP = 256


@dataclass(frozen=True)
class Params:
    """vocab: logits of a row. align: elements, of which every row starts at a multiple."""

    vocab: int
    dtype: torch.dtype
    align: int

    def __post_init__(self) -> None:
        if not 1 <= self.vocab <= LONGEST:
            raise ValueError(f"no token is chosen from {self.vocab} logits")


@dataclass(frozen=True)
class Config:
    """block: logits read at a time. held: most logits whose threshold is found in registers. Powers of two."""

    block: int
    held: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of sample."""
    given = call.arguments
    logits = given["logits"]
    if logits.dtype not in DTYPES:
        return Refused(f"logits of {logits.dtype} have no kernel")
    for name, dtype in NUMBERS.items():
        if given[name].dtype != dtype:
            return Refused(f"{name!r} of {given[name].dtype} instead of {dtype}")
        if given[name].dim() != 1 or not statically_known_true(given[name].stride(0) == 1):
            return Refused(f"{name!r} is not one number a row, side by side")
    if logits.dim() != 2 or not isinstance(logits.shape[1], int):
        return Refused("logits are not rows of one known length")
    if not 1 <= logits.shape[1] <= LONGEST:
        return Refused(f"rows of {logits.shape[1]} logits are not of 1 to {LONGEST}")
    if not statically_known_true(logits.stride(1) == 1):
        return Refused("the elements of a row do not lie side by side")
    return Params(logits.shape[1], logits.dtype, alignment(logits))


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """Large blocks, because a program alone must have many loads on their way; larger ones spill registers."""
    warps = min(limits.max_warps, WARPS[-1])
    block = next(b for b in BLOCKS if b >= min(params.vocab, warps * COLUMNS_A_WARP))
    return Config(block, HELD[-1], max(1, min(warps, block // COLUMNS_A_WARP)))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Blocks up to the row's length, 128 to 1024 logits a warp."""
    largest = next((b for b in BLOCKS if b >= params.vocab), BLOCKS[-1])
    for block, held, warps in product(BLOCKS, HELD, WARPS):
        few = block < largest and -(-params.vocab // block) > 1024
        if block > largest or few or warps > limits.max_warps:
            continue
        if max(1, block // 1024) <= warps <= max(1, block // 128):
            yield Config(block, held, warps)


def plan(params: Params, config: Config) -> LaunchPlan:
    """A launch over all blocks of all rows, and one over all rows."""
    rows: Expr = ("size", "logits", -2)
    blocks = -(-params.vocab // config.block)
    operands = [Operand("logits", type_name(params.dtype), (None, params.vocab))]
    operands += [Operand(name, type_name(dtype), (None,)) for name, dtype in NUMBERS.items()]
    logits = pointer("logits", params.dtype, params.align)
    numbers = [pointer(name, dtype, 1) for name, dtype in NUMBERS.items()]
    found = [pointer("tops", torch.float32), pointer("sums", torch.float32)]
    step = Argument("logits_row", "i64", ("stride", "logits", -2), params.align)
    chosen = [*found, pointer("held", torch.float32), pointer("ids", torch.int64), step]
    options = {"num_warps": config.num_warps}
    scratch = [Buffer(name, "float32", (rows, blocks)) for name in ("tops", "sums")]
    return LaunchPlan(
        tuple(operands),
        (Buffer("ids", "int64", (rows,)),),
        (*scratch, Buffer("held", "float32", (rows, config.held))),
        (
            Launch("survey", (rows, blocks), (logits, numbers[0], *found, step), options),
            Launch("choose", (rows,), (logits, *numbers, *chosen), options),
        ),
    )


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Ten operations a logit, each read once."""
    logits = sum(new) * params.vocab
    return Work(10 * logits, logits * params.dtype.itemsize)


KINDS: tuple[tuple[float, float, int, float], ...] = (
    (0.0, 0.0, 0, 1.0),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 50, 1.0),
    (1.0, 0.0, 0, 0.9),
    (0.5, 0.02, 0, 1.0),
    (1.3, 0.001, 40, 0.8),
    (3.0, 0.0, 2000, 0.95),
)
"""(temperature, min_p, top_k, top_p) of successive rows of a case."""


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Rows apart in a tensor of NaN, flat and steep ones by turns, a few with tokens that are forbidden."""
    params, rows = case.params, sum(case.new)
    step = ((params.vocab // params.align) | 1) * params.align + 2 * params.align
    wide = torch.full((rows + 1, step), math.nan, dtype=params.dtype)
    logits = wide[1:, params.align : params.align + params.vocab]
    logits.copy_(torch.randn(logits.shape, generator=generator))
    logits[1::2] *= 4
    if params.vocab > 2:
        logits[2::5, ::3] = -math.inf
    kinds = [KINDS[i % len(KINDS)] for i in range(rows)]
    numbers = [torch.tensor(column, dtype=dtype) for column, dtype in zip(zip(*kinds), list(NUMBERS.values())[:4])]
    noise = torch.rand(rows, generator=generator, dtype=torch.float64)
    return {"logits": logits, **dict(zip(NUMBERS, [*numbers, _centred(noise, logits, numbers)]))}


def _centred(noise: Tensor, logits: Tensor, numbers: Sequence[Tensor]) -> Tensor:
    """Noise in the middle of the share of the token that it draws, so that rounding does not decide."""
    running, _ = running_weights(logits.double(), *(n.double() if n.is_floating_point() else n for n in numbers))
    drawn = first_above(running, noise)
    before = torch.where(drawn > 0, running.gather(1, (drawn - 1).clamp(min=0)), 0)
    return ((running.gather(1, drawn) + before) / 2 / running[:, -1:])[:, 0]


def _case(name: str, rows: int, length: int, **changes: Any) -> Case[Params]:
    return Case(name, replace(Params(1009, torch.float32, 1), **changes), (1,) * rows, (length,) * rows)


BF16 = torch.bfloat16
CASES = (
    _case("odd", 14, 9),
    _case("one", 2, 3, vocab=1),
    _case("seven", 7, 1, vocab=7),
    _case("words", 14, 5, vocab=9472, align=16),
    _case("bf16", 14, 5, vocab=8195, dtype=BF16),
    _case("whole", 7, 5, vocab=129280, align=16),
    _case("half", 4, 5, vocab=151936, dtype=BF16, align=16),
    _case("typical", 64, 4096, vocab=129280, dtype=BF16, align=16),
    _case("largest", 512, 4096, vocab=262144, align=16),
)

SPECS = (
    KernelSpec(
        name="sample",
        op=ops.SAMPLE,
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
        tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
    ),
)
