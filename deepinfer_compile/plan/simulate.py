"""Steps simulated choice by choice, to check the closed form: where tokens go is drawn or recorded, who waits is run.

Nothing of the closed form is used but the seconds of a rank's work: choices fall on slots one by one (a multinomial
draw) or as a trace has them, the fullest rank is looked for, and the stages of all micro-batches run in order on two
streams, layer after layer, each as soon as its stream and what it needs are free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_compile.eplb.placement import Floats
from deepinfer_compile.plan.load import Load, Placed
from deepinfer_compile.plan.step import Stages


@dataclass(frozen=True, eq=False)
class Counted:
    """Of each step and layer [steps, L]: choices of the fullest rank, and slots hit where most are."""

    fullest: Floats
    touched: Floats


def count_steps(plan: Placed, load: Load, choices: Floats, steps: int, rng: np.random.Generator) -> Counted:
    """Steps of `choices` [L] in each layer. Of a recorded load, its steps in order, as often as needed."""
    shares = plan.shares(load.shares)
    fullest, touched = np.empty((steps, len(choices))), np.empty((steps, len(choices)))
    recorded = None if load.windows is None else plan.shares(load.windows)
    for layer, total in enumerate(choices):
        if recorded is None:
            chance = shares[layer] / shares[layer].sum()
            hits = rng.multinomial(round(total), chance, size=steps).astype(np.float64)
        else:
            hits = recorded[np.arange(steps) % len(recorded), layer] * total
        by_rank = hits.reshape(steps, plan.ranks, -1)
        fullest[:, layer] = by_rank.sum(-1).max(-1)
        touched[:, layer] = np.minimum(by_rank, 1.0).sum(-1).max(-1)
    return Counted(fullest, touched)


def run_schedule(dense: Any, out: Any, experts: Any, back: Any) -> Floats:
    """When the last stage of each step ends [steps]; each argument [micro-batches, steps, L] seconds.

    Two streams take their stages in order: dense of every micro-batch, then experts of every one, on one of them; the
    way out of every one, then the way back, on the other.
    """
    count, steps, layers = dense.shape
    kernels, links = np.zeros(steps), np.zeros(steps)
    ready = np.zeros((count, steps))
    for layer in range(layers):
        for m in range(count):
            kernels = np.maximum(kernels, ready[m]) + dense[m, :, layer]
            ready[m] = kernels
        for m in range(count):
            links = np.maximum(links, ready[m]) + out[m, :, layer]
            ready[m] = links
        for m in range(count):
            kernels = np.maximum(kernels, ready[m]) + experts[m, :, layer]
            ready[m] = kernels
        for m in range(count):
            links = np.maximum(links, ready[m]) + back[m, :, layer]
            ready[m] = links
    return np.asarray(ready.max(0), np.float64)


def simulate_steps(
    stages: Stages,
    expected: tuple[Floats, Floats],
    routed: tuple[int, ...],
    counted: list[Counted],
    expert_seconds: tuple[Floats, Floats],
    latency: float,
) -> Floats:
    """Seconds of each step, layers alone, with drawn numbers in place of expected ones.

    expected: mean choices of a rank and expected choices of the fullest [L], by which `stages` has its exchanges.
    counted: of each micro-batch. expert_seconds: of a slot that is hit, and of a choice, [L].
    """
    steps = len(counted[0].fullest)
    shape = (stages.count, steps, len(stages.dense))
    dense = np.broadcast_to(stages.dense, shape)
    out, experts, back = (np.zeros(shape) for _ in range(3))
    at = list(routed)
    for m, found in enumerate(counted):
        experts[m][:, at] = np.maximum(found.touched * expert_seconds[0], found.fullest * expert_seconds[1])
        slow = found.fullest / expected[1]
        for into, seconds in ((out, stages.out), (back, stages.back)):
            fixed = np.minimum(latency, seconds[at])
            into[m][:, at] = fixed + (seconds[at] - fixed) * slow
    return run_schedule(dense, out, experts, back)


__all__ = ["Counted", "count_steps", "run_schedule", "simulate_steps"]
