"""Sinkhorn's rounds alone, for residual streams that are mixed in a way of their own: tokens share a program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, next_power_of_2, pointer, type_name
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import Argument, Buffer, Expr, Launch, LaunchPlan, Operand
from deepinfer_compile.templates.mix_streams import DTYPES, MOST, rows_of

TOKENS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Params:
    """count: streams of a token."""

    count: int
    rounds: int
    eps: float
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 1 <= self.count <= MOST or self.rounds < 1 or self.eps <= 0:
            raise ValueError(f"{self.count} streams, {self.rounds} rounds, eps {self.eps}")


@dataclass(frozen=True)
class Config:
    """block_t: tokens of one program, a power of two."""

    block_t: int
    num_warps: int


def bind(call: Call) -> Params | Refused:
    """Params of a call of balance_streams."""
    logits, rounds, eps = (call.arguments[name] for name in ("logits", "rounds", "eps"))
    count = logits.shape[-1]
    if logits.dtype not in DTYPES or not isinstance(count, int) or not 1 <= count <= MOST:
        return Refused(f"{count} streams in {logits.dtype} are not 1 to {MOST} of a fixed number")
    if logits.dim() < 3 or not all(statically_known_true(n == 1) for n in logits.shape[:-3]):
        return Refused("matrices under more sizes than tokens")
    packed = statically_known_true(logits.stride(-1) == 1) and statically_known_true(logits.stride(-2) == count)
    if rounds < 1 or eps <= 0 or not (packed or count == 1):
        return Refused(f"{rounds} rounds with eps {eps}, or matrices that do not lie in one piece")
    return Params(count, int(rounds), float(eps), logits.dtype)


def _is_legal(params: Params, config: Config, limits: Limits) -> bool:
    held = config.block_t * next_power_of_2(params.count) ** 2
    useful = config.num_warps == 1 or held >= 32 * config.num_warps
    return useful and held <= 2048 * config.num_warps and config.num_warps <= limits.max_warps


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """As many tokens as keep all cores busy, in one warp if it holds them."""
    legal = [c for c in space(params, limits) if c.block_t == 1 or c.block_t * limits.cores <= tokens]
    return max(legal, key=lambda c: (c.block_t, -c.num_warps))


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Every legal Config in a fixed order."""
    for block, warps in product(TOKENS, (1, 2, 4)):
        config = Config(block, warps)
        if _is_legal(params, config, limits):
            yield config


def plan(params: Params, config: Config) -> LaunchPlan:
    """One launch."""
    count = params.count
    tokens: Expr = ("size", "logits", -3)
    arguments = (
        pointer("logits", params.dtype, 1),
        pointer("out", torch.float32),
        Argument("tokens", "i32", tokens),
        Argument("row", "i64", ("stride", "logits", -3)),
    )
    launch = Launch("balance", (("cdiv", tokens, config.block_t),), arguments, {"num_warps": config.num_warps})
    operand = Operand("logits", type_name(params.dtype), (None, count, count), packed=2)
    return LaunchPlan((operand,), (Buffer("out", "float32", (tokens, count, count)),), (), (launch,))


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """Matrices are read and written."""
    numbers = sum(new) * params.count**2
    return Work(4 * params.rounds * numbers, numbers * (params.dtype.itemsize + 4))


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Matrices with NaN between them."""
    p, tokens = case.params, sum(case.new)
    logits = rows_of((1, tokens, p.count**2), 1, p.dtype, generator)
    return {"logits": logits.unflatten(-1, (p.count, p.count)), "rounds": p.rounds, "eps": p.eps}


def _case(name: str, tokens: int, **changes: Any) -> Case[Params]:
    return Case(name, replace(Params(4, 20, 1e-6, torch.float32), **changes), (tokens,), (tokens,))


CASES = (
    _case("one", 1, count=1, rounds=1),
    _case("three", 7, count=3, rounds=3),
    _case("five", 70, count=5, eps=1e-3),
    _case("half", 33, dtype=torch.bfloat16, rounds=2),
    _case("typical", 64),
    _case("largest", 8192, count=8),
)

SPECS = (
    KernelSpec(
        name="balance_streams",
        op=ops.BALANCE_STREAMS,
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
        tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},
    ),
)
