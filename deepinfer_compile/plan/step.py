"""The time of one step of a rank: a roofline of every part of a layer, exchanges, and how micro-batches overlap.

A part takes its bytes over the rate of memory or its operations over the rate of products, whichever is longer; parts
follow each other. A layer has four stages: dense (attention and everything each token passes), out, experts, back.
With two micro-batches the stages of one run beside those of the other, on one stream of kernels and one of exchanges,
both in order: then a layer takes the sum of its stages' times s for one micro-batch and what the streams cannot hide,
s + max(longest - shortest stage, |kernels - exchanges|), the largest mean of a circuit in the graph of the schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_compile.ops.registry import Work
from deepinfer_compile.plan.alltoall import Exchange
from deepinfer_compile.plan.hardware import Hardware
from deepinfer_compile.plan.load import Load, Peaks, Placed, peaks
from deepinfer_compile.plan.shape import DRAFTS, ROUTED, TABLES, Shape, Weight

APART = (ROUTED, TABLES, DRAFTS)
"""Weights that are no part of the dense stage: partitioned, looked up in, or not run."""


@dataclass(frozen=True, eq=False)
class Stages:
    """Seconds of each layer [L] for one micro-batch of `count`. core: the part of `dense` that reads caches. outside:
    of embedding and head, for the whole step. overhead: between layers' kernels, and once a step."""

    core: Any
    dense: Any
    out: Any
    experts: Any
    back: Any
    outside: float
    overhead: float
    count: int

    def layers(self) -> Any:
        """Seconds of each layer for all micro-batches."""
        stages = np.stack([self.dense, self.out, self.experts, self.back])
        total = stages.sum(0)
        if self.count == 1:
            return total
        uneven = np.abs(stages[0] + stages[2] - stages[1] - stages[3])
        return total + np.maximum(stages.max(0) - stages.min(0), uneven)

    @property
    def seconds(self) -> float:
        """Of the step."""
        return float(self.layers().sum() + self.outside + self.overhead)

    def phases(self) -> dict[str, float]:
        """Seconds of the step by part; of exchanges only what no kernel hides."""
        kernels = self.count * float((self.dense + self.experts).sum())
        return {
            "dense": self.count * float((self.dense - self.core).sum()),
            "attention": self.count * float(self.core.sum()),
            "experts": self.count * float(self.experts.sum()),
            "exchange not hidden": float(self.layers().sum()) - kernels,
            "embedding and head": self.outside,
            "overhead": self.overhead,
        }

    @property
    def exchanged(self) -> float:
        """Seconds that exchanges take, hidden or not."""
        return self.count * float((self.out + self.back).sum())


@dataclass(frozen=True, eq=False)
class Costs:
    """What one micro-batch of a rank does: seconds, operations, bytes read from memory, bytes sent, by layer."""

    stages: Stages
    flops: float
    read: float
    sent: float
    peaks: Peaks
    exchange: Exchange


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of a rank. rows [L]: tokens of each layer. filling: tokens that pass what fills caches. last:
    rows that reach the head. attention: its work per layer. exchange(tokens): of one layer."""

    rows: Any
    filling: float
    last: float
    attention: tuple[Work, ...]
    exchange: Callable[[float], Exchange]


def costs(shape: Shape, hardware: Hardware, plan: Placed, load: Load, batch: Batch, count: int) -> Costs:
    """Of a step of `count` such micro-batches on every rank of the plan."""
    routed = list(shape.routed_layers)
    choices = np.array([batch.rows[layer] for layer in routed]) * plan.ranks * shape.top
    found = peaks(plan, load, choices)
    layers = shape.layers
    dense, core, out, experts, back = (np.zeros(layers) for _ in range(5))
    flops = read = 0.0
    for layer, held in enumerate(_by_layer(shape)):
        work = batch.attention[layer]
        core[layer] = max(work.bytes / hardware["read_bytes"], work.flops / hardware["attention_flops"])
        parts = [(w, batch.filling if w.fills else batch.rows[layer]) for w in held if w.role not in APART]
        seconds, done, moved = products(hardware, parts)
        dense[layer] = core[layer] + seconds + hardware["layer_overhead"]
        flops, read = flops + work.flops + done, read + work.bytes + moved
    exchanges = [batch.exchange(batch.rows[layer]) for layer in routed]
    for i, (layer, exchange) in enumerate(zip(routed, exchanges)):
        moved, done, rate = expert_work(shape, hardware, layer)
        experts[layer] = max(found.touched[i] * moved / hardware["read_bytes"], found.fullest[i] * done / rate)
        slow = found.fullest[i] / found.mean[i] if found.mean[i] else 1.0
        out[layer], back[layer] = (_waiting(hardware, t, slow) for t in (exchange.out, exchange.back))
        flops, read = flops + found.mean[i] * done, read + found.touched[i] * moved
    outside = [(w, count * batch.last) for w in shape.weights if w.layer is None and w.role not in APART and w.active]
    seconds, done, moved = products(hardware, outside)
    overhead = hardware["step_overhead"]
    stages = Stages(core, dense, out, experts, back, seconds, overhead, count)
    sent = sum(e.out_bytes + e.back_bytes for e in exchanges)
    example = exchanges[-1] if exchanges else batch.exchange(0.0)
    return Costs(stages, count * flops + done, count * read + moved, count * sent, found, example)


def products(hardware: Hardware, parts: list[tuple[Weight, float]]) -> tuple[float, float, float]:
    """Seconds, operations and bytes of products of some rows with weights; each weight is read once."""
    used = [(w, rows) for w, rows in parts if rows]
    moved = float(sum(w.nbytes for w, _ in used))
    done = [(2.0 * w.active * rows, _rate(hardware, w.form)) for w, rows in used]
    busy = sum(flops / rate for flops, rate in done)
    return max(moved / hardware["read_bytes"], busy), sum(flops for flops, _ in done), moved


def _by_layer(shape: Shape) -> list[list[Weight]]:
    found: list[list[Weight]] = [[] for _ in range(shape.layers)]
    for weight in shape.weights:
        if weight.layer is not None and weight.role != DRAFTS:
            found[weight.layer].append(weight)
    return found


def expert_work(shape: Shape, hardware: Hardware, layer: int) -> tuple[float, float, float]:
    """Bytes of one expert of a layer, operations of one token in it, and operations a second."""
    held = [w for w in shape.weights if w.role == ROUTED and w.layer == layer]
    one = sum(w.nbytes for w in held) / shape.experts, 2.0 * sum(w.count for w in held) / shape.experts
    return *one, _rate(hardware, held[0].form)


def _waiting(hardware: Hardware, seconds: float, slow: float) -> float:
    """An exchange that waits for a rank that gets `slow` times the mean."""
    latency = min(hardware["latency"], seconds)
    return latency + (seconds - latency) * slow


def _rate(hardware: Hardware, form: str) -> float:
    return hardware["fp8_flops"] if form in ("fp4", "fp8") else hardware["bf16_flops"]


__all__ = ["Batch", "Costs", "Stages", "costs", "expert_work", "products"]
