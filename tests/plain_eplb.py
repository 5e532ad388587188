"""The published and the windowed balancer again, one replica at a time in plain Python: what the fast must equal."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def pack(weights: list[float], packs: int) -> list[tuple[int, int]]:
    """The pack of each item and its place there: heaviest first, to the lightest pack with room."""
    room = len(weights) // packs
    if room == 1:
        return [(i, 0) for i in range(packs)]
    totals, filled = [0.0] * packs, [0] * packs
    found = [(0, 0)] * len(weights)
    for item in sorted(range(len(weights)), key=lambda i: -weights[i]):
        p = min((p for p in range(packs) if filled[p] < room), key=lambda p: totals[p])
        found[item] = (p, filled[p])
        totals[p] += weights[item]
        filled[p] += 1
    return found


def published_layer(load: list[float], slots: int, ranks: int, nodes: int, groups: int) -> tuple[list[int], list[int]]:
    """The expert and the replica number in each slot of a layer."""
    if groups % nodes:
        nodes = groups = 1
    size, per_node, per_rank = len(load) // groups, len(load) // nodes, slots // ranks
    where = pack([sum(load[g * size : (g + 1) * size]) for g in range(groups)], nodes)
    members = [[0] * per_node for _ in range(nodes)]
    for g, (node, place) in enumerate(where):
        members[node][place * size : (place + 1) * size] = range(g * size, (g + 1) * size)
    expert, number = [0] * slots, [0] * slots
    for node, mine in enumerate(members):
        counts, replicas = [1] * per_node, [(i, 0) for i in range(per_node)]
        for _ in range(slots // nodes - per_node):
            hot = max(range(per_node), key=lambda i: load[mine[i]] / counts[i])
            replicas.append((hot, counts[hot]))
            counts[hot] += 1
        packed = pack([load[mine[i]] / counts[i] for i, _ in replicas], ranks // nodes)
        for (i, n), (rank, place) in zip(replicas, packed):
            slot = node * (slots // nodes) + rank * per_rank + place
            expert[slot], number[slot] = mine[i], n
    return expert, number


def published(load: Array, slots: int, ranks: int, nodes: int = 1, groups: int = 1) -> tuple[list[list[int]], list]:
    """phy2log of every layer, and for each layer and expert its slots in the order of its replicas."""
    layers = [published_layer(row.tolist(), slots, ranks, nodes, groups) for row in load]
    tables = []
    for expert, number in layers:
        order = sorted(range(slots), key=lambda k: number[k])
        tables.append([[k for k in order if expert[k] == e] for e in range(load.shape[1])])
    return [expert for expert, _ in layers], tables


def windowed_counts(windows: Array, slots: int, limit: int) -> list[int]:
    """Replicas of each expert of a layer [W, E]: each to the expert for which the sum of the maxima is least."""
    counts = np.ones(windows.shape[1])
    for _ in range(slots - len(counts)):
        sums = np.full(len(counts), np.inf)
        for e in np.flatnonzero(counts < limit):
            counts[e] += 1
            sums[e] = (windows / counts).max(1).sum()
            counts[e] -= 1
        # equal sums: the expert with the larger load a replica, which rounding must not decide
        near = np.flatnonzero(sums <= sums.min() * (1 + 1e-12))
        counts[max(near, key=lambda e: windows[:, e].sum() / counts[e])] += 1
    return [int(c) for c in counts]


def windowed_ranks(windows: Array, counts: list[int], replicas: list[int], ranks: int) -> list[list[int]]:
    """The experts of each rank of a layer, in the order they came; replicas in the order in which they are made."""
    share, room = windows / np.array(counts), len(replicas) // ranks
    held: list[list[int]] = [[] for _ in range(ranks)]
    totals = np.zeros((ranks, len(windows)))
    for item in sorted(range(len(replicas)), key=lambda i: -share[:, replicas[i]].sum()):
        e, sums = replicas[item], np.full(ranks, np.inf)
        for r in range(ranks):
            if len(held[r]) == room or e in held[r]:
                continue
            after = totals.copy()
            after[r] += share[:, e]
            sums[r] = after.max(0).sum()
        r = int(np.flatnonzero(sums <= sums.min() * (1 + 1e-12))[0])
        held[r].append(e)
        totals[r] += share[:, e]
    return held


def least_maximum(load: list[float], slots: int, ranks: int) -> float:
    """The smallest possible largest rank load of a layer, over all plans without duplicates; for tiny sizes."""
    experts, best = len(load), float("inf")
    for plan in product(range(experts), repeat=slots):
        parts = [plan[r * slots // ranks : (r + 1) * slots // ranks] for r in range(ranks)]
        if any(list(p) != sorted(set(p)) for p in parts) or len(set(plan)) < experts:
            continue
        best = min(best, max(sum(load[e] / plan.count(e) for e in p) for p in parts))
    return best
