"""Routers of every architecture become one op, equal to eager; what only looks like one is left with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.graph import node_text
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_router import RaiseRouter
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import calls, check_equal, run_passes
from tests.passes.stages import canonical, go_on
from tests.passes.toys import before_after, check_toy, check_twice_is_once, ops, raised, reasons, toy

EXPERTS = 8
LIBRARY: list[tuple[str, dict[str, Any], dict[str, int], str]] = [
    ("mixtral", {}, {"layer0": 1}, "None, 'softmax', 2, 1, 1, 'none', True, 0.0, 1.0"),
    ("qwen3_moe", {}, {"layer0": 1}, "None, 'softmax', 3, 1, 1, 'none', True, 0.0, 1.0"),
    ("qwen3_moe", {"norm_topk_prob": False}, {"layer0": 1}, "None, 'softmax', 3, 1, 1, 'none', False, 0.0, 1.0"),
    ("olmoe", {}, {"layer0": 1}, "None, 'softmax', 3, 1, 1, 'none', False, 0.0, 1.0"),
    ("gpt_oss", {}, {"layer0": 1, "layer1": 1}, "None, 'softmax_topk', 2, 1, 1, 'none', False, 0.0, 1.0"),
    ("glm4_moe", {}, {"layer1": 1}, "correction_bias, 'sigmoid', 3, 1, 1, 'none', True, 1e-20, 1.0"),
    ("glm4_moe", {"n_group": 4, "topk_group": 2}, {"layer1": 1}, "'sigmoid', 3, 4, 2, 'top2', True, 1e-20, 1.0"),
    (
        "deepseek_v2",
        {"routed_scaling_factor": 16.0},
        {"layer1": 1},
        "None, 'softmax', 4, 3, 2, 'max', False, 0.0, 16.0",
    ),
    ("deepseek_v2", {"topk_method": "greedy"}, {"layer1": 1}, "None, 'softmax', 4, 1, 1, 'none', False, 0.0, 1.0"),
    ("deepseek_v3", {}, {"layer1": 1}, "correction_bias, 'sigmoid', 4, 3, 2, 'top2', True, 1e-20, 2.5"),
    (
        "deepseek_v3",
        {"norm_topk_prob": False, "first_k_dense_replace": 1},
        {"layer1": 1},
        "'sigmoid', 4, 3, 2, 'top2', False, 0.0, 2.5",
    ),
]


def route_lines(program: Any) -> list[str]:
    """Every call of the op as text."""
    return [node_text(n) for gm in program.blocks.values() for n in gm.graph.nodes if "route.def" in str(n.target)]


@pytest.mark.parametrize(("name", "changes", "expected", "arguments"), LIBRARY)
def test_architectures(name: str, changes: dict[str, Any], expected: dict[str, int], arguments: str) -> None:
    if changes:
        model = models.make(name, num_hidden_layers=2, **changes)
        program, records = run_passes(model, Canonicalize(), RaiseRouter())
    else:
        model, before = canonical(name)
        program, records = go_on(before, RaiseRouter())
    for block in program.blocks:
        assert calls(program, "deepinfer.route", block) == expected.get(block, 0)
    assert calls(program, "aten.topk") == 0
    assert all(arguments in line for line in route_lines(program))
    assert reasons(records) == []
    check_equal(program, model)


def test_twice_is_once() -> None:
    program, _ = go_on(canonical("deepseek_v3")[1], RaiseRouter())
    check_twice_is_once(program, RaiseRouter())


def test_capped_pass_leaves_the_rest() -> None:
    program, records = go_on(canonical("gpt_oss")[1], RaiseRouter(), limits={"raise-router": 1})
    assert calls(program, "deepinfer.route") == 1
    assert records[-1].count("applied") == 1


def test_golden() -> None:
    check_golden("raise_router", before_after(toy(Grouped()), RaiseRouter()))


class Grouped(nn.Module):
    """Sigmoid scores, bias, two of four groups, top 3, normalised, times 2.5; the result is dense [1, T, E]."""

    kept_fill, bias_in_weights, rank_by = float("-inf"), False, "biased"

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(24, EXPERTS, bias=False)
        self.bias = nn.Parameter(torch.empty(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x[0]).sigmoid()
        choice = scores + self.bias
        ranked = choice if self.rank_by == "biased" else scores
        group_scores = ranked.view(-1, 4, EXPERTS // 4).topk(2, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(group_scores).scatter_(1, group_scores.topk(2, dim=-1)[1], 1)
        mask = kept.repeat_interleave(EXPERTS // 4, dim=-1)
        ids = choice.masked_fill(~mask.bool(), self.kept_fill).topk(3, dim=-1)[1]
        weights = (choice if self.bias_in_weights else scores).gather(-1, ids)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5
        return torch.zeros_like(scores).scatter(1, ids, weights)[None]


def test_groups_by_repetition() -> None:
    model = toy(Grouped())
    program, records = raised(model, RaiseRouter())
    assert ops(program) == ["deepinfer.route"]
    assert reasons(records, "applied") == ["sigmoid router, top 3 of 8"]
    check_toy(program, model)


@pytest.mark.parametrize(
    ("attribute", "held", "reason"),
    [
        ("kept_fill", 0.0, "experts of excluded groups are filled with 0.0, which can beat a real score"),
        ("bias_in_weights", True, "the weights are taken from other scores than the unbiased ones"),
        ("rank_by", "unbiased", "groups are ranked by other scores than their experts"),
    ],
)
def test_near_misses_of_groups(attribute: str, held: Any, reason: str) -> None:
    body = Grouped()
    setattr(body, attribute, held)
    model = toy(body)
    program, records = raised(model, RaiseRouter())
    assert ops(program) == []
    assert reasons(records) == [reason]
    check_toy(program, model)


class Simple(nn.Module):
    """One router written as a function of (logits, table, ids) -> dense [T, E]."""

    def __init__(self, function: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function, self.dtype = function, dtype
        self.gate = nn.Linear(24, EXPERTS, bias=False)
        self.extra = nn.Parameter(torch.empty(EXPERTS))
        self.register_buffer("table", torch.randint(0, EXPERTS, (11, 2)))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x[0]).to(self.dtype)
        weights, ids = self.function(logits, self.extra, self.table)
        return torch.zeros(logits.shape, dtype=weights.dtype).scatter(1, ids, weights)[None]


def softplus_router(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    ids = torch.topk(scores + extra, 3, dim=-1, sorted=False).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * 1.5, ids


def llama4_router(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, 1, dim=-1)
    return values.sigmoid(), ids


def learned_scale(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(3, -1)
    return weights * extra[0], ids


def late_scale(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    weights, ids = logits.softmax(-1).topk(3, -1)
    return (weights + 0.25) * 3.0, ids


def shared_values(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.softmax(-1).topk(3, -1)
    return values / values.sum(-1, keepdim=True) + values, ids


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (softplus_router, "%body_extra, 'sqrt_softplus', 3, 1, 1, 'none', True, 1e-20, 1.5"),
        (llama4_router, "None, 'sigmoid', 1, 1, 1, 'none', False, 0.0, 1.0"),
        (learned_scale, "None, 'softmax', 3, 1, 1, 'none', False, 0.0, 1.0"),
        (late_scale, "None, 'softmax', 3, 1, 1, 'none', False, 0.0, 1.0"),
        (shared_values, "None, 'softmax', 3, 1, 1, 'none', False, 0.0, 1.0"),
    ],
)
def test_forms(function: Any, arguments: str) -> None:
    model = toy(Simple(function))
    program, _ = raised(model, RaiseRouter())
    assert arguments in route_lines(program)[0]
    check_toy(program, model)


def hashed(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    scores = F.softplus(logits).sqrt()
    ids = table[torch.arange(logits.shape[0]) % 11]
    return scores.gather(1, ids), ids


def raw_logits(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return logits.topk(3, -1)


def two_readers(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    scores = logits.softmax(-1)
    values, ids = scores.topk(3, -1)
    return values + scores.gather(1, ids), ids


def biased_values(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return (logits.sigmoid() + extra).topk(3, -1)


def other_slope(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    return F.softplus(logits, beta=2).sqrt().topk(3, -1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (hashed, "the experts are looked up in a table, not chosen by score"),
        (raw_logits, "the scores are aten.linear and their chosen values meet no softmax"),
        (two_readers, "the chosen scores are read in two ways"),
        (biased_values, "the biased scores serve as weights"),
        (other_slope, "the softplus has another slope or threshold"),
    ],
)
def test_near_misses(function: Any, reason: str) -> None:
    model = toy(Simple(function))
    program, records = raised(model, RaiseRouter())
    assert ops(program) == []
    assert reasons(records) == [reason]
    check_toy(program, model)


def test_double_precision_is_left() -> None:
    model = toy(Simple(learned_scale, torch.float64))
    _, records = raised(model, RaiseRouter())
    assert reasons(records) == ["the logits are f64 and the router op works in f32"]


def test_dtypes_of_readers_are_kept() -> None:
    model = toy(Simple(lambda g, e, t: g.softmax(-1).topk(3, -1)), dtype=torch.bfloat16)
    model.body.dtype = torch.bfloat16
    program, records = raised(model, RaiseRouter())
    assert reasons(records, "applied") == ["softmax router, top 3 of 8, scores kept in f32"]
    check_toy(program, model, tol=1e-2)
