"""Kernels of a fresh plan: how many replicas each expert gets, and a rank for each, none twice on a rank.

Both follow the published algorithm step by step and differ only where it would put two replicas of an expert on one
rank. So where its plan has no duplicate, this one is the same, and what improves it afterwards starts there.

No expert gets more replicas than there are ranks. With that, and E experts, S slots, R ranks, S <= E * R:

- A plan without duplicates exists: list replicas expert by expert and deal them to the ranks in turn; an expert's
  replicas are at most R in a row, so on different ranks. For S > E * R a rank has more slots than there are experts.
- `pack` finds one. It takes the lightest rank with room that lacks the expert e. If all ranks with room hold e, take
  one, r. Of e at most R - 1 replicas are placed, so a rank q lacks e, and q is full. q holds S / R experts, none of
  them e; r holds at most S / R - 1, one of them e: so q has an expert f that r lacks. f moves to r, e to its slot in q.

Ties go to the lower index. Rows are layers, or the nodes of layers.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.compiled import compiled
from deepinfer_compile.eplb.placement import Flags, Floats, Ints


@compiled
def _idle(load: Floats, tally: Ints, limit: int) -> int:
    """The expert without load that has the fewest replicas, so that they spread evenly; one has room."""
    found = -1
    for e in range(len(load)):
        if load[e] == 0.0 and tally[e] < limit and (found < 0 or tally[e] < tally[found]):
            found = e
    return found


@compiled
def spread(load: Floats, slots: int, limit: int) -> tuple[Ints, Ints, Floats]:
    """Replicas for loads [B, E]: the expert [B, slots] of each, originals first, the counts [B, E] and loads a replica
    [B, E]. limit: most replicas of an expert, slots <= E * limit."""
    rows, experts = load.shape
    leaves = 1
    while leaves < experts:
        leaves *= 2
    replicas = np.empty((rows, slots), np.int64)
    counts = np.ones((rows, experts), np.int64)
    shares = load.copy()
    # a tournament of experts: best[1] has the largest load a replica, of equal ones the lower index
    best, value = np.empty(2 * leaves, np.int64), np.empty(leaves)
    for b in range(rows):
        value[:] = -1.0
        value[:experts] = load[b]
        tally = counts[b]
        for i in range(leaves):
            best[leaves + i] = i
            if i < experts:
                replicas[b, i] = i
        for i in range(leaves - 1, 0, -1):
            left, right = best[2 * i], best[2 * i + 1]
            best[i] = right if value[right] > value[left] else left
        for s in range(experts, slots):
            e = best[1]
            if value[e] <= 0.0:
                e = _idle(load[b], tally, limit)
            replicas[b, s] = e
            tally[e] += 1
            shares[b, e] = load[b, e] / tally[e]
            value[e] = shares[b, e] if tally[e] < limit else -1.0
            i = (leaves + e) // 2
            while i > 0:
                left, right = best[2 * i], best[2 * i + 1]
                best[i] = right if value[right] > value[left] else left
                i //= 2
    return replicas, counts, shares


@compiled
def _lightest(total: Floats, left: Ints, speed: Floats, weight: float, holds: Flags, e: int) -> int:
    """The rank with room that lacks e and would be done first with `weight` more; -1 if there is none."""
    found, least = -1, np.inf
    for r in range(len(total)):
        if left[r] == 0 or holds[r, e]:
            continue
        done = (total[r] + weight) / speed[r]
        if done < least:
            found, least = r, done
    return found


@compiled
def _exchange(slots: Ints, share: Floats, total: Floats, left: Ints, speed: Floats, holds: Flags, e: int) -> int:
    """Make room for e where every rank with room holds it: the slot that then waits for e (see the module)."""
    ranks, room = len(total), len(slots) // len(total)
    r = -1
    for q in range(ranks):
        if left[q] > 0 and (r < 0 or total[q] / speed[q] < total[r] / speed[r]):
            r = q
    found, least = -1, np.inf
    for q in range(ranks):
        if holds[q, e]:
            continue
        for k in range(q * room, (q + 1) * room):
            f = slots[k]
            if holds[r, f]:
                continue
            done = max((total[r] + share[f]) / speed[r], (total[q] - share[f] + share[e]) / speed[q])
            if done < least:
                found, least = k, done
    q, f = found // room, slots[found]
    slots[(r + 1) * room - left[r]] = f
    left[r] -= 1
    total[r] += share[f]
    holds[r, f] = True
    total[q] -= share[f]
    holds[q, f] = False
    return found


@compiled
def _settle(key: Floats, best: Ints, leaves: int, r: int) -> None:
    """Play the matches of rank r again; best[1] is the rank of the smallest key."""
    i = (leaves + r) // 2
    while i > 0:
        a, b = best[2 * i], best[2 * i + 1]
        best[i] = b if key[b] < key[a] else a
        i //= 2


@compiled
def _in_order(order: Ints, value: Floats) -> None:
    """Equal values by index, whatever the sort that made `order` did with them."""
    for i in range(1, len(order)):
        item, k = order[i], i
        while k > 0 and order[k - 1] > item and value[order[k - 1]] == value[item]:
            order[k] = order[k - 1]
            k -= 1
        order[k] = item


@compiled
def pack(replicas: Ints, order: Ints, shares: Floats, speed: Floats) -> Ints:
    """The expert in each slot [B, S], no expert twice on a rank.

    replicas: [B, S] as `spread` gives them; order: [B, S], their indices by descending load, equal ones in any order,
    sorted by index here; shares: loads a replica [B, E]; speed: [B, R].
    """
    rows, count = replicas.shape
    ranks, experts = speed.shape[1], shares.shape[1]
    room = count // ranks
    leaves = 1
    while leaves < ranks:
        leaves *= 2
    slots = np.empty((rows, count), np.int64)
    best = np.empty(2 * leaves, np.int64)
    key, total, left = np.empty(leaves), np.empty(ranks), np.empty(ranks, np.int64)
    holds = np.empty((ranks, experts), np.bool_)
    for b in range(rows):
        share = shares[b]
        _in_order(order[b], share[replicas[b]])
        even = speed[b].min() == speed[b].max()
        key[:] = np.inf
        key[:ranks] = 0.0
        total[:] = 0.0
        left[:] = room
        holds[:] = False
        for i in range(leaves):
            best[leaves + i] = i
        for i in range(leaves - 1, 0, -1):
            best[i] = best[2 * i]
        for item in order[b]:
            e = replicas[b, item]
            r = best[1]
            if not even:
                r = _lightest(total, left, speed[b], share[e], holds, e)
            elif holds[r, e]:
                r = _lightest(total, left, speed[b], 0.0, holds, e)
            if r >= 0:
                slot = (r + 1) * room - left[r]
                left[r] -= 1
            else:
                slot = _exchange(slots[b], share, total, left, speed[b], holds, e)
                r = slot // room
                for q in range(ranks):
                    key[q] = total[q] if left[q] > 0 else np.inf
                    _settle(key, best, leaves, q)
            slots[b, slot] = e
            total[r] += share[e]
            holds[r, e] = True
            key[r] = total[r] if left[r] > 0 else np.inf
            _settle(key, best, leaves, r)
    return slots


@compiled
def tables(slots: Ints, experts: int) -> tuple[Ints, Ints]:
    """The slots [B, E, max] of each expert in order, padded with -1, and their counts [B, E], from [B, S]."""
    rows, count = slots.shape
    counts = np.zeros((rows, experts), np.int64)
    for b in range(rows):
        for e in slots[b]:
            counts[b, e] += 1
    found = np.full((rows, experts, counts.max()), -1, np.int64)
    filled = np.empty(experts, np.int64)
    for b in range(rows):
        filled[:] = 0
        for k in range(count):
            e = slots[b, k]
            found[b, e, filled[e]] = k
            filled[e] += 1
    return found, counts


__all__ = ["pack", "spread", "tables"]
