"""When experts are placed anew and what is counted for it, without processes: numbers by hand."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.eplb import imbalance
from deepinfer_compile.eplb.layout import in_order, placed
from deepinfer_compile.errors import BadOption, BadRequest
from deepinfer_compile.ops import DISPATCH
from deepinfer_compile.ops.parallel import joined
from deepinfer_compile.runtime.ranks import Ranks
from deepinfer_compile.runtime.rebalance import Balancer, planned, unevenness
from deepinfer_compile.runtime.spread import Spread
from deepinfer_compile.runtime.tally import Tally
from tests.plain_model import make_plain


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("interval", {"interval": 0}),
        ("interval", {"interval": 2.5}),
        ("window", {"window": -1}),
        ("window", {"interval": 9, "window": 10}),
        ("threshold", {"threshold": 0.9}),
        ("threshold", {"threshold": float("nan")}),
        ("threshold", {"threshold": float("inf")}),
    ],
)
def test_options_that_are_none(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=f"option '{name}'"):
        dc.Rebalance(**options)


def test_bundles_whose_experts_are_together(tmp_path: Path) -> None:
    dc.build(make_plain("loop", layers=1), tmp_path / "b", native=False)
    with pytest.raises(BadOption, match=r"'rebalance'.*together"):
        dc.load(tmp_path / "b", native=False, rebalance=dc.Rebalance())
    assert dc.load(tmp_path / "b", native=False).expert_stats == dc.ExpertStats()


def test_one_rank_has_nothing_to_even_out(tmp_path: Path) -> None:
    dc.build(make_plain("loop", layers=1), tmp_path / "b", native=False, experts=dc.ExpertPlan(ranks=1))
    with pytest.raises(BadOption, match=r"'rebalance'.*no Rebalance"):
        dc.load(tmp_path / "b", native=False, rebalance=5)  # type: ignore[arg-type]
    llm = dc.load(tmp_path / "b", native=False, rebalance=dc.Rebalance(interval=2, window=1))
    llm.generate([[5, 6, 7]], dc.SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    found = llm.expert_stats
    assert (found.rebalanced, found.skipped, found.choices, found.before) == (0, 2, 2, 1.0)
    with llm.stream([[5, 6, 7]]), pytest.raises(BadRequest, match="one call at a time"):
        llm.balance(None)
    executor = weakref.ref(llm.ranks)
    del llm
    assert executor() is None, "it would keep the process group until Python ends"


def test_real_tokens_alone_are_counted_and_sent() -> None:
    """3 of 8 tokens are real, all choose 2 of 4 experts, padding always expert 0: 6 choices, 6 rows."""
    ids = torch.tensor([[1, 2], [0, 0], [0, 0], [1, 3], [0, 0], [0, 0], [0, 0], [2, 1]], dtype=torch.int32)
    real = torch.tensor([True, False, False, True, False, False, False, True])
    plan = in_order(1, 4, 4, 1)
    tables = torch.from_numpy(plan.log2phy[0]), torch.from_numpy(plan.logcnt[0]), torch.tensor([0, 4])
    x, rank, lanes = torch.randn(8, 3), torch.tensor([0]), torch.empty(16, dtype=torch.uint8)
    tally = Tally(2, 4)
    tally.begin(real, True)
    for _ in range(2):
        with joined(None, tally):
            rows, local, row, _ = DISPATCH.overload(x, ids, *tables, rank, lanes, 4, "exact")
        assert torch.equal(rows, x[[0, 0, 3, 3, 7, 7]])
        assert local.flatten().tolist() == [1, 2, 1, 3, 2, 1]
        assert ((row >= 0).all(1) == real).all()
        assert ((row >= 0).any(1) == real).all()
    assert tally.take().tolist() == [[0, 3, 2, 1]] * 2
    assert tally.load.sum() == 0
    rows, *_ = DISPATCH.overload(x, ids, *tables, rank, lanes, 4, "exact")
    assert len(rows) == 6 + 5, "outside of it, nothing is left out"


def test_rows_that_a_layer_keeps_are_of_requests() -> None:
    tally, ids = Tally(1, 4), torch.tensor([[1], [3]])
    tally.begin(torch.tensor([True, True, False]), True)
    assert tally.sent(ids) is ids
    tally.begin(torch.tensor([False]), True)
    assert tally.sent(ids).tolist() == [[-1], [-1]]
    assert tally.take().tolist() == [[0, 1, 0, 1]]
    tally.begin(torch.tensor([True]), False)
    assert tally.sent(ids) is ids
    assert tally.load.sum() == 0


def test_layers_that_are_even_or_idle_stay() -> None:
    """Of three layers only the first, all of whose load is on rank 0, is planned again."""
    old = in_order(3, 8, 10, 2).phy2log
    load = 100 * np.array([[0, 9, 9, 9, 9, 0, 0, 0], [1] * 8, [0] * 8])
    new = planned(load, old, 2, 1.4)
    assert (new[1:] == old[1:]).all()
    assert imbalance(load.astype(float), new, 2)[0] <= 1.01
    assert 0 < (new[0] != old[0]).sum() <= 4
    assert old.tolist() == in_order(3, 8, 10, 2).phy2log.tolist()
    assert (planned(load // 100, old, 2, 1.4) == old).all(), "36 choices may be on one rank by chance"
    assert (planned(load, old, 2, 100.0) == old).all()
    assert (planned(0 * load, old, 2, 1.0) == old).all()


def test_what_cannot_be_more_even_stays() -> None:
    """One expert has all the load, and is on both ranks already."""
    old = np.array([[0, 1, 2, 0, 3, 4]])
    assert (planned(np.array([[0, 7000, 0, 0, 0]]), old, 2, 1.1)[0, :3] == 1).sum() == 1
    both = np.array([[0, 1, 2, 1, 3, 4]])
    load = np.array([[40000, 1000000, 0, 0, 0]])
    assert unevenness(load, both, 2).tolist() == [54 / 52]
    assert (planned(load, both, 2, 1.0) == both).all()


def test_empty_slots_are_filled_with_what_is_needed() -> None:
    """Five experts in 2 * 3 places: the empty one of rank 1 gets a copy of the most loaded expert of the other."""
    old = in_order(1, 5, 5, 2).phy2log
    assert old.tolist() == [[0, 1, 2, 3, 4, -1]]
    load = 1000 * np.array([[1, 8, 1, 1, 1]])
    assert unevenness(load, old, 2).tolist() == [10 / 6]
    assert planned(load, old, 2, 1.1).tolist() == [[0, 1, 2, 3, 4, 1]]


def test_any_load_gives_a_plan_that_is_no_worse() -> None:
    """Random sizes, loads and empty slots: layers that change were uneven and are less so, every expert has a slot, and
    the same load gives the same plan."""
    draw = np.random.default_rng(0)
    for _ in range(150):
        ranks, experts = int(draw.integers(2, 6)), int(draw.integers(4, 20))
        slots = int(draw.integers(experts, min(2, ranks) * experts + 1))
        old = in_order(3, experts, slots, ranks).phy2log
        load = (draw.lognormal(3, 1.5, (3, experts)) * draw.integers(0, 2, (3, 1))).astype(np.int64)
        given = old.copy(), load.copy()
        new = planned(load, old, ranks, 1.2)
        assert (old == given[0]).all()
        assert (load == given[1]).all()
        assert (new == planned(load, old, ranks, 1.2)).all()
        assert (placed(new, experts).logcnt >= 1).all()
        before, after = unevenness(load, old, ranks), unevenness(load, new, ranks)
        changed = (new != old).any(1)
        assert (after[changed] < before[changed]).all()
        assert (before[changed] > 1.2).all()


def test_large_counts_keep_their_order() -> None:
    """2**24 and 2**24 + 1 are one number in fp32."""
    load = np.array([[2**24, 2**24 + 1, 0, 0]])
    assert unevenness(load, np.array([[0, 2, 1, 3]]), 2)[0] > 1
    assert unevenness(load, np.array([[0, 1, 2, 3]]), 2)[0] == 2


def test_the_window_is_before_the_look() -> None:
    """Of every five steps the last two are counted; the third look finds nothing."""
    section = {"layers": 1, "experts": 4, "slots": 4, "room": 4, "ranks": 1}
    spread = Spread(section, placed(np.arange(4)[None], 4), Ranks())
    tally = Tally(1, 4)
    balancer = Balancer(dc.Rebalance(interval=5, window=2), tally, spread, lambda executor, new: (0, 0))
    seen = []
    for step in range(15):
        tally.begin(torch.tensor([True]), balancer.counting)
        if step < 10:
            tally.sent(torch.tensor([[step % 4]]))
        balancer.after_step(SimpleNamespace(spread=spread))  # type: ignore[arg-type]
        seen.append((balancer.stats.skipped, balancer.stats.choices))
    assert seen == [(0, 0)] * 4 + [(1, 2)] * 5 + [(2, 2)] * 5 + [(3, 0)]
