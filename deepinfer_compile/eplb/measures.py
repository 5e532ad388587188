"""How good a plan is: load of ranks, balance, weights that move, experts that a rank holds twice.

A rank's load is the sum over its slots of the expert's load divided by its number of replicas: tokens are spread evenly
over replicas.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.placement import Floats, Ints


def rank_loads(load: Floats, phy2log: Ints, ranks: int) -> Floats:
    """The load [L, ranks] of each rank under loads [L, E]."""
    layers, experts = load.shape
    flat = (phy2log + np.arange(layers)[:, None] * experts).ravel()
    counts = np.bincount(flat, minlength=layers * experts).reshape(layers, experts)
    share = np.take_along_axis(load / np.maximum(counts, 1), phy2log, 1)
    return np.asarray(share.reshape(layers, ranks, -1).sum(-1), np.float64)


def imbalance(load: Floats, phy2log: Ints, ranks: int, speed: Floats | None = None) -> Floats:
    """Of each layer [L], the time of the slowest rank over that of a perfect split, at least 1; 1 without load.

    speed: relative speeds [ranks]; equal where not given, and then this is the largest load over the mean.
    """
    speeds = np.ones(ranks) if speed is None else speed
    loads = rank_loads(load, phy2log, ranks)
    perfect = loads.sum(1) / speeds.sum()
    found = np.ones(len(loads))
    np.divide((loads / speeds).max(1), perfect, out=found, where=perfect > 0)
    return found


def windowed_imbalance(windows: Floats, phy2log: Ints, ranks: int) -> Floats:
    """Of each layer [L], the mean over windows [W, L, E] of the largest rank load, over the mean rank load."""
    loads = np.stack([rank_loads(step, phy2log, ranks) for step in windows])
    mean = loads.mean((0, 2))
    found = np.ones(loads.shape[1])
    np.divide(loads.max(2).mean(0), mean, out=found, where=mean > 0)
    return found


def held(phy2log: Ints, ranks: int, experts: int) -> Ints:
    """How many copies [L, ranks, E] of each expert each rank holds."""
    layers, slots = phy2log.shape
    rank = np.arange(layers)[:, None] * ranks + np.arange(slots) // (slots // ranks)
    found = np.bincount((rank * experts + phy2log).ravel(), minlength=layers * ranks * experts)
    return found.reshape(layers, ranks, experts).astype(np.int64)


def moved(current: Ints, new: Ints, ranks: int, experts: int) -> Ints:
    """Of each layer [L], the number of expert weights that some rank needs and does not hold."""
    return np.asarray(((held(new, ranks, experts) > 0) & (held(current, ranks, experts) == 0)).sum((1, 2)), np.int64)


def duplicates(phy2log: Ints, ranks: int, experts: int) -> Ints:
    """Of each layer [L], the number of slots that hold an expert that their rank holds in another slot already."""
    return np.asarray(np.maximum(held(phy2log, ranks, experts) - 1, 0).sum((1, 2)), np.int64)


__all__ = ["duplicates", "held", "imbalance", "moved", "rank_loads", "windowed_imbalance"]
