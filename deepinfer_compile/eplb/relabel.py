"""A new plan put onto the ranks and slots that already hold most of it.

A plan's ranks have no names: any permutation of ranks of one speed (of nodes, and of the ranks of a node) is as good.
The pairs of ranks that share most experts are matched first. Greedy and not an assignment solver: this is for plans
that cannot be reached by a few exchanges, where nearly all weights move either way.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.compiled import compiled
from deepinfer_compile.eplb.measures import held
from deepinfer_compile.eplb.placement import Flags, Floats, Ints


@compiled
def _match(common: Ints) -> Ints:
    """For each row of common [N, N] its column, largest entries first, ties by index; negative entries are no match."""
    count = len(common)
    found, taken = np.full(count, -1, np.int64), np.zeros(count, np.bool_)
    for level in range(common.max(), -1, -1):
        for p in range(count):
            if found[p] >= 0:
                continue
            for q in range(count):
                if common[p, q] == level and not taken[q]:
                    found[p], taken[q] = q, True
                    break
    return found


@compiled
def _keep(current: Ints, new: Ints, origin: Ints, experts: int) -> Ints:
    """The slots [S] of a plan whose rank r gets what rank origin[r] has in `new`, in the slots that hold it already."""
    ranks = len(origin)
    room = len(current) // ranks
    found, wanted = np.empty(len(current), np.int64), np.zeros(experts, np.int64)
    for r in range(ranks):
        first, source = r * room, origin[r] * room
        for k in range(room):
            wanted[new[source + k]] += 1
        for k in range(first, first + room):
            found[k] = -1
            if wanted[current[k]] > 0:
                wanted[current[k]] -= 1
                found[k] = current[k]
        free = first
        for k in range(room):
            e = new[source + k]
            if wanted[e] == 0:
                continue
            while found[free] >= 0:
                free += 1
            wanted[e] -= 1
            found[free] = e
    return found


def relabelled(current: Ints, new: Ints, speed: Floats, nodes: int, experts: int) -> Ints:
    """The plans `new` [L, S] with nodes, ranks and slots renamed so that few weights move from `current` [L, S].

    speed: [R]; ranks take each other's place where their speeds are equal, nodes where their ranks' are.
    """
    ranks = len(speed)
    paces = speed.reshape(nodes, -1)
    alike = (np.sort(paces)[:, None] == np.sort(paces)[None]).all(-1)
    result = np.empty_like(current)
    on_nodes = held(new, nodes, experts) > 0, held(current, nodes, experts) > 0
    on_ranks = held(new, ranks, experts) > 0, held(current, ranks, experts) > 0
    for layer in range(len(current)):
        node_of = _match(np.where(alike, _common(on_nodes[0][layer], on_nodes[1][layer]), -1))
        old_node = np.repeat(node_of, ranks // nodes)
        place = (old_node[:, None] == np.arange(ranks) // (ranks // nodes)) & (speed[:, None] == speed)
        rank_of = _match(np.where(place, _common(on_ranks[0][layer], on_ranks[1][layer]), -1))
        result[layer] = _keep(current[layer], new[layer], np.argsort(rank_of), experts)
    return result


def _common(new: Flags, current: Flags) -> Ints:
    """How many experts [N, N] each pair of holders shares."""
    return np.rint(new.astype(np.float32) @ current.T.astype(np.float32)).astype(np.int64)


__all__ = ["relabelled"]
