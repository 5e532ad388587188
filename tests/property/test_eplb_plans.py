"""Any sizes and loads: a plan of the balancer is whole, its tables agree, no expert is needlessly twice on a rank, and
it is as balanced as the published plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.eplb import Placement, duplicates, imbalance, moved, rebalance

KINDS = ("even", "skewed", "heavy", "counts", "idle", "alone", "few", "tiny", "huge")


@dataclass(frozen=True)
class Case:
    """Sizes that fit, and two loads, the second a drift of the first."""

    load: Any
    later: Any
    slots: int
    ranks: int
    nodes: int
    groups: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.slots, self.ranks, self.nodes, self.groups

    @property
    def crowded(self) -> bool:
        return self.slots // self.ranks > self.load.shape[1] // self.nodes


def loads(kind: str, rng: np.random.Generator, layers: int, experts: int) -> Any:
    shape = (layers, experts)
    found = {
        "even": lambda: np.ones(shape),
        "skewed": lambda: rng.lognormal(0, 1, shape),
        "heavy": lambda: rng.pareto(0.5, shape),
        "counts": lambda: rng.integers(0, 6, shape).astype(float),
        "idle": lambda: np.zeros(shape),
        "alone": lambda: np.eye(experts)[rng.integers(0, experts, layers)] * 1000.0,
        "few": lambda: rng.lognormal(0, 1, shape) * (rng.random(shape) < 0.2),
        "tiny": lambda: rng.random(shape) * 1e-300,
        "huge": lambda: rng.random(shape) * 1e300,
    }[kind]
    return found()


def case(seed: int, kind: str, limit: int = 40) -> Case:
    """Everything drawn from one seed: nodes of some groups and ranks, 1 to `limit` experts, odd numbers of ranks."""
    rng = np.random.default_rng(seed)
    nodes = int(rng.choice([1, 1, 2, 3]))
    groups = nodes * int(rng.integers(1, 4))
    experts = groups * int(rng.integers(1, max(2, limit // groups)))
    ranks = nodes * int(rng.integers(1, 10))
    room = -(-experts // ranks) + int(rng.choice([0, 0, 1, 1, 2, 3, experts]))
    load = loads(kind, rng, int(rng.integers(1, 4)), experts)
    later = load * rng.lognormal(0, 0.3, load.shape)
    return Case(load, later, ranks * room, ranks, nodes, groups)


def check_tables(found: Placement, layers: int, experts: int, slots: int) -> None:
    """Each expert has a slot, the counts are those of the slots, and the two tables are inverse to each other."""
    assert found.phy2log.shape == (layers, slots)
    assert found.logcnt.shape == (layers, experts)
    assert found.log2phy.shape == (layers, experts, found.logcnt.max())
    for layer in range(layers):
        phy2log, log2phy = found.phy2log[layer], found.log2phy[layer]
        assert (np.bincount(phy2log, minlength=experts) == found.logcnt[layer]).all()
        assert found.logcnt[layer].min() >= 1
        used = log2phy >= 0
        assert (used.sum(1) == found.logcnt[layer]).all()
        assert (np.diff(used.astype(int), axis=1) <= 0).all()
        assert (log2phy[~used] == -1).all()
        assert (phy2log[log2phy[used]] == np.nonzero(used)[0]).all()
        assert sorted(log2phy[used].tolist()) == list(range(slots))


def check_ranks(found: Placement, c: Case) -> None:
    """No expert twice on a rank, or, where ranks have more slots than their node has experts, as often as must be; the
    experts of a group on one node."""
    experts = c.load.shape[1]
    least = max(0, c.slots // c.ranks - experts // c.nodes) * c.ranks
    assert (duplicates(found.phy2log, c.ranks, experts) == least).all()
    node = np.arange(c.slots) // (c.slots // c.nodes)
    homes = np.zeros((c.groups, c.nodes), bool)
    for layer in found.phy2log:
        homes[:] = False
        homes[layer // (experts // c.groups), node] = True
        assert (homes.sum(1) == 1).all()


def check(c: Case) -> tuple[float, float]:
    """All that must hold for a case; the mean imbalance of the published plan and of ours."""
    layers, experts = c.load.shape
    old = rebalance(c.load, *c.sizes, policy="published")
    new = rebalance(c.load, *c.sizes)
    bad = rebalance(c.later, *c.sizes, current=old.phy2log)
    again = rebalance(c.later, *c.sizes, current=new.phy2log)
    for found in (old, new, bad, again):
        check_tables(found, layers, experts, c.slots)
    for found in (new, bad, again):
        check_ranks(found, c)
    was, now = imbalance(c.load, old.phy2log, c.ranks), imbalance(c.load, new.phy2log, c.ranks)
    clean = duplicates(old.phy2log, c.ranks, experts) == 0
    assert (now <= was * (1 + 1e-9))[clean].all()
    limit = imbalance(c.later, rebalance(c.later, *c.sizes).phy2log, c.ranks) * 1.01 * (1 + 1e-9)
    idle = c.later.sum(1) == 0
    for found in (bad, again):
        assert (imbalance(c.later, found.phy2log, c.ranks) <= limit)[~idle].all()
    # nothing moves that need not
    assert not moved(again.phy2log, rebalance(c.later, *c.sizes, current=again.phy2log).phy2log, c.ranks, experts).any()
    return float(was.mean()), float(now.mean())


@settings(deadline=None, max_examples=150)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_plans_are_whole(seed: int, kind: str) -> None:
    check(case(seed, kind))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS), st.integers(1, 5))
def test_windowed_plans_are_whole(seed: int, kind: str, windows: int) -> None:
    c = case(seed, kind)
    rng, (layers, experts) = np.random.default_rng(seed), c.load.shape
    found = rebalance(c.load * rng.random((windows, *c.load.shape)), c.slots, c.ranks, policy="windowed")
    check_tables(found, layers, experts, c.slots)
    least = max(0, c.slots // c.ranks - experts) * c.ranks
    assert (duplicates(found.phy2log, c.ranks, experts) == least).all()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.sampled_from(KINDS))
def test_plans_for_ranks_of_different_speed_are_whole(seed: int, kind: str) -> None:
    c = case(seed, kind)
    speed = np.random.default_rng(seed).choice([0.25, 0.5, 1.0, 1.1], c.ranks)
    new = rebalance(c.load, *c.sizes, speed=speed)
    again = rebalance(c.later, *c.sizes, speed=speed, current=new.phy2log)
    best = imbalance(c.later, rebalance(c.later, *c.sizes, speed=speed).phy2log, c.ranks, speed)
    for found in (new, again):
        check_tables(found, *c.load.shape, c.slots)
        check_ranks(found, c)
    idle = c.later.sum(1) == 0
    assert (imbalance(c.later, again.phy2log, c.ranks, speed) <= best * 1.01 * (1 + 1e-9))[~idle].all()


@pytest.mark.slow
def test_ten_thousand_plans() -> None:
    means = np.array([check(case(seed, KINDS[seed % len(KINDS)], 90 if seed % 3 else 20)) for seed in range(10_000)])
    published, balanced = means.mean(0)
    print(f"imbalance of 10,000 random plans: published {published:.4f}, balanced {balanced:.4f}")
    assert balanced < published
