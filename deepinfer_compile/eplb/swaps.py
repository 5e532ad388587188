"""Kernels that improve a plan by exchanging two experts between ranks, or by giving a replica to another expert.

`refine` lowers the largest load of a fresh plan. `replan` starts from the plan in force and stops as soon as no rank is
above a given load, because every exchange moves two weights: it takes the fullest rank and looks, over all other ranks
and pairs of experts, for the exchange after which both ranks are nearest to the mean, so that each is done with after
one exchange. Where no exchange helps, a replica of the expert whose others could best carry it is given to the expert
with the largest load a replica, one weight moved.

An exchange never puts an expert on a rank that holds it. Ties go to the lower index. Rows are layers, or the nodes of
layers; loads of a rank are compared over its speed.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.compiled import compiled
from deepinfer_compile.eplb.placement import Flags, Floats, Ints


@compiled
def _state(slots: Ints, share: Floats, weight: Floats, total: Floats, holds: Flags) -> None:
    """Fill in the load of each slot [S] and rank [R], and what ranks hold [R, E]."""
    room = len(slots) // len(total)
    holds[:] = False
    total[:] = 0.0
    for k in range(len(slots)):
        weight[k] = share[slots[k]]
        total[k // room] += weight[k]
        holds[k // room, slots[k]] = True


@compiled
def _fullest(total: Floats, speed: Floats) -> int:
    found, most = 0, -1.0
    for r in range(len(total)):
        done = total[r] / speed[r]
        if done > most:
            found, most = r, done
    return found


@compiled
def _emptiest(total: Floats, speed: Floats) -> int:
    found, least = 0, np.inf
    for r in range(len(total)):
        done = total[r] / speed[r]
        if done < least:
            found, least = r, done
    return found


@compiled
def _fitting(slots: Ints, weight: Floats, holds: Flags, a: int, b: int, low: float, high: float) -> tuple[int, int]:
    """The first slots of ranks a and b whose loads differ by low to high and that can be exchanged; -1 if none do."""
    room = len(slots) // len(holds)
    for i in range(a * room, (a + 1) * room):
        for j in range(b * room, (b + 1) * room):
            delta = weight[i] - weight[j]
            if low <= delta <= high and not holds[b, slots[i]] and not holds[a, slots[j]]:
                return i, j
    return -1, -1


@compiled
def _between(
    slots: Ints, weight: Floats, total: Floats, speed: Floats, holds: Flags, a: int, b: int, least: float
) -> tuple[float, int, int]:
    """The exchange of a slot of rank a for one of b after which the later of the two is done first, before `least`:
    (when, slot of a, slot of b), slots -1 if there is none."""
    room = len(slots) // len(total)
    to_a, to_b = -1, -1
    for i in range(a * room, (a + 1) * room):
        if holds[b, slots[i]]:
            continue
        for j in range(b * room, (b + 1) * room):
            delta = weight[i] - weight[j]
            done = max((total[a] - delta) / speed[a], (total[b] + delta) / speed[b])
            if done < least and not holds[a, slots[j]]:
                least, to_a, to_b = done, i, j
    return least, to_a, to_b


@compiled
def _exchange(slots: Ints, weight: Floats, total: Floats, holds: Flags, i: int, j: int) -> None:
    room = len(slots) // len(total)
    a, b, e, f, delta = i // room, j // room, slots[i], slots[j], weight[i] - weight[j]
    slots[i], slots[j] = f, e
    weight[i], weight[j] = weight[j], weight[i]
    holds[a, e], holds[b, f] = False, False
    holds[a, f], holds[b, e] = True, True
    total[a] -= delta
    total[b] += delta


@compiled
def _nearest(
    slots: Ints, weight: Floats, total: Floats, speed: Floats, holds: Flags, a: int, enough: float, mean: float
) -> tuple[int, int]:
    """The exchange of a slot of a after which both ranks are done by `enough`, and nearest to `mean`; -1 if none."""
    ranks = len(total)
    room = len(slots) // ranks
    low, to_a, to_b, least = total[a] - enough * speed[a], -1, -1, np.inf
    for q in range(ranks):
        high = enough * speed[q] - total[q]
        if q == a or high < low:
            continue
        for i in range(a * room, (a + 1) * room):
            for j in range(q * room, (q + 1) * room):
                delta = weight[i] - weight[j]
                if delta < low or delta > high:
                    continue
                off = max(abs((total[a] - delta) / speed[a] - mean), abs((total[q] + delta) / speed[q] - mean))
                if off < least and not holds[q, slots[i]] and not holds[a, slots[j]]:
                    least, to_a, to_b = off, i, j
    return to_a, to_b


@compiled
def _give(slots: Ints, load: Floats, counts: Ints, total: Floats, speed: Floats, holds: Flags, e: int) -> int:
    """The slot of another expert's replica that e should get: of the expert whose other replicas then carry least each,
    on the rank without e that would be done first; -1 where they would carry as much as e's do now."""
    room = len(slots) // len(total)
    d, least = -1, load[e] / counts[e]
    for f in range(len(load)):
        if counts[f] > 1 and f != e and load[f] / (counts[f] - 1) < least:
            d, least = f, load[f] / (counts[f] - 1)
    found, soonest = -1, np.inf
    if d < 0:
        return found
    for k in range(len(slots)):
        r = k // room
        if slots[k] != d or holds[r, e]:
            continue
        done = (total[r] - load[d] / counts[d]) / speed[r]
        if done < soonest:
            found, soonest = k, done
    return found


