"""The expert balancer on one core: how balanced its plans are, how many weights a new plan moves, how long it takes.

`OMP_NUM_THREADS=1 python -m tests.bench.bench_eplb [experts slots ranks]`, 40 layers, by default 384 experts in 448
slots on 64 ranks. Loads are lognormal, and drift by lognormal factors. Times are medians of warm calls, whole calls of
`rebalance` with its checks; beside it the published algorithm as we have it (numpy, all layers at once) and in plain
Python. Imbalance is the largest rank load over the mean. A fresh plan's weights are counted as it comes, and with its
ranks renamed so that most stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepinfer_compile.eplb import duplicates, imbalance, moved, rebalance
from deepinfer_compile.eplb.relabel import relabelled
from tests import plain_eplb

LAYERS, SKEWS, DRIFTS = 40, (0.3, 1.0, 1.5), (0.1, 0.3)


def median_ms(call: Callable[[], object], times: int) -> float:
    """Milliseconds of a call, the first one left out."""
    call()
    taken = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return 1000 * float(np.median(taken))


def bench_fresh(load: Any, skew: float, slots: int, ranks: int) -> None:
    """A line for one skew of loads: the published plan and ours."""
    experts = load.shape[1]
    old, new = rebalance(load, slots, ranks, policy="published"), rebalance(load, slots, ranks)
    was, now = imbalance(load, old.phy2log, ranks), imbalance(load, new.phy2log, ranks)
    twice = int((duplicates(old.phy2log, ranks, experts) > 0).sum())
    assert not duplicates(new.phy2log, ranks, experts).any()
    ours = median_ms(lambda: rebalance(load, slots, ranks), 50)
    numpy = median_ms(lambda: rebalance(load, slots, ranks, policy="published"), 20)
    plain = median_ms(lambda: plain_eplb.published(load, slots, ranks), 2)
    print(
        f"| {skew} | {was.mean():.4f} | {now.mean():.4f} | {twice} | {plain:.0f} | {numpy:.1f} | {ours:.2f} |",
        flush=True,
    )


def bench_replan(load: Any, skew: float, drift: float, slots: int, ranks: int) -> None:
    """A line for one skew and drift: what a fresh plan moves and what ours does."""
    experts = load.shape[1]
    before = rebalance(load, slots, ranks).phy2log
    later = load * np.random.default_rng(1).lognormal(0, drift, load.shape)
    fresh = rebalance(later, slots, ranks).phy2log
    renamed = relabelled(before, fresh, np.ones(ranks), 1, experts)
    ours = rebalance(later, slots, ranks, current=before).phy2log
    counts = [moved(before, plan, ranks, experts).mean() for plan in (fresh, renamed, ours)]
    balance = [imbalance(later, plan, ranks) for plan in (before, fresh, ours)]
    assert (balance[2] <= balance[1] * 1.01 * (1 + 1e-9)).all()
    took = median_ms(lambda: rebalance(later, slots, ranks, current=before), 30)
    cells = [f"{b.mean():.4f}" for b in balance] + [f"{c:.1f}" for c in counts]
    print(f"| {skew} | {drift} | {' | '.join(cells)} | {counts[0] / counts[2]:.1f} | {took:.2f} |", flush=True)


def main(experts: int = 384, slots: int = 448, ranks: int = 64) -> None:
    """Both tables."""
    print(f"{LAYERS} layers, {experts} experts, {slots} slots, {ranks} ranks")
    loads = {skew: np.random.default_rng(0).lognormal(0, skew, (LAYERS, experts)) for skew in SKEWS}
    heads = "imbalance published | balanced | layers with duplicates | plain ms | numpy ms | balanced ms |"
    print(f"\n| skew | {heads}\n|{'---|' * 7}")
    for skew, load in loads.items():
        bench_fresh(load, skew, slots, ranks)
    heads = "imbalance before | fresh | replanned | weights a layer: fresh | renamed | replanned | fewer | ms |"
    print(f"\n| skew | drift | {heads}\n|{'---|' * 10}")
    for skew, load in loads.items():
        for drift in DRIFTS:
            bench_replan(load, skew, drift, slots, ranks)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
