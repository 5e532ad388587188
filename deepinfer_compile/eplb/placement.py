"""What a plan is: which expert each physical slot holds, and the two tables that a dispatch kernel reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Placement:
    """One plan for L layers of E experts. Slots r * slots / ranks and on belong to rank r.

    phy2log: int64 [L, slots], the expert in each slot; -1 in an empty one, which only `layout` makes.
    log2phy: int64 [L, E, max], the slots of each expert, padded with -1; max is the largest count.
    logcnt: int64 [L, E], the number of replicas of each expert, at least 1.
    note: what was not done as asked, such as groups that do not divide by nodes; empty otherwise.
    """

    phy2log: Ints
    log2phy: Ints
    logcnt: Ints
    note: str = ""

    def local(self, ranks: int) -> Ints:
        """For each rank the slot among its own that holds each expert, the first of several, int64 [ranks, L, E]; -1
        where it holds none."""
        layers, slots = self.phy2log.shape
        room = slots // ranks
        # one column more, which an empty slot (-1) falls into
        found = np.full((ranks, layers, self.logcnt.shape[1] + 1), -1, np.int64)
        row = np.arange(layers)
        for slot in reversed(range(slots)):
            found[slot // room, row, self.phy2log[:, slot]] = slot % room
        return found[..., :-1]


__all__ = ["Flags", "Floats", "Ints", "Placement"]