@compiled
def _without(slots: Ints, load: Floats, counts: Ints, total: Floats, speed: Floats) -> tuple[Floats, Floats, Ints]:
    """When the ranks of each expert [E] would be done if it had one replica less: the last, the second last, and the
    rank that is last; infinity for a single replica."""
    experts, room = len(load), len(slots) // len(total)
    last, second, rank = np.full(experts, -np.inf), np.full(experts, -np.inf), np.full(experts, -1)
    for k in range(len(slots)):
        d, r = slots[k], k // room
        if counts[d] == 1:
            last[d], second[d] = np.inf, np.inf
            continue
        done = (total[r] + load[d] / (counts[d] - 1) - load[d] / counts[d]) / speed[r]
        if done > last[d]:
            last[d], second[d], rank[d] = done, last[d], r
        elif done > second[d]:
            second[d] = done
    return last, second, rank


@compiled
def _gift(
    slots: Ints, load: Floats, counts: Ints, total: Floats, speed: Floats, holds: Flags, a: int, least: float
) -> tuple[float, int, int]:
    """The replica to give to an expert of rank a after which a, the ranks of the other expert and the one that gets it
    are all done before `least`, and first: (when, slot, expert), slot -1 if there is none."""
    ranks, room = len(total), len(slots) // len(total)
    last, second, rank = _without(slots, load, counts, total, speed)
    slot, expert = -1, -1
    for i in range(a * room, (a + 1) * room):
        e = slots[i]
        share = load[e] / (counts[e] + 1)
        lower = (total[a] - load[e] / counts[e] + share) / speed[a]
        if counts[e] == ranks or lower >= least:
            continue
        for k in range(len(slots)):
            d, r = slots[k], k // room
            others = second[d] if rank[d] == r else last[d]
            if others >= least or holds[r, e]:
                continue
            done = max(lower, others, (total[r] - load[d] / counts[d] + share) / speed[r])
            if done < least:
                least, slot, expert = done, k, e
    return least, slot, expert


@compiled
def _replace(slots: Ints, load: Floats, counts: Ints, shares: Floats, k: int, e: int) -> None:
    d = slots[k]
    slots[k] = e
    counts[d] -= 1
    counts[e] += 1
    shares[d], shares[e] = load[d] / counts[d], load[e] / counts[e]


@compiled
def _largest(slots: Ints, shares: Floats, counts: Ints, ranks: int, a: int) -> int:
    """The expert of rank a with the largest load a replica of those that are not on every rank; -1 if all are."""
    room, found = len(slots) // ranks, -1
    for k in range(a * room, (a + 1) * room):
        e = slots[k]
        if counts[e] < ranks and (found < 0 or shares[e] > shares[found]):
            found = e
    return found


@compiled
def _fit(
    slots: Ints, weight: Floats, total: Floats, speed: Floats, holds: Flags, a: int, enough: float
) -> tuple[int, int]:
    """The first exchange, from the emptiest rank on, after which a and that rank are done by `enough`; -1 if none."""
    ranks, low, first = len(total), total[a] - enough * speed[a], _emptiest(total, speed)
    i, j = -1, -1
    for step in range(ranks):
        q = (first + step) % ranks
        high = enough * speed[q] - total[q]
        if high >= low:
            i, j = _fitting(slots, weight, holds, a, q, low, high)
        if i >= 0:
            break
    return i, j


