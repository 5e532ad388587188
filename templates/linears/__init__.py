"""Linear layers of one input in one launch, for few tokens, each through a weight of its own.

A launch has a price, and so has filling the chip and emptying it again: layers that follow each other on the same
input pay both once here. The weights stay where they are. Everything else is as in `linear`, whose tiles this takes
for the rows of all weights together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, KernelSpec, Limits, Refused, pointer, type_name
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.runtime.launch import EARLY, Argument, Buffer, Launch, LaunchPlan, Operand
from deepinfer_compile.templates import linear
from deepinfer_compile.templates.linear import FEW, JOINED, Config

MOST = 3
"""Weights of one call: query, key and value."""


@dataclass(frozen=True)
class Params:
    """terms: elements of a token. lines: rows of each weight. biased: which of them have a bias. align: elements, of
    which rows start at a multiple."""

    terms: int
    lines: tuple[int, ...]
    dtype: torch.dtype
    biased: tuple[bool, ...]
    align: int

    def __post_init__(self) -> None:
        if not 2 <= len(self.lines) <= MOST or len(self.biased) != len(self.lines):
            raise ValueError(f"{len(self.lines)} weights and {len(self.biased)} biases; give 2 to {MOST} of both")
        if min(self.terms, *self.lines) < 1:
            raise ValueError(f"weights of {self.lines} x {self.terms}")

    def each(self) -> tuple[linear.Params, ...]:
        """The layers on their own."""
        given = zip(self.lines, self.biased, strict=True)
        return tuple(linear.Params(self.terms, n, self.dtype, biased, self.align) for n, biased in given)

    def together(self) -> linear.Params:
        """The layer with the rows of all weights."""
        return linear.Params(self.terms, sum(self.lines), self.dtype, any(self.biased), self.align)


def bind(call: Call) -> Params | Refused:
    """Params of a call of linears."""
    x, weights, biases = (call.arguments[name] for name in ("x", "weights", "biases"))
    if not 2 <= len(weights) <= MOST:
        return Refused(f"{len(weights)} weights; give 2 to {MOST}")
    found = []
    for weight, bias in zip(weights, biases, strict=True):
        one = linear.bind(Call(ops.LINEAR, {"x": x, "weight": weight, "bias": bias}, call.phase))
        if isinstance(one, Refused):
            return one
        found.append(one)
    lines, biased = tuple(p.lines for p in found), tuple(p.biased for p in found)
    return Params(found[0].terms, lines, found[0].dtype, biased, min(p.align for p in found))


def default(params: Params, limits: Limits, tokens: int) -> Config:
    """That of one layer with as many rows."""
    return linear.default(params.together(), limits, tokens)


def space(params: Params, limits: Limits) -> Iterator[Config]:
    """Those of one layer with as many rows."""
    return linear.space(params.together(), limits)


def plan(params: Params, config: Config) -> LaunchPlan:
    """The products of every weight, and their sums where there are parts."""
    name, align, tokens = type_name(params.dtype), params.align, ("size", "x", -2)
    every = range(len(params.lines))
    operands = [Operand("x", name, (None, params.terms))]
    operands += [Operand(f"weights_{n}", name, (params.lines[n], params.terms)) for n in every]
    operands += [Operand(f"biases_{n}", name, (params.lines[n],)) for n in every if params.biased[n]]
    results = tuple(Buffer(f"out_{n}", name, (tokens, params.lines[n])) for n in every)
    ends = [pointer(f"biases_{n}", params.dtype, align) for n in every if params.biased[n]]
    ends += [pointer(buffer.name, params.dtype) for buffer in results]
    split, part = config.split > 1, pointer("part", torch.float32)
    given = [pointer(held, params.dtype, align) for held in ("x", *(f"weights_{n}" for n in every))]
    given += [part] if split else ends
    given += [Argument("tokens", "i32", tokens), Argument("x_token", "i64", ("stride", "x", -2), align)]
    given += [Argument(f"line_{n}", "i64", ("stride", f"weights_{n}", 0), align) for n in every]
    grid = (_blocks(params, config.block_n), config.split, ("cdiv", tokens, config.block_t))
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    launches = [Launch("linears", grid, tuple(given), {**options, EARLY: 1} if config.pdl else options)]
    if split:
        joined = (part, *ends, Argument("tokens", "i32", tokens))
        launches.append(Launch("join", (tokens, _blocks(params, JOINED)), joined, {"num_warps": 4}))
    scratch = (Buffer("part", "float32", (config.split, tokens, sum(params.lines))),) if split else ()
    return LaunchPlan(tuple(operands), results, scratch, tuple(launches))


def _blocks(params: Params, size: int) -> int:
    """Blocks of that many rows, none with rows of two weights."""
    return sum(-(-lines // size) for lines in params.lines)


def work(params: Params, new: Sequence[int], lengths: Sequence[int]) -> Work:
    """That of each layer, the tokens read once."""
    each = [linear.work(one, new, lengths) for one in params.each()]
    again = (len(each) - 1) * sum(new) * params.terms * params.dtype.itemsize
    return Work(sum(w.flops for w in each), sum(w.bytes for w in each) - again)


def inputs(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Those of each layer, all of the first one's tokens."""
    given = [linear.inputs(Case("", one, case.new, case.lengths), generator) for one in case.params.each()]
    return {"x": given[0]["x"], "weights": [g["weight"] for g in given], "biases": [g["bias"] for g in given]}


def _case(name: str, tokens: int, lines: tuple[int, ...], biased: str = "", **changes: Any) -> Case[Params]:
    """biased: the numbers of the weights with a bias."""
    found = tuple(str(n) in biased for n in range(len(lines)))
    return Case(name, replace(Params(96, lines, torch.float32, found, 4), **changes), (tokens,), (tokens,))


BF16: dict[str, Any] = {"dtype": torch.bfloat16, "align": 16}
CASES = (
    _case("one", 2, (1, 1), terms=1, align=1),
    _case("odd", 3, (67, 1, 20), "12", terms=130, align=1),
    _case("even", 16, (64, 16), terms=256, **BF16),
    _case("single", 1, (37, 70), "01", terms=300, align=1),
    _case("row", 1, (520, 128, 256), "02", terms=2048, **BF16),
    _case("many", 33, (24, 40), "0", terms=40, **BF16),
    _case("split", 5, (40, 520, 9), "02", terms=2100, align=2),
    _case("narrow", 1, (48, 16), "1", terms=4096, **BF16),
    replace(_case("typical", 4, (1536, 576), terms=7168, **BF16), lengths=(4096,)),
    replace(_case("largest", 4, (18432, 18432), terms=7168, **BF16), lengths=(4096,)),
)

SPECS = (
    KernelSpec(
        name="linears",
        op=ops.LINEARS,
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
        tolerance={torch.float32: 5e-6, torch.bfloat16: 2**-7},
        few=FEW,
    ),
)
