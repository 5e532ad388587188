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

    phy2log: int64 [L, slots], the expert in each slot.
    log2phy: int64 [L, E, max], the slots of each expert, padded with -1; max is the largest count.
    logcnt: int64 [L, E], the number of replicas of each expert, at least 1.
    note: what was not done as asked, such as groups that do not divide by nodes; empty otherwise.
    """

    phy2log: Ints
    log2phy: Ints
    logcnt: Ints
    note: str = ""


__all__ = ["Flags", "Floats", "Ints", "Placement"]
