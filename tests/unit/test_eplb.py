"""The balancer: the published example, the published algorithm in plain Python, balance, what is refused, and bits."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_compile.eplb import duplicates, imbalance, rank_loads, rebalance, windowed_imbalance
from deepinfer_compile.errors import BadOption, MissingExtra
from tests import plain_eplb

EXAMPLE = np.array(
    [[90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86], [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27]]
)
POLICIES = ("balanced", "published", "windowed")


def lognormal(seed: int, layers: int, experts: int, sigma: float = 1.0) -> Any:
    return np.random.default_rng(seed).lognormal(0, sigma, (layers, experts))


def test_published_example() -> None:
    found = rebalance(EXAMPLE, 16, 8, nodes=2, groups=4, policy="published")
    assert found.phy2log.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert found.logcnt[0].tolist() == [1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1]
    assert found.log2phy.shape == (2, 12, 2)


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "nodes", "groups"),
    [(12, 16, 8, 2, 4), (12, 16, 8, 1, 1), (24, 36, 6, 3, 6), (30, 35, 7, 1, 1), (16, 16, 4, 1, 8), (8, 8, 8, 1, 1),
     (24, 36, 6, 4, 6), (64, 72, 8, 2, 8)],
)  # fmt: skip
def test_published_equals_the_plain_one(experts: int, slots: int, ranks: int, nodes: int, groups: int) -> None:
    drawn = np.random.default_rng(experts).integers(0, 50, (6, experts)).astype(float)
    for load in (drawn, lognormal(1, 3, experts), np.zeros((1, experts))):
        found = rebalance(load, slots, ranks, nodes, groups, policy="published")
        phy2log, tables = plain_eplb.published(load, slots, ranks, nodes, groups)
        assert found.phy2log.tolist() == phy2log
        assert [[[k for k in row if k >= 0] for row in layer] for layer in found.log2phy.tolist()] == tables
        assert bool(found.note) == (groups % nodes > 0)


def test_large_counts_keep_their_order() -> None:
    load = np.array([[2**24, 2**24 + 1, 2**24]])
    for policy in ("balanced", "published"):
        assert rebalance(load, 4, 2, policy=policy).logcnt.tolist() == [[1, 2, 1]]


def test_no_duplicate_on_a_rank() -> None:
    """Both recipes have one in the published plan."""
    load = np.array([[5.0, 11, 7, 3], [1, 1, 1, 1]])
    old = rebalance(load, 6, 2, policy="published").phy2log
    assert duplicates(old, 2, 4).tolist() == [1, 2]
    assert not duplicates(rebalance(load, 6, 2).phy2log, 2, 4).any()
    assert not duplicates(rebalance(load, 6, 2, current=old).phy2log, 2, 4).any()
    wide = lognormal(3, 40, 256, 1.5)
    assert not duplicates(rebalance(wide, 288, 32).phy2log, 32, 256).any()


def test_more_room_than_experts() -> None:
    """Three experts, four slots on each rank: one duplicate on each is what there must be."""
    load = np.array([[9.0, 1, 1]])
    for policy in ("balanced", "windowed"):
        found = rebalance(load if policy == "balanced" else load[None], 16, 4, policy=policy)
        assert duplicates(found.phy2log, 4, 3).tolist() == [4]
        assert imbalance(load, found.phy2log, 4)[0] == 1.0
    kept = np.array([[0, 1, 2, 0, 2, 1, 0, 0, 1, 0, 2, 0, 0, 0, 1, 2]])
    assert rebalance(load, 16, 4, current=kept).phy2log.tolist() == kept.tolist()
    bent = np.array([[0, 1, 2, 0, 2, 1, 0, 1, 1, 0, 2, 0, 0, 0, 1, 2]])
    assert imbalance(load, rebalance(load, 16, 4, current=bent).phy2log, 4)[0] == 1.0


def test_balance_near_the_best_possible() -> None:
    """Against every plan of tiny layers, where a slot is a quarter of all: 5% off on average."""
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(12):
        load = rng.lognormal(0, 1, (1, 5))
        found = rank_loads(load, rebalance(load, 6, 2).phy2log, 2).max()
        ratios.append(found / plain_eplb.least_maximum(load[0].tolist(), 6, 2))
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.05


@pytest.mark.parametrize("sigma", [0.3, 1.0, 1.5])
def test_better_than_published_on_average(sigma: float) -> None:
    load = lognormal(7, 40, 384, sigma)
    old, new = (imbalance(load, rebalance(load, 448, 64, policy=p).phy2log, 64) for p in ("published", "balanced"))
    assert new.mean() < old.mean()


def test_groups_stay_on_a_node() -> None:
    load = lognormal(5, 6, 64)
    found = rebalance(load, 96, 16, nodes=4, groups=8)
    old = rebalance(load, 96, 16, nodes=4, groups=8, policy="published")
    nodes = found.phy2log.reshape(6, 4, 24) // 8
    assert all(len(set(node.tolist())) == 2 for layer in nodes for node in layer)
    assert not duplicates(found.phy2log, 16, 64).any()
    assert imbalance(load, found.phy2log, 16).mean() < imbalance(load, old.phy2log, 16).mean()


def test_slow_ranks_get_less() -> None:
    load, speed = lognormal(2, 8, 64), np.ones(16)
    speed[[3, 7]] = 0.5, 0.8
    found = rebalance(load, 96, 16, speed=speed).phy2log
    loads = rank_loads(load, found, 16)
    assert imbalance(load, found, 16, speed).max() < 1.02
    assert np.allclose(loads[:, 3] / loads[:, 0], 0.5, atol=0.02)
    assert imbalance(load, rebalance(load, 96, 16).phy2log, 16, speed).min() > 1.7
    drifted = load * np.random.default_rng(0).lognormal(0, 0.2, load.shape)
    again = rebalance(drifted, 96, 16, current=found, speed=speed).phy2log
    limit = imbalance(drifted, rebalance(drifted, 96, 16, speed=speed).phy2log, 16, speed) * 1.01
    assert (imbalance(drifted, again, 16, speed) <= limit + 1e-9).all()


def test_idle_layers() -> None:
    for policy in ("balanced", "windowed"):
        zero = np.zeros((1, 2, 256)) if policy == "windowed" else np.zeros((2, 256))
        counts = rebalance(zero, 288, 32, policy=policy).logcnt
        assert (counts.min(), counts.max()) == (1, 2)
    before = rebalance(lognormal(0, 2, 256), 288, 32).phy2log
    assert (rebalance(np.zeros((2, 256)), 288, 32, current=before).phy2log == before).all()
    alone = np.zeros((1, 30))
    alone[0, 4] = 7.0
    assert rebalance(alone, 35, 7).logcnt[0, 4] == 6
    found = rebalance(alone, 42, 7)
    assert found.logcnt[0, 4] == 7
    assert sorted(found.logcnt[0].tolist()) == [1] * 23 + [2] * 6 + [7]
    assert not duplicates(found.phy2log, 7, 30).any()


def test_an_idle_node_does_not_hide_a_bad_plan() -> None:
    load = np.zeros((1, 32))
    load[0, :16] = np.random.default_rng(0).lognormal(0, 1, 16) * 1e-3
    bad = np.array([[*range(16), *range(8), *range(16, 32), *range(16, 24)]])
    fresh, found = (rebalance(load, 48, 12, nodes=2, groups=2, current=c).phy2log for c in (None, bad))
    assert imbalance(load, found, 12)[0] <= imbalance(load, fresh, 12)[0] * 1.01
    assert imbalance(load, bad, 12)[0] > 2


def test_windowed_equals_the_plain_one() -> None:
    rng = np.random.default_rng(4)
    windows = rng.poisson(rng.lognormal(2, 1, (1, 5, 24)) * rng.lognormal(0, 0.7, (9, 5, 24))) + rng.random((9, 5, 24))
    found = rebalance(windows, 32, 8, policy="windowed")
    for layer in range(5):
        counts = plain_eplb.windowed_counts(windows[:, layer], 32, 8)
        assert found.logcnt[layer].tolist() == counts
        replicas = [*range(24), *(e for e, c in enumerate(counts) for _ in range(c - 1))]
        held = plain_eplb.windowed_ranks(windows[:, layer], counts, replicas, 8)
        assert found.phy2log[layer].reshape(8, 4).tolist() == held
    mean = rebalance(windows.sum(0), 32, 8).phy2log
    assert windowed_imbalance(windows, found.phy2log, 8).mean() < windowed_imbalance(windows, mean, 8).mean()


def test_windowed_steady_load_has_no_useless_replicas() -> None:
    """An expert that is idle in the fullest window gets nothing while another is loaded."""
    windows = np.zeros((3, 1, 8))
    windows[:, 0, 5], windows[:, 0, 2] = 8.0, 8.0
    assert rebalance(windows, 12, 4, policy="windowed").logcnt.tolist() == [[1, 1, 3, 1, 1, 3, 1, 1]]


@pytest.mark.parametrize("ranks", [16, 4])
def test_local_maps(ranks: int) -> None:
    experts, slots = (256, 272) if ranks == 16 else (16, 20)
    found = rebalance(lognormal(1, 3, experts), slots, ranks)
    maps = found.local(ranks)
    assert maps.shape == (ranks, 3, experts)
    rebuilt = np.full((3, ranks, slots // ranks), -1)
    for rank, layer, expert in np.argwhere(maps >= 0):
        rebuilt[layer, rank, maps[rank, layer, expert]] = expert
    assert (rebuilt.reshape(3, slots) == found.phy2log).all()
    crowded = rebalance(np.ones((1, 3)), 8, 2)
    assert crowded.local(2).tolist() == [[[0, 1, 2]], [[0, 1, 2]]]
    plain = rebalance(lognormal(1, 1, 16), 16, 16)
    assert sorted(plain.phy2log[0].tolist()) == list(range(16))


@pytest.mark.parametrize(
    ("sizes", "option", "fix"),
    [((256, 256, 3, 1, 8), "slots", "use 258 slots"), ((256, 288, 7, 1, 8), "slots", "use 287 or 294 slots"),
     ((256, 255, 8, 1, 8), "slots", "use 256 slots on 8 ranks"), ((256, 288, 32, 4, 0), "groups", "from 1"),
     ((256, 288, 32, 3, 6), "groups", "divisor of 256"), ((256, 288, 8, 16, 16), "nodes", "divisor of 8"),
     ((256, 288, -1, 1, 1), "ranks", "from 1"), ((256, 288.0, 32, 1, 1), "slots", "whole number")],
)  # fmt: skip
def test_sizes_that_do_not_fit(sizes: tuple[int, ...], option: str, fix: str) -> None:
    experts, slots, ranks, nodes, groups = sizes
    for policy in ("balanced", "published"):
        with pytest.raises(BadOption) as caught:
            rebalance(np.ones((2, experts)), slots, ranks, nodes, groups, policy=policy)
        assert caught.value.values["name"] == option
        assert fix in str(caught.value)


@pytest.mark.parametrize("sizes", [(256, 288, 8, 3, 8), (256, 288, 32, 4, 6)])
def test_groups_that_do_not_divide_by_nodes(sizes: tuple[int, ...]) -> None:
    experts, slots, ranks, nodes, groups = sizes
    load = lognormal(0, 2, experts)
    found = rebalance(load, slots, ranks, nodes, groups)
    assert found.note == f"{groups} groups do not divide by {nodes} nodes: planned as one node"
    assert (found.phy2log == rebalance(load, slots, ranks).phy2log).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("policy", POLICIES)
def test_loads_that_are_no_counts(bad: float, policy: str) -> None:
    load = np.ones((2, 3, 8)) if policy == "windowed" else np.ones((3, 8))
    load[..., 1, 5] = bad
    with pytest.raises(BadOption, match="layer 1, expert 5"):
        rebalance(load, 12, 4, policy=policy)


@pytest.mark.parametrize(
    ("load", "policy"),
    [(np.ones(8), "balanced"), (np.ones((2, 2, 8)), "balanced"), (np.ones((2, 8)), "windowed"), ("loads", "balanced"),
     ([[1, 2], [3]], "balanced"), (np.ones((0, 8)), "balanced"), ([["a", "b"]], "published"),
     (np.full((1, 8), 1e308), "balanced")],
)  # fmt: skip
def test_loads_of_another_shape(load: Any, policy: str) -> None:
    with pytest.raises(BadOption, match="'load'"):
        rebalance(load, 12, 4, policy=policy)


def test_what_would_be_ignored_is_refused() -> None:
    load, plan = np.ones((1, 8)), rebalance(np.ones((1, 8)), 12, 4).phy2log
    for options in (
        {"policy": "published", "current": plan}, {"policy": "published", "speed": np.ones(4)},
        {"policy": "greedy"}, {"tolerance": -0.1}, {"tolerance": float("nan")}, {"speed": np.zeros(4)},
        {"speed": np.ones(3)}, {"current": plan[:, :8]}, {"current": plan * 0}, {"current": plan - 1},
        {"current": plan + 0.5}, {"current": plan + 4},
    ):  # fmt: skip
        with pytest.raises(BadOption) as caught:
            rebalance(load, 12, 4, **options)  # type: ignore[arg-type]
        assert caught.value.values["name"] in options
    with pytest.raises(BadOption, match="nodes"):
        rebalance(load[None], 12, 4, nodes=2, groups=2, policy="windowed")


def test_tensors_lists_and_arrays_are_alike_and_not_changed() -> None:
    load = np.random.default_rng(0).integers(0, 100, (3, 30)).astype(np.float32)
    kept = load.copy()
    found = rebalance(load, 35, 7)
    for other in (torch.from_numpy(load), torch.from_numpy(load).bfloat16(), load.tolist(), load.T.copy().T):
        assert (rebalance(other, 35, 7).phy2log == found.phy2log).all()
    again = torch.from_numpy(found.phy2log.astype(np.int32))
    assert (rebalance(load, 35, 7, current=again).phy2log == found.phy2log).all()
    assert (load == kept).all()
    assert {found.phy2log.dtype, found.log2phy.dtype, found.logcnt.dtype} == {np.dtype(np.int64)}


BYTES = """
import hashlib, numpy as np
from deepinfer_compile.eplb import rebalance
rng = np.random.default_rng(0)
load = rng.integers(0, 9, (3, 30)).astype(float)
first = rebalance(load, 36, 6, nodes=2, groups=6)
made = [first, rebalance(load[::-1], 36, 6, nodes=2, groups=6, current=first.phy2log), rebalance(load, 35, 7),
        rebalance(load[None], 35, 7, policy="windowed"), rebalance(load, 35, 7, speed=np.linspace(0.5, 1, 7)),
        rebalance(load, 35, 7, policy="published"), rebalance(rng.lognormal(0, 1, (2, 30)), 35, 7)]
print(hashlib.sha256(b"".join(m.phy2log.tobytes() + m.log2phy.tobytes() for m in made)).hexdigest())
"""


def test_bits_are_the_same_in_other_processes_and_without_the_compiler() -> None:
    """The kernels run by Python itself are the second opinion on numba's code."""
    found = set()
    for extra in (
        {"OMP_NUM_THREADS": "1"},
        {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "7"},
        {"NUMBA_DISABLE_JIT": "1"},
    ):
        command = [sys.executable, "-c", BYTES]
        done = subprocess.run(command, env={**os.environ, **extra}, capture_output=True, text=True, check=True)
        found.add(done.stdout)
    assert len(found) == 1


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("deepinfer_compile.eplb.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(MissingExtra, match=r"deepinfer-compile\[eplb\]"):
        rebalance(EXAMPLE, 16, 8)
    assert rebalance(EXAMPLE, 16, 8, policy="published").phy2log.shape == (2, 16)
