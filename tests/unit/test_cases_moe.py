"""Routers and experts against public bug reports: each test names the case and holds its recipe."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepinfer_compile.passes.raise_experts import RaiseExperts
from deepinfer_compile.passes.raise_router import RaiseRouter
from deepinfer_compile.replay import bind, weights_from
from tests.passes.toys import WORDS, ops, raised, toy

D = torch.ops.deepinfer
INF, NAN = math.inf, math.nan


def grouped(logits: Tensor, bias: Tensor | None, k: int, groups: int, kept: int) -> tuple[Tensor, Tensor]:
    """The sigmoid router with groups ranked by their best two, normalised."""
    ids, weights = D.route(logits, bias, "sigmoid", k, groups, kept, "top2", True, 0.0, 1.0)
    return ids, weights


def test_moe_1_excluded_groups_never_win() -> None:
    logits = torch.tensor([[2.0, 1, 0.5, 0, -1, -2, -3, -4]])
    ids, weights = grouped(logits, torch.full((8,), -1.0), 3, 4, 2)
    assert ids.tolist() == [[0, 1, 2]]
    assert (weights - torch.tensor([[0.39421, 0.32720, 0.27859]])).abs().max() <= 1e-5


@given(st.lists(st.floats(-20, 20, width=32), min_size=8, max_size=8), st.integers(0, 2**16))
@settings(max_examples=60, deadline=None)
def test_moe_1_any_bias(bias: list[float], seed: int) -> None:
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed)) * 3
    ids, weights = grouped(logits, torch.tensor(bias), 3, 4, 2)
    score = logits.sigmoid()
    choice = score + torch.tensor(bias)
    for row in range(5):
        ranks = choice[row].view(4, 2).sum(-1).tolist()
        kept = set(sorted(range(4), key=lambda g: (-ranks[g], g))[:2])
        allowed = [e for e in range(8) if e // 2 in kept]
        want = sorted(allowed, key=lambda e: (-choice[row, e].item(), e))[:3]
        assert ids[row].tolist() == want
        share = score[row, want] / score[row, want].sum()
        assert (weights[row] - share).abs().max() <= 1e-5


KINDS = ["softmax", "softmax_topk", "sigmoid", "sqrt_softplus"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_moe_2_bad_logits(kind: str, groups: int, biased: bool) -> None:
    """NaN counts as -inf: a row is routed among its finite experts. A row without any gets weights NaN: never a
    silent 0."""
    logits = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    logits[0] = NAN
    logits[1, 2] = NAN
    logits[2, 5] = INF
    logits[3] = -INF
    bias = torch.randn(8, generator=torch.Generator().manual_seed(2)) if biased else None

    def route(rows: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = D.route(
            rows, bias, kind, 4, groups, max(1, groups // 2), "top2", True, 1e-20, 1.0
        )
        return found

    ids, weights = route(logits)
    for row in ids.tolist():
        assert len(set(row)) == 4
        assert all(0 <= e < 8 for e in row)
    assert torch.equal(ids[4:], route(logits[4:])[0])
    assert torch.equal(weights[4:], route(logits[4:])[1])
    assert 2 not in ids[1].tolist() or groups > 1
    assert weights[1].isfinite().all()
    assert (weights[1].sum() - 1).abs() <= 1e-5
    for row in (0, 3):
        assert weights[row].isnan().all()


def experts(ids: Tensor, tokens: int, hidden: int = 12, inner: int = 10) -> None:
    """Run the op on random input and compare with a loop over rows and choices."""
    gen = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, hidden, generator=gen)
    weights = torch.rand(ids.shape, generator=gen)
    w13, w2 = torch.randn(8, 2 * inner, hidden, generator=gen), torch.randn(8, hidden, inner, generator=gen)
    got = D.experts(x, ids, weights, w13, w2, None, None, "silu", 1.702, 7.0, False, False)
    want = torch.zeros(tokens, hidden)
    for t, j in itertools.product(range(tokens), range(ids.shape[1])):
        e = int(ids[t, j])
        if 0 <= e < 8:
            gate, up = (w13[e] @ x[t]).chunk(2)
            want[t] += weights[t, j] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    assert got.shape == (tokens, hidden)
    assert torch.equal(got, D.experts(x, ids, weights, w13, w2, None, None, "silu", 1.702, 7.0, False, False))
    assert not got.isnan().any()
    if tokens:
        assert (got - want).abs().max() <= 1e-4
        silent = [t for t in range(tokens) if all(not 0 <= e < 8 for e in ids[t].tolist())]
        assert torch.equal(got[silent], torch.zeros(len(silent), hidden))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_moe_3_empty_experts_and_skipped_ids(dtype: torch.dtype) -> None:
    experts(torch.empty(0, 2, dtype=dtype), 0)
    experts(torch.tensor([[0, 1]] * 5, dtype=dtype), 5)
    experts(torch.full((6, 1), 7, dtype=dtype), 6)
    experts(torch.tensor([[3, -1], [-1, -1], [8, 2], [5, 4]], dtype=dtype), 4)


@pytest.mark.parametrize("largest", [64, 63])
def test_moe_3_uneven_counts(largest: int) -> None:
    counts = [0, 1, 7, 8, 16, 32, 63, largest]
    ids = torch.repeat_interleave(torch.arange(8), torch.tensor(counts))[:, None]
    experts(ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))], len(ids))


class Scaled(nn.Module):
    """x = 1, expert i gives (i + 1) x, the shared one 10 x; experts 0 and 2 have raw scores 0.6 and 0.2; factor 2.5."""

    def __init__(self, normalize: bool, shared: bool, inside: bool, place: str) -> None:
        super().__init__()
        self.normalize, self.shared, self.inside, self.place = normalize, shared, inside, place
        raw = torch.tensor([0.6, 0.05, 0.2, 0.1])
        self.gate = nn.Parameter(torch.logit(raw).view(4, 1))
        # identity gates are not among the activations, so silu is undone by its value at 1
        self.register_buffer("w13", torch.ones(4, 2, 1))
        self.register_buffer("w2", (torch.arange(4.0) + 1).view(4, 1, 1) / torch.nn.functional.silu(torch.ones(())))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, 1)
        scores = torch.nn.functional.linear(flat, self.gate).sigmoid()
        weights, ids = scores.topk(2, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.place == "weights":
            weights = weights * 2.5
        h = torch.bmm(flat.unsqueeze(0).expand(4, -1, -1), self.w13.transpose(1, 2))
        gate, up = h.chunk(2, -1)
        every = torch.bmm(torch.nn.functional.silu(gate) * up, self.w2)
        dense = torch.zeros_like(scores).scatter(1, ids, weights)
        out = (every * dense.t().unsqueeze(-1)).sum(0)
        if self.place == "output":
            out = out * 2.5
        if self.shared and self.inside:
            return (out + flat * 10.0).view_as(x)
        return out.view_as(x) + (x * 10.0 if self.shared else 0.0)


@pytest.mark.parametrize("place", ["weights", "output"])
@pytest.mark.parametrize(("normalize", "shared", "inside"), list(itertools.product([True, False], repeat=3)))
def test_moe_5_factor_is_applied_once(normalize: bool, shared: bool, inside: bool, place: str) -> None:
    """All combinations of normalising, shared expert, where it is added and where the factor stands, at each stage."""
    want = (3.75 if normalize else 3.0) + 10.0 * shared
    model = toy(Scaled(normalize, shared, inside, place), width=1)
    with torch.no_grad():
        model.body.gate.copy_(torch.logit(torch.tensor([0.6, 0.05, 0.2, 0.1])).view(4, 1))
        model.embedding.weight.fill_(1.0)
    ids = torch.arange(3)[None] % WORDS
    for passes in ((), (RaiseRouter(),), (RaiseExperts(),), (RaiseRouter(), RaiseExperts())):
        program, _ = raised(model, *passes)
        assert ops(program) == [f"deepinfer.{type(p).__name__[5:].lower().replace('router', 'route')}" for p in passes]
        got = program.run({**bind(program, weights_from(model)), "input_ids": ids})
        assert (got - want).abs().max() <= 1e-6 * want
    owners = [n.args[9] for gm in program.blocks.values() for n in gm.graph.nodes if "route.default" in str(n.target)]
    assert owners == [2.5 if place == "weights" else 1.0]


def stable(scores: Tensor, k: int) -> list[list[int]]:
    """Indices in descending score, lower index first among equals."""
    return [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in scores.tolist()]


def ties(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 logits [batch, 384] with three kinds of tie in the first rows."""
    logits = torch.randn(batch, 384, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    eighth = logits.clone()
    order = stable(eighth.float(), 9)
    for row, found in enumerate(order):
        eighth[row, found[8]] = eighth[row, found[7]]
    groups = torch.full((batch, 384), -3.0, dtype=torch.bfloat16)
    groups[:, :: 384 // 8] = 2.0
    groups[:, 1 :: 384 // 8] = 1.0
    return torch.zeros(batch, 384, dtype=torch.bfloat16), eighth, groups


@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("compiled", [False, True])
def test_moe_7_ties_go_to_the_lower_index(batch: int, compiled: bool) -> None:
    def route(logits: Tensor, groups: int) -> Any:
        return D.route(logits, None, "sigmoid", 8, groups, max(1, groups // 2), "top2", True, 1e-20, 2.5)

    call = torch.compile(route, backend="aot_eager") if compiled else route
    zeros, eighth, groups = ties(batch)
    for logits, count in ((zeros, 1), (eighth, 1), (groups, 8)):
        ids, weights = call(logits, count)
        for _ in range(20):
            again = call(logits, count)
            assert torch.equal(again[0], ids)
            assert torch.equal(again[1], weights)
        allowed = logits.float().sigmoid()
        if count == 8:
            allowed[:, 384 // 2 :] = -1.0
        assert ids.tolist() == stable(allowed, 8)
        alone = call(logits[-1:], count)
        assert torch.equal(alone[0], ids[-1:])
        assert torch.equal(alone[1], weights[-1:])
