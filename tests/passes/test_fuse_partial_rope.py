"""Heads of which a part is turned become one op with the same bits; what is close to that stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import PARTIAL_ROPE, ROPE
from deepinfer_compile.passes.fuse_partial_rope import FusePartialRope
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.pipeline import Record
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from tests import v41
from tests.passes.stages import go_on, program_of, reasons, run

Turn = Callable[[Tensor, Tensor, Tensor], Any]
W = 6


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def first(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return torch.cat([half(x[..., :W], c, s), x[..., W:]], -1)


def last(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    return torch.cat([x[..., :-W], pairs(x[..., -W:], c, s)], -1)


def middle(x: Tensor, c: Tensor, s: Tensor) -> Tensor:
    a, b, rest = x.split([3, W, 5], -1)
    return torch.cat([a, half(b, c, s), rest], -1)


# what the op is told: style, first channel, width, inverse
HITS: dict[str, tuple[Turn, tuple[str, int, int, bool]]] = {
    "first": (first, ("half", 0, W, False)),
    "last": (last, ("pair", 8, W, False)),
    "middle": (middle, ("half", 3, W, False)),
    "back": (lambda x, c, s: last(x, c, -s), ("pair", 8, W, True)),
    "the last axis by number": (
        lambda x, c, s: torch.cat([x[..., :8], pairs(x[..., 8:], c, s)], 3),
        ("pair", 8, W, False),
    ),
}
MISSES: dict[str, tuple[Turn, str]] = {
    "exchanged": (lambda x, c, s: torch.cat([half(x[..., W:12], c, s), x[..., :W]], -1), "in their order"),
    "not all": (lambda x, c, s: torch.cat([half(x[..., :W], c, s), x[..., W:-1]], -1), "not all of one"),
    "of another": (lambda x, c, s: torch.cat([half(x[..., :W], c, s), (x + 1)[..., W:]], -1), "of one tensor"),
    "read twice": (lambda x, c, s: (torch.cat([r := half(x[..., :W], c, s), x[..., W:]], -1), r + 1), "elsewhere"),
    "both": (lambda x, c, s: torch.cat([half(x[..., :W], c, s), half(x[..., W:12], c, s)], -1), "elsewhere or joined"),
}


class Small(nn.Module):
    """f(x [1, T, H, 14], cos and sin [1, T, 1, W / 2])."""

    def __init__(self, function: Turn) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.function(x, cos, sin)


def inputs(tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {"x": (1, tokens, 3, 14), "cos": (1, tokens, 1, W // 2), "sin": (1, tokens, 1, W // 2)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def passed(function: Turn) -> tuple[Small, Program, list[Record]]:
    module = Small(function)
    before = program_of(module, {name: {1: Dim.AUTO} for name in ("x", "cos", "sin")}, **inputs(7))
    before, _ = go_on(before, RaiseRmsNorm(), RaiseRope())
    after, records = go_on(before, FusePartialRope(), FusePartialRope())
    return module, after, records


def calls(program: Program, op: Any) -> list[Any]:
    return [n for gm in program.blocks.values() for n in gm.graph.nodes if is_op(n, op.overload)]


@pytest.mark.parametrize("name", HITS)
def test_the_numbers_are_the_same(name: str) -> None:
    function, told = HITS[name]
    module, after, records = passed(function)
    (found,) = calls(after, PARTIAL_ROPE)
    assert tuple(argument(found, n) for n in ("style", "start", "width", "inverse")) == told
    assert not calls(after, ROPE)
    assert [r.count("applied") for r in records] == [1, 0]
    for tokens in (1, 2, 9):
        given = inputs(tokens)
        assert torch.equal(run(after, **given)[0], module(**given))


@pytest.mark.parametrize("name", MISSES)
def test_what_is_close_stays(name: str) -> None:
    function, why = MISSES[name]
    module, after, records = passed(function)
    assert not calls(after, PARTIAL_ROPE)
    assert any(why in r for r in reasons(records[0])), reasons(records[0])
    given = inputs(5)
    want = module(**given)
    for got, whole in zip(run(after, **given), want if isinstance(want, tuple) else (want,), strict=True):
        assert torch.equal(got, whole)


def test_all_of_a_head() -> None:
    """As models write it whose part is a setting: nothing is left to put back."""
    module, after, records = passed(lambda x, c, s: torch.cat([half(y := x[..., :W] + 1, c, s), y[..., W:]], -1))
    assert records[0].count("applied") == 1
    assert not calls(after, PARTIAL_ROPE)
    assert len(calls(after, ROPE)) == 1
    assert not any("cat" in str(n.target) for gm in after.blocks.values() for n in gm.graph.nodes)
    given = inputs(5)
    assert torch.equal(run(after, **given)[0], module(**given))


@pytest.mark.slow
def test_every_layer_that_turns_a_part() -> None:
    """Queries, latents and what attention gives, turned back; rows and keys where they are made."""
    after, _ = default().run(v41.canonical()[1])
    assert not calls(after, ROPE)
    found = {
        name: [bool(argument(n, "inverse")) for n in gm.graph.nodes if is_op(n, PARTIAL_ROPE.overload)]
        for name, gm in after.blocks.items()
    }
    assert found["layer0"] == [False, False, True]
    assert sum(map(len, found.values())) == 22
    assert Fact.FUSED in after.facts
