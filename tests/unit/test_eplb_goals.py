"""What the balancer promises in numbers, at the size of a large deployment: few weights moved, milliseconds taken."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deepinfer_compile.eplb import duplicates, imbalance, moved, rebalance

SIZES = (448, 64)


def loads(skew: float) -> Any:
    return np.random.default_rng(0).lognormal(0, skew, (40, 384))


def least_ms(call: Callable[[], object]) -> float:
    """The fastest of ten warm calls: other processes may hold any one of them up."""
    call()
    taken = []
    for _ in range(10):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return 1000 * min(taken)


@pytest.mark.parametrize("skew", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("drift", [0.1, 0.3])
def test_replanning_moves_few_weights(skew: float, drift: float) -> None:
    load = loads(skew)
    before = rebalance(load, *SIZES).phy2log
    later = load * np.random.default_rng(1).lognormal(0, drift, load.shape)
    fresh, ours = (rebalance(later, *SIZES, current=c).phy2log for c in (None, before))
    assert (imbalance(later, ours, 64) <= imbalance(later, fresh, 64) * 1.01 * (1 + 1e-9)).all()
    assert 5.5 * moved(before, ours, 64, 384).sum() < moved(before, fresh, 64, 384).sum()
    assert not duplicates(ours, 64, 384).any()


def test_a_day_of_drift() -> None:
    """Twenty plans in a row stay whole and near a fresh plan, and each moves few weights."""
    rng, load = np.random.default_rng(2), loads(1.0)[:4]
    plan = rebalance(load, *SIZES).phy2log
    for _ in range(20):
        load = load * rng.lognormal(0, 0.2, load.shape)
        ours = rebalance(load, *SIZES, current=plan).phy2log
        fresh = rebalance(load, *SIZES).phy2log
        assert (imbalance(load, ours, 64) <= imbalance(load, fresh, 64) * 1.01 * (1 + 1e-9)).all()
        assert 3 * moved(plan, ours, 64, 384).sum() < moved(plan, fresh, 64, 384).sum()
        plan = ours


def test_a_larger_tolerance_moves_less() -> None:
    load = loads(1.0)
    before = rebalance(load, *SIZES).phy2log
    later = load * np.random.default_rng(1).lognormal(0, 0.2, load.shape)
    counts = [
        moved(before, rebalance(later, *SIZES, current=before, tolerance=t).phy2log, 64, 384).sum()
        for t in (0.01, 0.05, 0.2, 9.0)
    ]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > 1.5 * counts[1] > 0
    assert counts[-1] == 0


def test_time() -> None:
    """Three times what is promised (2 and 10 ms), since the machine is shared."""
    load = loads(1.0)
    before = rebalance(load, *SIZES).phy2log
    later = load * np.random.default_rng(1).lognormal(0, 0.3, load.shape)
    assert least_ms(lambda: rebalance(load, *SIZES)) < 6
    assert least_ms(lambda: rebalance(later, *SIZES, current=before)) < 30


@pytest.mark.parametrize("policy", ["balanced", "published", "windowed"])
def test_time_with_nodes(policy: str) -> None:
    load = np.random.default_rng(0).random((58, 256))
    if policy == "windowed":
        windows = load * np.random.default_rng(1).random((20, 58, 256))
        assert least_ms(lambda: rebalance(windows, 288, 32, policy="windowed")) < 1500
        return
    assert least_ms(lambda: rebalance(load, 288, 32, 4, 8, policy=policy)) < 500  # type: ignore[arg-type]