@compiled
def _lower(
    slots: Ints, load: Floats, counts: Ints, shares: Floats, weight: Floats, total: Floats, speed: Floats, holds: Flags
) -> bool:
    """The exchange or gift that lowers the fullest rank most, done; False if none lowers it."""
    ranks, a = len(total), _fullest(total, speed)
    i, j = -1, -1
    # less by more than rounding, so that it ends
    least = total[a] / speed[a] * (1.0 - 1e-9)
    for q in range(ranks):
        done, to_a, to_b = _between(slots, weight, total, speed, holds, a, q, least)
        if to_a >= 0:
            least, i, j = done, to_a, to_b
    if i >= 0:
        _exchange(slots, weight, total, holds, i, j)
        return True
    _, k, e = _gift(slots, load, counts, total, speed, holds, a, least)
    if k >= 0:
        _replace(slots, load, counts, shares, k, e)
        _state(slots, shares, weight, total, holds)
    return k >= 0


@compiled
def refine(slots: Ints, load: Floats, counts: Ints, shares: Floats, speed: Floats, near: float, limit: int) -> Floats:
    """Lower the largest load of each row in place; returns it [B], over speed.

    slots: [B, S]; load, counts, shares: load, replicas and load a replica of experts [B, E]; speed: [B, R]. All but
    load and speed are changed. Ends at (1 + near) times the perfect split. The fullest rank first looks for an exchange
    that brings both ranks there; where there is none it takes the change that lowers the load most, `limit` times, and
    ends where none lowers it.
    """
    rows, ranks, experts = len(slots), speed.shape[1], shares.shape[1]
    weight, total, holds = np.empty(slots.shape[1]), np.empty(ranks), np.empty((ranks, experts), np.bool_)
    found = np.empty(rows)
    for b in range(rows):
        slot, share, pace, left = slots[b], shares[b], speed[b], limit
        _state(slot, share, weight, total, holds)
        enough = total.sum() / pace.sum() * (1.0 + near)
        while True:
            a = _fullest(total, pace)
            if total[a] <= enough * pace[a]:
                break
            i, j = _fit(slot, weight, total, pace, holds, a, enough)
            if i >= 0:
                _exchange(slot, weight, total, holds, i, j)
                continue
            left -= 1
            if left < 0 or not _lower(slot, load[b], counts[b], share, weight, total, pace, holds):
                break
        _state(slot, share, weight, total, holds)
        found[b] = (total / pace).max()
    return found


@compiled
def _one_of_each(slots: Ints, load: Floats, counts: Ints, shares: Floats, holds: Flags) -> None:
    """Give the second copy of an expert on a rank to the expert with the largest load a replica that the rank lacks."""
    room = len(slots) // len(holds)
    for k in range(len(slots)):
        r, twice = k // room, False
        for i in range(r * room, k):
            twice = twice or slots[i] == slots[k]
        if not twice:
            continue
        best = -1
        for e in range(len(load)):
            if not holds[r, e] and (best < 0 or shares[e] > shares[best]):
                best = e
        holds[r, best] = True
        _replace(slots, load, counts, shares, k, best)


@compiled
def replan(slots: Ints, load: Floats, speed: Floats, enough: Floats, limit: int) -> Flags:
    """Change plans in force in place until no rank is above `enough` [B]; whether that was reached [B].

    slots: [B, S], fewer a rank than experts, second copies on a rank are replaced first; load: [B, E]; speed: [B, R];
    limit: the most changes of a row.
    """
    rows, ranks, experts = len(slots), speed.shape[1], load.shape[1]
    weight, total, holds = np.empty(slots.shape[1]), np.empty(ranks), np.empty((ranks, experts), np.bool_)
    counts, share, found = np.empty(experts, np.int64), np.empty(experts), np.zeros(rows, np.bool_)
    for b in range(rows):
        slot, pace = slots[b], speed[b]
        counts[:] = 0
        for e in slot:
            counts[e] += 1
        share[:] = load[b] / counts
        _state(slot, share, weight, total, holds)
        _one_of_each(slot, load[b], counts, share, holds)
        _state(slot, share, weight, total, holds)
        mean = total.sum() / pace.sum()
        for _ in range(limit):
            a = _fullest(total, pace)
            if total[a] <= enough[b] * pace[a]:
                found[b] = True
                break
            i, j = _nearest(slot, weight, total, pace, holds, a, enough[b], mean)
            if i >= 0:
                _exchange(slot, weight, total, holds, i, j)
                continue
            _, k, e = _gift(slot, load[b], counts, total, pace, holds, a, enough[b] * (1.0 + 1e-12))
            if k < 0:
                e = _largest(slot, share, counts, ranks, a)
                k = -1 if e < 0 else _give(slot, load[b], counts, total, pace, holds, e)
            if k >= 0:
                _replace(slot, load[b], counts, share, k, e)
                _state(slot, share, weight, total, holds)
            elif not _lower(slot, load[b], counts, share, weight, total, pace, holds):
                break
    return found


__all__ = ["refine", "replan"]
