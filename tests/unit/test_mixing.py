"""How values mix tokens, as read off the graph, against what is measured: which rows change with which token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.mixing import Mixing, classify
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program

WIDTH, LENGTH = 8, 24
Step = Callable[["Small", Tensor, Tensor], Tensor]
NEVER = float("-inf")


class Small(nn.Module):
    """ids and positions [1, T] -> step(embedded [1, T, WIDTH], positions)."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step = step
        self.embedding = nn.Embedding(LENGTH, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH, WIDTH, 3))
        self.sink = nn.Parameter(torch.randn(1))

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.step(self, self.embedding(input_ids), position_ids)


def age(p: Tensor) -> Tensor:
    """[1, T, T]: how many tokens a row is behind a column."""
    return p.unsqueeze(2) - p.unsqueeze(1)


def scores(m: Small, x: Tensor) -> Tensor:
    """[1, T, T]"""
    return torch.einsum("btd,bsd->bts", m.linear(x), x) * 3


def mixed(s: Tensor, x: Tensor) -> Tensor:
    """Rows [1, T, WIDTH] of x, weighted."""
    return torch.einsum("bts,bsd->btd", s.softmax(-1), x)


def joined(m: Small, x: Tensor, p: Tensor) -> Tensor:
    """A window of some keys, all of others, and a sink, in one softmax."""
    keys = torch.cat([m.linear(x), x], 1)
    near, whole = (age(p) >= 0) & (age(p) < 3), age(p) >= 0
    s = torch.einsum("btd,bnd->btn", x, keys).masked_fill(~torch.cat([near, whole], 2), NEVER)
    s = torch.cat([s, m.sink.expand(1, x.shape[1], 1)], -1).softmax(-1)[..., :-1]
    return torch.einsum("btn,bnd->btd", s, keys)


def chosen(m: Small, x: Tensor, p: Tensor, visible: Tensor) -> Tensor:
    """The two best of the visible keys of each row, by rank."""
    s = scores(m, x)
    rank = s.masked_fill(~visible, NEVER).argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return mixed(s.masked_fill(~((rank < 2) & visible), NEVER), x)


def blocks(m: Small, x: Tensor, p: Tensor) -> Tensor:
    """Keys of the best block of four, its best visible key counting; at least those of the row's own block."""
    s, visible = scores(m, x), age(p) >= 0
    low = s.masked_fill(~visible, NEVER)
    block = (p // 4).unsqueeze(1).expand(s.shape)
    peaks = torch.full_like(low, NEVER).scatter_reduce(-1, block, low, "amax")
    own = torch.arange(s.shape[-1]) == (p // 4).unsqueeze(2)
    best = peaks.masked_fill(own, float("inf")).argsort(-1, descending=True).argsort(-1) < 2
    return mixed(s.masked_fill(~(best.gather(-1, block) & visible), NEVER), x)


def back(x: Tensor, by: int) -> Tensor:
    return F.pad(x, (0, 0, by, 0))[:, : x.shape[1]]


CASES: dict[str, tuple[Step, str, int]] = {
    "row": (lambda m, x, p: m.linear(x) * p.unsqueeze(-1), "row", 1),
    "pad and slice": (lambda m, x, p: x + back(x, 2), "window", 3),
    "joined in front": (lambda m, x, p: x + torch.cat([torch.zeros(1, 1, WIDTH), x[:, :-1]], 1), "window", 2),
    "convolution": (lambda m, x, p: F.conv1d(F.pad(x.mT, (2, 0)), m.filter).mT, "window", 3),
    "wide convolution": (
        lambda m, x, p: F.conv1d(x.mT, m.filter, padding=4, dilation=2)[..., : x.shape[1]].mT,
        "window",
        5,
    ),
    "ahead": (lambda m, x, p: torch.cat([x[:, 1:], torch.zeros(1, 1, WIDTH)], 1), "not causal", 0),
    "centred": (lambda m, x, p: F.conv1d(x.mT, m.filter, padding=1).mT, "not causal", 0),
    "causal": (lambda m, x, p: mixed(scores(m, x).masked_fill(age(p) < 0, NEVER), x), "causal", 0),
    "window": (lambda m, x, p: mixed(torch.where((age(p) >= 0) & (age(p) < 5), scores(m, x), NEVER), x), "window", 5),
    "hidden window": (
        lambda m, x, p: mixed(scores(m, x).masked_fill((age(p) < 0) | (age(p) > 2), NEVER), x),
        "window",
        3,
    ),
    "two masks": (
        lambda m, x, p: mixed(scores(m, x).masked_fill(age(p) > 3, NEVER).masked_fill(age(p) < 0, NEVER), x),
        "window",
        4,
    ),
    "joined keys": (joined, "causal", 3),
    "chosen keys": (lambda m, x, p: chosen(m, x, p, age(p) >= 0), "causal", 0),
    "chosen blocks": (blocks, "causal", 0),
    "chosen from all": (lambda m, x, p: chosen(m, x, p, age(p) > -99), "not causal", 0),
    "no mask": (lambda m, x, p: mixed(scores(m, x), x), "not causal", 0),
    "turned after masking": (
        lambda m, x, p: mixed(scores(m, x).masked_fill(age(p) < 0, NEVER).clamp(min=-9), x),
        "not causal",
        0,
    ),
    "running total": (lambda m, x, p: x.cumsum(1), "unknown", 0),
    "rolled": (lambda m, x, p: x.roll(1, 1), "unknown", 0),
}


def found(program: Program) -> list[Mixing]:
    """The calls of a program that mix tokens."""
    return [m for m in classify(program.flatten(), program).values() if m.mixes]


def lags(model: nn.Module) -> list[int]:
    """How far behind a token a row is that changes with it, measured: the least and the most."""
    ids, places = torch.arange(LENGTH)[None], torch.arange(LENGTH)[None]
    seen: list[int] = []
    with torch.no_grad():
        before = model(ids, places)
        for at in range(LENGTH):
            other = ids.clone()
            other[0, at] = (at + 7) % LENGTH
            changed = (model(other, places) != before).flatten(2).any(-1)[0].nonzero().flatten()
            seen += [int(row) - at for row in changed]
    return [min(seen), max(seen)]


@pytest.mark.parametrize("name", CASES)
def test_mixing_is_as_measured(name: str) -> None:
    step, kind, window = CASES[name]
    model = Small(step).eval()
    mixing = found(Pipeline((Canonicalize(),)).run(capture(model))[0])
    low, high = lags(model)
    if kind == "row":
        assert mixing == []
        assert (low, high) == (0, 0)
        return
    assert [(m.kind, m.window) for m in mixing] == [(kind, window)] or kind in ("not causal", "unknown")
    assert kind in {m.kind for m in mixing}
    if kind == "window":
        assert (low, high) == (0, window - 1)
    elif kind == "causal":
        assert low == 0
        assert high > max(8, window)
    elif kind == "not causal":
        assert low < 0
        assert all(m.reason for m in mixing if m.kind == kind)


def test_what_is_read_for_all_tokens_is_told_from_a_window() -> None:
    model = Small(joined).eval()
    program = Pipeline((Canonicalize(),)).run(capture(model))[0]
    (mix,) = found(program)
    names = {k.name for k in mix.keys}
    assert any(n.startswith("embedding") for n in names)
    assert not any(n.startswith("linear") for n in names)
