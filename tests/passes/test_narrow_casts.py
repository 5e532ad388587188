"""What is widened and narrowed again is what it was, to the bit; what rounds elsewhere stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.graph import target_name
from deepinfer_compile.passes.narrow_casts import NarrowCasts
from deepinfer_compile.pipeline import Record
from deepinfer_compile.program import Program
from tests.golden_text import check_golden
from tests.passes.stages import before_and_after, go_on, program_of, run

Function = Callable[[Tensor, Tensor], Tensor]
HITS: dict[str, tuple[Function, list[str]]] = {
    "back": (lambda x, y: x.float().bfloat16() * y, ["mul"]),
    "far back": (lambda x, y: x.float().double().bfloat16() * y, ["mul"]),
    "of another's type": (lambda x, y: (x.float()).type_as(y) * y, ["mul"]),
    "sum": (lambda x, y: (x.float() + y).bfloat16(), ["add"]),
    "difference": (lambda x, y: (y - x.float()).bfloat16(), ["sub"]),
    "product": (lambda x, y: (x.float() * y.float()).bfloat16(), ["mul"]),
    "broadcast": (lambda x, y: (x.float() + y[:, :1]).bfloat16(), ["slice", "add"]),
}
MISSES: dict[str, Function] = {
    "rounded between": lambda x, y: (x.float() + y.float() * y).bfloat16(),
    "twice as much": lambda x, y: torch.add(x.float(), y, alpha=2).bfloat16(),
    "read wide too": lambda x, y: (both := x.float() + y).bfloat16() + both.bfloat16() * both.sum(),
    "fp64": lambda x, y: (x.double() + y).bfloat16(),
    "of a number": lambda x, y: (x.float() * 0.3).bfloat16(),
    "narrower than it was": lambda x, y: x.float().half().float(),
    "whole numbers": lambda x, y: x.long().bfloat16(),
    "quotient": lambda x, y: (x.float() / y).bfloat16(),
}


class Small(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


def given(count: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    x, y = (torch.randn(count, 9, generator=generator) * 10 ** torch.arange(-4.0, 5.0) for _ in range(2))
    return {"x": x.bfloat16(), "y": y.bfloat16()}


def passed(function: Function) -> tuple[Program, Program, list[Record]]:
    shapes = {name: {0: Dim.AUTO} for name in ("x", "y")}
    before = program_of(Small(function), shapes, **given(7))
    after, records = go_on(before, NarrowCasts(), NarrowCasts())
    return before, after, records


def names(program: Program) -> list[str]:
    calls = [n for n in program.blocks["prefix"].graph.nodes if n.op == "call_function"]
    return [target_name(n).split(".")[1] for n in calls]


@pytest.mark.parametrize("name", HITS)
def test_the_bits_are_the_same(name: str) -> None:
    function, left = HITS[name]
    _, after, records = passed(function)
    assert records[0].count("applied") > 0
    assert records[1].count("applied") == 0
    assert names(after) == left
    for count in (7, 1, 300, 0):
        got, want = run(after, **given(count)), function(**given(count))
        got = got[0] if isinstance(got, tuple) else got
        assert got.dtype == want.dtype
        assert torch.equal(got.view(torch.int16), want.view(torch.int16))


@pytest.mark.parametrize("name", MISSES)
def test_what_rounds_elsewhere_stays(name: str) -> None:
    before, after, records = passed(MISSES[name])
    assert records[0].count("applied") == 0
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_bisection_caps_the_pass() -> None:
    program = program_of(Small(HITS["back"][0]), **given(5))
    _, records = go_on(program, NarrowCasts(), limits={"narrow-casts": 0})
    assert records[0].count("applied") == 0


def test_golden() -> None:
    before, after, _ = passed(HITS["sum"][0])
    check_golden("narrow_casts", before_and_after(before, after, "prefix"))
