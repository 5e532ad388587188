"""Slots of ranks for any counts: the plan where nothing was measured, and tables of plans with empty slots.

Every rank has ceil(slots / ranks) places; where slots do not divide by ranks, the last place of the last ranks is empty
(-1), so that no rank has two slots more than another. Needs numpy alone.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.placement import Ints, Placement
from deepinfer_compile.errors import BadOption


def places(slots: int, ranks: int) -> int:
    """Places of a rank, empty ones included."""
    return -(-slots // ranks)


def in_order(layers: int, experts: int, slots: int, ranks: int) -> Placement:
    """The experts in order and then the first ones again, cut into ranks; phy2log [layers, ranks * places].

    Raises BadOption for sizes that do not fit.
    """
    check_sizes(experts, slots, ranks)
    room = places(slots, ranks)
    held = np.full((ranks, room), -1, np.int64)
    first = 0
    for rank in range(ranks):
        count = slots // ranks + (rank < slots % ranks)
        held[rank, :count] = np.arange(first, first + count) % experts
        first += count
    return placed(np.tile(held.reshape(1, -1), (layers, 1)), experts)


def check_sizes(experts: int, slots: int, ranks: int) -> None:
    """Raises BadOption unless `slots` slots hold all experts, and no more of one than there are ranks."""
    if ranks < 1:
        raise BadOption(name="ranks", value=ranks, reason="it counts processes", fix="use 1 or more")
    if slots < experts:
        fix = f"use {experts} or more, or leave it out"
        raise BadOption(name="slots", value=slots, reason=f"a layer has {experts} experts", fix=fix)
    if slots > experts * ranks:
        reason = f"more than {experts} experts on each of {ranks} ranks have no use"
        raise BadOption(name="slots", value=slots, reason=reason, fix=f"use {experts * ranks} or less")


def placed(phy2log: Ints, experts: int) -> Placement:
    """The plan with these experts in its slots [L, S], -1 for an empty one. Raises BadOption if an expert has none."""
    layers = len(phy2log)
    counts = np.zeros((layers, experts), np.int64)
    if phy2log.size and not -1 <= phy2log.min() <= phy2log.max() < experts:
        fix = f"number experts 0 to {experts - 1}, and use -1 for an empty slot"
        raise BadOption(name="placement", value=int(phy2log.max()), reason=f"there are {experts} experts", fix=fix)
    for layer, row in enumerate(phy2log):
        counts[layer] = np.bincount(row[row >= 0], minlength=experts)
    if layers and counts.min() < 1:
        layer, expert = np.argwhere(counts < 1)[0].tolist()
        reason = f"expert {expert} has no slot in layer {layer}"
        raise BadOption(name="placement", value="given", reason=reason, fix="give every expert a slot")
    slots = np.full((layers, experts, int(counts.max(initial=1))), -1, np.int64)
    for layer, row in enumerate(phy2log):
        used = np.flatnonzero(row >= 0)
        order = used[np.argsort(row[used], kind="stable")]
        first = np.cumsum(counts[layer]) - counts[layer]
        slots[layer, row[order], np.arange(len(order)) - first[row[order]]] = order
    return Placement(phy2log, slots, counts)


__all__ = ["check_sizes", "in_order", "placed", "places"]
