"""The closed form beside the simulation, for one unit's decode steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_compile.plan.simulate import count_steps, simulate_steps
from deepinfer_compile.plan.step import expert_work
from deepinfer_compile.plan.unit import Unit


def check_decode(unit: Unit, batch: int, steps: int, seed: int) -> dict[str, Any]:
    """Mean numbers of `steps` simulated decode steps of `batch` requests a rank beside those of the closed form."""
    shape, hardware, count = unit.shape, unit.hardware, unit.microbatches
    rng = np.random.default_rng(seed)
    found = unit.decode_costs(batch)
    rows = batch * unit.request.rows / count
    choices = np.full(len(shape.routed_layers), rows * unit.plan.ranks * shape.top)
    counted = [count_steps(unit.plan, unit.load, choices, steps, rng) for _ in range(count)]
    moved, done = expert_seconds(unit)
    expected = found.peaks.mean, found.peaks.fullest
    seconds = simulate_steps(found.stages, expected, shape.routed_layers, counted, (moved, done), hardware["latency"])
    fullest = np.mean([c.fullest.mean(0) for c in counted], 0)
    touched = np.mean([c.touched.mean(0) for c in counted], 0)
    closed = float(found.stages.layers().sum())
    return {
        "steps": steps,
        "requests": batch,
        "ranks": unit.plan.ranks,
        "closed": {
            "seconds": closed,
            "fullest": float((found.peaks.fullest / found.peaks.mean).mean()),
            "touched": float(found.peaks.touched.mean()),
        },
        "simulated": {
            "seconds": float(seconds.mean()),
            "fullest": float((fullest / found.peaks.mean).mean()),
            "touched": float(touched.mean()),
        },
    }


def expert_seconds(unit: Unit) -> tuple[Any, Any]:
    """Seconds in which a slot's weights are read, and in which a choice is computed, of each routed layer [L]."""
    found = [expert_work(unit.shape, unit.hardware, layer) for layer in unit.shape.routed_layers]
    moved = np.array([nbytes / unit.hardware["read_bytes"] for nbytes, _, _ in found])
    return moved, np.array([flops / rate for _, flops, rate in found])


__all__ = ["check_decode", "expert_seconds"]
