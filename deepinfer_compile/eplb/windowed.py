"""Kernels of a plan for bursts: the sum over windows of the largest load, instead of the largest of the sum.

The objective is the one of DeepInfer's balancer (https://github.com/deepseek-ai/DeepInfer): each extra slot goes to the
expert that lowers the sum over windows of the largest load a replica most; replicas, by total load, go to the rank with
room that raises the sum over windows of the largest rank load least, ties to the lowest rank. Three differences. Ties
of experts are exact, the larger total a replica first and then the lower index, where theirs adds 1e-4 * index to the
sum, which decides for small loads what is no tie. No expert is twice on a rank (the argument is in `pack`). And the
objective is kept up to date, not computed for each candidate: only the two largest experts of a window matter for it.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.compiled import compiled
from deepinfer_compile.eplb.placement import Flags, Floats, Ints


@compiled
def _two_largest(load: Floats, counts: Ints) -> tuple[int, int]:
    """The experts with the largest and second largest load a replica; the second is -1 for a single expert."""
    first, second = 0, -1
    for e in range(1, len(load)):
        share = load[e] / counts[e]
        if share > load[first] / counts[first]:
            first, second = e, first
        elif second < 0 or share > load[second] / counts[second]:
            second = e
    return first, second


@compiled
def _next(load: Floats, sums: Floats, counts: Ints, limit: int, first: Ints, second: Ints, gain: Floats) -> int:
    """The expert whose next replica lowers the sum over windows [W, E] of the largest load a replica most."""
    gain[:] = 0.0
    for w in range(len(load)):
        e = first[w]
        rest = load[w, second[w]] / counts[second[w]] if second[w] >= 0 else 0.0
        gain[e] += load[w, e] / counts[e] - max(rest, load[w, e] / (counts[e] + 1))
    best = -1
    for e in range(len(counts)):
        if counts[e] == limit:
            continue
        if best < 0 or gain[e] > gain[best]:
            best = e
            continue
        share, other = sums[e] / counts[e], sums[best] / counts[best]
        if gain[e] == gain[best] and (share > other or (share == other == 0.0 and counts[e] < counts[best])):
            best = e
    return best


@compiled
def spread_windows(load: Floats, slots: int, limit: int) -> tuple[Ints, Ints]:
    """Replicas for loads [L, W, E]: the expert [L, slots] of each, originals first, and the counts [L, E]."""
    layers, windows, experts = load.shape
    replicas, counts = np.empty((layers, slots), np.int64), np.ones((layers, experts), np.int64)
    first, second, gain = np.empty(windows, np.int64), np.empty(windows, np.int64), np.empty(experts)
    for b in range(layers):
        sums = load[b].sum(0)
        for w in range(windows):
            first[w], second[w] = _two_largest(load[b, w], counts[b])
        for s in range(slots):
            if s < experts:
                replicas[b, s] = s
                continue
            e = _next(load[b], sums, counts[b], limit, first, second, gain)
            replicas[b, s] = e
            counts[b, e] += 1
            for w in range(windows):
                if first[w] == e or second[w] == e:
                    first[w], second[w] = _two_largest(load[b, w], counts[b])
    return replicas, counts


@compiled
def _rank(totals: Floats, peak: Floats, left: Ints, holds: Flags, share: Floats, e: int) -> int:
    """The rank with room that lacks e and raises the sum of peaks [W] least, by totals [R, W]; -1 if there is none."""
    found, least = -1, np.inf
    for r in range(len(totals)):
        if left[r] == 0 or holds[r, e]:
            continue
        done = 0.0
        for w in range(len(peak)):
            done += max(peak[w], totals[r, w] + share[w])
        if done < least:
            found, least = r, done
    return found


@compiled
def _free(slots: Ints, load: Floats, counts: Ints, totals: Floats, left: Ints, holds: Flags, e: int) -> int:
    """Make room for e where every rank with room holds it: the slot that then waits for e (see `pack`)."""
    room = len(slots) // len(totals)
    r = -1
    for q in range(len(totals)):
        if left[q] > 0 and (r < 0 or totals[q].sum() < totals[r].sum()):
            r = q
    found, least = -1, np.inf
    for k in range(len(slots)):
        q = k // room
        if q == r or holds[q, e] or holds[r, slots[k]]:
            continue
        done = max(totals[r].sum() + load[:, slots[k]].sum() / counts[slots[k]], totals[q].sum())
        if done < least:
            found, least = k, done
    q, f = found // room, slots[found]
    slots[(r + 1) * room - left[r]] = f
    left[r] -= 1
    totals[r] += load[:, f] / counts[f]
    totals[q] -= load[:, f] / counts[f]
    holds[r, f], holds[q, f] = True, False
    return found


@compiled
def pack_windows(replicas: Ints, order: Ints, load: Floats, counts: Ints, ranks: int) -> Ints:
    """The expert in each slot [L, S]. order: indices of replicas [L, S] by descending total load a replica."""
    layers, count = replicas.shape
    windows, experts = load.shape[1:]
    room = count // ranks
    slots, left = np.empty((layers, count), np.int64), np.empty(ranks, np.int64)
    totals, peak, holds = np.empty((ranks, windows)), np.empty(windows), np.empty((ranks, experts), np.bool_)
    for b in range(layers):
        totals[:], peak[:], left[:], holds[:] = 0.0, 0.0, room, False
        for item in order[b]:
            e = replicas[b, item]
            share = load[b, :, e] / counts[b, e]
            r = _rank(totals, peak, left, holds, share, e)
            if r >= 0:
                k = (r + 1) * room - left[r]
                left[r] -= 1
            else:
                k = _free(slots[b], load[b], counts[b], totals, left, holds, e)
                r = k // room
            slots[b, k] = e
            holds[r, e] = True
            totals[r] += share
            for w in range(windows):
                peak[w] = totals[:, w].max()
    return slots


def windowed(load: Floats, slots: int, ranks: int) -> Ints:
    """The expert in each slot [L, S] for windows [W, L, E], slots of a rank fewer than experts."""
    turned = np.ascontiguousarray(load.swapaxes(0, 1))
    # without any load all experts count alike
    turned[turned.sum((1, 2)) == 0] = 1.0
    replicas, counts = spread_windows(turned, slots, ranks)
    totals = np.take_along_axis(turned.sum(1) / counts, replicas, 1)
    return pack_windows(replicas, np.argsort(-totals, axis=1, kind="stable"), turned, counts, ranks)


__all__ = ["pack_windows", "spread_windows", "windowed"]
