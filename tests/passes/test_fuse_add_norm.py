"""The residual addition and its norm become one op wherever the sum lives on, for every size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.errors import ExpectedMatchMissing
from deepinfer_compile.ops import ADD_RMS_NORM
from deepinfer_compile.passes.fuse_add_norm import FuseAddNorm
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import IDS, ROWS, check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run

WIDTH = 8


def norm(x: Tensor, w: Any, dim: int = -1) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + 1e-5))


class Chain(nn.Module):
    """Four times: y [B*S, H] to [B, S, H], plus the residual, then a norm."""

    def __init__(self, dim: int = -1, copies: bool = False) -> None:
        super().__init__()
        self.dim, self.copies = dim, copies
        gen = torch.Generator().manual_seed(0)
        self.weights = nn.ParameterList(1 + torch.randn(WIDTH, generator=gen) / 4 for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for w in self.weights:
            y = torch.tanh(h.reshape(-1, WIDTH)).reshape(x.shape)
            x = x + (y.contiguous() if self.copies else y)
            h = norm(x, w, self.dim)
        return h + x


Two = Callable[[Tensor, Tensor, Tensor], Any]
MISSES: dict[str, tuple[Two, str]] = {
    "broadcast": (lambda x, y, w: (norm(s := x + y[:, :1], w), s), "the sum broadcasts an operand"),
    "dtype": (lambda x, y, w: (norm(s := x.double() + y, 1), s), "the sum changes a dtype"),
    "only the norm": (lambda x, y, w: (norm(x + y, w),), "only the norm reads the sum"),
    "late weight": (lambda x, y, w: ((s := x + y), norm(s, w * 2)), "the norm's weight is made after the sum"),
    "second norm": (lambda x, y, w: (norm(s := x + y, w), norm(s, w), s), "the sum is joined with another norm of it"),
}


class Small(nn.Module):
    """f(x, y, weight)."""

    def __init__(self, function: Two) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.function(x, y, self.weight))


def example(batch: int, tokens: int) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(batch))


def fused(module: nn.Module) -> tuple[Program, Any]:
    """Traced at batch 2 and 3 tokens, both dynamic."""
    before = program_of(module, {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, x=example(2, 3))
    after, records = go_on(before, RaiseRmsNorm(), FuseAddNorm())
    return after, records[1]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseRmsNorm(), FuseAddNorm(), FuseAddNorm())
    layers = [block for block in before.blocks if block.startswith("layer")]
    assert counts(records[1]) == dict.fromkeys(layers, 1)
    assert not reasons(records[1])
    assert records[2].count("applied") == 0
    check_equal(after, model)


def test_bf16_keeps_every_bit() -> None:
    model, before = canonical("gemma", torch.bfloat16)
    after, records = go_on(before, RaiseRmsNorm(), FuseAddNorm())
    assert counts(records[1]) == {"layer0": 1, "layer1": 1}
    weights = weights_from(model)
    assert torch.equal(logits_of(after, weights, IDS, ROWS), logits_of(before, weights, IDS, ROWS))


@pytest.mark.parametrize("copies", [False, True])
def test_no_example_size_is_written_in(copies: bool) -> None:
    """Traced at 2 x 3 x 8, run at others; the harmless copies of the second graph do not hide a site."""
    module = Chain(copies=copies)
    after, record = fused(module)
    assert counts(record) == {"prefix": 4}
    nodes = [n for n in after.blocks["prefix"].graph.nodes if n.op == "call_function"]
    numbers = [a for n in nodes for arg in n.args for a in (arg if isinstance(arg, (list, tuple)) else (arg,))]
    assert not {2, 3, 6} & {a for a in numbers if isinstance(a, int)}
    for batch, tokens in ((5, 1), (1, 4), (2, 3), (3, 0)):
        x = example(batch, tokens)
        assert torch.allclose(run(after, x=x)[0], module(x), atol=1e-6)


def test_other_dimension_never_matches_and_says_so() -> None:
    module = Chain(dim=1)
    before = program_of(module, {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, x=example(2, 3))
    after, records = go_on(before, RaiseRmsNorm(), FuseAddNorm())
    assert [r.count("applied") for r in records] == [0, 0]
    assert reasons(records[0]) == ["the mean is over dimensions [1] of 3, not the last alone"] * 4
    assert torch.equal(run(after, x=example(2, 3))[0], module(example(2, 3)))


def test_required_sites() -> None:
    _, before = canonical("llama")
    go_on(before, RaiseRmsNorm(), FuseAddNorm(required=1))
    with pytest.raises(ExpectedMatchMissing, match="had to match 2 and matched 1 in layer0"):
        go_on(before, RaiseRmsNorm(), FuseAddNorm(required=2))


@pytest.mark.parametrize("case", MISSES)
def test_near_misses(case: str) -> None:
    function, reason = MISSES[case]
    module = Small(function)
    given = {"x": example(2, 3), "y": example(2, 3).flip(0)}
    after, records = go_on(program_of(module, **given), RaiseRmsNorm(), FuseAddNorm())
    assert records[1].count("applied") == (case == "second norm")
    assert reasons(records[1]) == [reason]
    for got, want in zip(run(after, **given), module(**given), strict=True):
        assert torch.equal(got, want)


def test_bisection_caps_the_pass() -> None:
    before = program_of(Chain(), x=example(2, 3))
    after, records = go_on(before, RaiseRmsNorm(), FuseAddNorm(), limits={"fuse-add-norm": 3})
    assert records[1].count("applied") == 3
    assert sum(n.target is ADD_RMS_NORM.overload for n in after.blocks["prefix"].graph.nodes) == 3


def test_golden() -> None:
    module = Small(lambda x, y, w: (norm(s := x + y, w), s))
    before, _ = go_on(program_of(module, x=example(2, 3), y=example(2, 3)), RaiseRmsNorm())
    after, _ = go_on(before, FuseAddNorm())
    check_golden("fuse_add_norm", before_and_after(before, after, "prefix"))
