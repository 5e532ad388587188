"""Parts of the balancer alone: order of equal loads, improvements that never make worse, renaming ranks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_compile import eplb
from deepinfer_compile.eplb import compiled as decorator
from deepinfer_compile.eplb import duplicates, moved, rank_loads, rebalance
from deepinfer_compile.eplb.pack import pack, spread
from deepinfer_compile.eplb.relabel import relabelled
from deepinfer_compile.eplb.swaps import refine, replan


def test_equal_loads_are_placed_by_index_whatever_the_sort() -> None:
    load = np.random.default_rng(0).integers(1, 4, (1, 40)).astype(float)
    replicas, _, shares = spread(load, 48, 8)
    values = np.take_along_axis(shares, replicas, 1)
    by_index = np.argsort(-values, axis=1, kind="stable")
    backwards = np.argsort(-values[:, ::-1], axis=1, kind="stable")
    backwards = 47 - backwards
    assert (by_index != backwards).any()
    plans = [pack(replicas, order.copy(), shares, np.ones((1, 8))) for order in (by_index, backwards)]
    assert (plans[0] == plans[1]).all()


@pytest.mark.parametrize("limit", [0, 1, 3, 100])
@pytest.mark.parametrize("room", [2, 3, 6])
def test_refining_never_raises_the_largest_load(room: int, limit: int) -> None:
    rng = np.random.default_rng(room * 1000 + limit)
    for _ in range(60):
        ranks = int(rng.integers(2, 12))
        slots = room * ranks
        experts = int(rng.integers(max(room + 1, slots // 2), slots + 1))
        order = np.sort(np.concatenate([np.arange(experts), rng.integers(0, min(4, experts), slots - experts)]))
        if np.bincount(order).max() > ranks:
            continue
        plan = rng.permutation(experts)[order].reshape(room, ranks).T.reshape(1, slots).copy()
        load, speed = rng.lognormal(0, 1, (1, experts)), rng.choice([0.5, 1.0], (1, ranks))
        counts = np.bincount(plan[0], minlength=experts)[None]
        before = (rank_loads(load, plan, ranks) / speed).max()
        told = refine(plan, load, counts, load / counts, speed, 0.0, limit)
        after = (rank_loads(load, plan, ranks) / speed).max()
        assert after <= before * (1 + 1e-9)
        assert np.isclose(told[0], after, rtol=1e-9)
        assert (np.bincount(plan[0], minlength=experts) == counts[0]).all()
        assert counts.min() >= 1
        assert not duplicates(plan, ranks, experts).any()


def test_replanning_leaves_alone_what_is_balanced() -> None:
    load = np.random.default_rng(3).lognormal(0, 1, (4, 64))
    plan = rebalance(load, 80, 16).phy2log
    worst = rank_loads(load, plan, 16).max(1)
    changed = plan.copy()
    assert replan(changed, load, np.ones((4, 16)), worst, 1000).all()
    assert (changed == plan).all()
    assert not replan(changed, load, np.ones((4, 16)), worst * 0.5, 1000).any()


@pytest.mark.parametrize("nodes", [1, 2])
def test_renaming_finds_a_plan_again(nodes: int) -> None:
    """The same plan with nodes, ranks and slots in another order is the plan in force."""
    rng = np.random.default_rng(nodes)
    plan = rebalance(rng.lognormal(0, 1, (3, 48)), 64, 16, nodes=nodes, groups=2 * nodes).phy2log
    split = plan.reshape(3, nodes, 16 // nodes, 4)
    mixed = rng.permuted(split[:, rng.permutation(nodes)][:, :, rng.permutation(16 // nodes)], axis=3)
    mixed = mixed.reshape(3, 64)
    assert moved(plan, mixed, 16, 48).min() > 20
    assert (relabelled(plan, mixed, np.ones(16), nodes, 48) == plan).all()
    other = mixed.copy()
    other[:, 5], other[:, 40] = mixed[:, 40], mixed[:, 5]
    assert moved(plan, relabelled(plan, other, np.ones(16), 1, 48), 16, 48).max() <= 2


def test_renaming_respects_speeds() -> None:
    plan = np.array([[0, 1, 2, 3, 4, 5, 6, 7]])
    turned = np.array([[2, 3, 0, 1, 6, 7, 4, 5]])
    assert (relabelled(plan, turned, np.array([1.0, 1, 0.5, 0.5]), 1, 8) == plan).all()
    kept = relabelled(plan, turned, np.array([1.0, 0.5, 1, 0.5]), 1, 8)
    assert sorted(kept.reshape(4, 2)[[0, 2]].ravel().tolist()) == [2, 3, 6, 7]


def test_kernels_call_none_of_another_file() -> None:
    """Code kept on disk is that of a file: it would not be compiled again if another file's kernel changed."""
    names = {f.stem for f in Path(eplb.__file__).parent.glob("*.py") if "@compiled" in f.read_text()}
    assert {"pack", "swaps", "windowed", "relabel"} <= names
    for name in names:
        tree = ast.parse((Path(eplb.__file__).parent / f"{name}.py").read_text())
        taken = {n.module.split(".")[-1] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert not taken & names


def test_code_is_compiled_where_none_can_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def njit(cache: bool = False, nogil: bool = False) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available for file 'f.py'")
        return lambda function: function

    monkeypatch.setattr(decorator, "njit", njit)
    assert decorator.compiled(len) is len
