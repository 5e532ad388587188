"""Residual streams become ops with the same numbers, however many rounds there are; what is close to them stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import is_op
from deepinfer_compile.models.deepseek_v41.parts import StreamMixer, collapse, expand
from deepinfer_compile.ops import BALANCE_STREAMS, COLLAPSE_STREAMS, JOIN_STREAMS, MIX_STREAMS
from deepinfer_compile.passes.raise_hyper_connections import RaiseHyperConnections
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.pipeline import Record
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import v41
from tests.passes.stages import before_and_after, counts, go_on, program_of, reasons, run

K, D = 3, 10
OPS = (MIX_STREAMS, BALANCE_STREAMS, COLLAPSE_STREAMS, JOIN_STREAMS)


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One way to write a sublayer between streams. Its steps can be replaced one by one."""

    rounds: int = 4
    dtype: torch.dtype = torch.float32
    eps: float = 1e-3
    expand: Callable[..., Tensor] = expand
    collapse: Callable[..., Tensor] = collapse
    balance: Callable[..., Tensor] | None = None
    gates: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    normed: bool = True


class Sublayer(nn.Module):
    """f(streams [1, T, K, D], pre [1, T, K]) -> new streams and pre."""

    def __init__(self, spelling: Spelling) -> None:
        super().__init__()
        config: Any = SimpleNamespace(
            hc_mult=K, hc_sinkhorn_iters=spelling.rounds, hc_eps=spelling.eps, rms_norm_eps=1e-6
        )
        self.mixer, self.spelling = StreamMixer(config), spelling
        generator = torch.Generator().manual_seed(0)

        def made(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator).to(spelling.dtype), requires_grad=False)

        self.fn, self.base, self.scale = made(K * (2 + K), K * D), made(K * (2 + K)), made(3)
        self.weight = made(D, D)

    def forward(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        if self.spelling.balance is not None:
            self.mixer._balanced = self.spelling.balance  # type: ignore[method-assign]
        made, post, comb = self.mixer(streams, self.fn, self.base, self.scale)
        if self.spelling.gates is not None:
            made, post = self.spelling.gates(made, post)
        y = torch.tanh(self.spelling.collapse(streams, pre) @ self.weight)
        return self.spelling.expand(streams, y, post, comb), made


def passed(spelling: Spelling) -> tuple[Sublayer, Program, Program, list[Record]]:
    module = Sublayer(spelling)
    given = inputs(7, spelling.dtype)
    before = program_of(module, {"streams": {1: Dim.AUTO}, "pre": {1: Dim.AUTO}}, **given)
    before, _ = go_on(before, *((RaiseRmsNorm(),) if spelling.normed else ()))
    after, records = go_on(before, RaiseHyperConnections(), RaiseHyperConnections())
    return module, before, after, records


def inputs(tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    shapes = {"streams": (1, tokens, K, D), "pre": (1, tokens, K)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def found(program: Program) -> list[int]:
    nodes = [n for gm in program.blocks.values() for n in gm.graph.nodes]
    return [sum(is_op(n, op.overload) for n in nodes) for op in OPS]


def with_product(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    added = y.float().unsqueeze(-2) * post.unsqueeze(-1)
    return (comb.transpose(-1, -2) @ streams.float() + added).to(streams.dtype)


def rows_first(comb: Tensor) -> Tensor:
    for _ in range(2):
        comb = comb / (comb.sum(-1, keepdim=True) + 1e-3)
        comb = comb / (comb.sum(-2, keepdim=True) + 1e-3)
    return comb


def odd_rounds(comb: Tensor) -> Tensor:
    comb = comb / (comb.sum(-2, keepdim=True) + 1e-3)
    return comb / (comb.sum(-1, keepdim=True) + 1e-3)


def another_eps(comb: Tensor) -> Tensor:
    return comb / (comb.sum(-2, keepdim=True) + 1e-2)


HITS = {
    "rounds": (Spelling(), [1, 0, 1, 1]),
    "one round": (Spelling(rounds=1), [1, 0, 1, 1]),
    "many rounds": (Spelling(rounds=20), [1, 0, 1, 1]),
    "f64": (Spelling(dtype=torch.float64), [1, 0, 1, 1]),
    "bf16": (Spelling(dtype=torch.bfloat16), [1, 0, 1, 1]),
    "product": (Spelling(expand=with_product), [1, 0, 1, 1]),
    "bf16 product": (Spelling(expand=with_product, dtype=torch.bfloat16), [1, 0, 1, 1]),
    "row left over": (Spelling(balance=odd_rounds), [1, 0, 1, 1]),
    "unknown norm": (Spelling(normed=False), [0, 1, 1, 1]),
}


@pytest.mark.parametrize("name", HITS)
def test_the_numbers_are_the_same(name: str) -> None:
    spelling, wanted = HITS[name]
    module, _, after, records = passed(spelling)
    assert found(after) == wanted
    assert records[1].count("applied") == 0
    for tokens in (1, 2, 9):
        given = inputs(tokens, spelling.dtype)
        for got, want in zip(run(after, **given), module(**given), strict=True):
            assert torch.equal(got, want)


def untransposed(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return (post.unsqueeze(-1) * y.unsqueeze(2) + comb @ streams).type_as(streams)


def alone(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    return torch.einsum("btjk,btjd->btkd", comb, streams) * y.unsqueeze(2)


def ungated(pre: Tensor, post: Tensor) -> tuple[Tensor, Tensor]:
    return post, post


def narrow(streams: Tensor, pre: Tensor) -> Tensor:
    return (streams * pre.unsqueeze(-1)).sum(2)


MISSES = {
    "rows first": (Spelling(balance=rows_first), [0, 0, 1, 1], ""),
    "another eps": (Spelling(balance=another_eps), [0, 0, 1, 1], "another number than that of the rounds"),
    "not transposed": (Spelling(expand=untransposed), [1, 0, 1, 0], ""),
    "nothing added": (Spelling(expand=alone), [0, 1, 1, 0], "nothing that a sublayer returned"),
    "other gates": (Spelling(gates=ungated), [0, 1, 1, 1], "no sigmoid plus the eps of the rounds"),
    "half precision": (Spelling(collapse=narrow, dtype=torch.bfloat16), [1, 0, 0, 1], "collapse_streams is wide"),
    "kept dimension": (Spelling(collapse=lambda s, p: (s * p.unsqueeze(-1)).sum(2, True)[:, :, 0]), [1, 0, 0, 1], ""),
}


@pytest.mark.parametrize("name", MISSES)
def test_what_is_close_stays(name: str) -> None:
    spelling, wanted, why = MISSES[name]
    module, _, after, records = passed(spelling)
    assert found(after) == wanted
    assert any(why in r for r in reasons(records[0])) or not why
    given = inputs(5, spelling.dtype)
    for got, want in zip(run(after, **given), module(**given), strict=True):
        assert torch.equal(got, want)


def test_layers() -> None:
    """Two mixes, reads and writes of streams a layer, and a read before the output; the logits keep their bits."""
    model, before = v41.canonical(torch.float64)
    before, _ = go_on(before, RaiseRmsNorm())
    after, records = go_on(before, RaiseHyperConnections())
    assert counts(records[0]) == {**{f"layer{i}": 6 for i in range(5)}, "suffix": 1}
    assert not records[0].count("missed")
    assert found(after) == [10, 0, 11, 10]
    assert Fact.CANONICAL in after.facts
    assert before_and_after(before, before, "layer0") != before_and_after(before, after, "layer0")
    ids, rows = list(range(7, 48)), (0, 5, 40)
    got, want = (logits_of(p, weights_from(model), ids, rows) for p in (after, before))
    assert torch.equal(got, want)
