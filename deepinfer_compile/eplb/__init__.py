"""Where the replicas of experts go: load statistics in, the two tables that dispatch reads and the slots' experts out.

A placement is a runtime input, so a new one swaps tables and weights and never a program. `rebalance` is the one entry;
`measures` says how good a placement is and what it moves. Needs numpy alone for the published policy, numba for others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepinfer_compile.eplb.measures import duplicates, imbalance, moved, rank_loads, windowed_imbalance
from deepinfer_compile.eplb.placement import Placement
from deepinfer_compile.eplb.published import published
from deepinfer_compile.eplb.request import POLICIES, Policy, Request, checked, in_force, loads, speeds
from deepinfer_compile.errors import BadOption

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def rebalance(
    load: ArrayLike,
    slots: int,
    ranks: int,
    nodes: int = 1,
    groups: int = 1,
    current: ArrayLike | None = None,
    policy: Policy = "balanced",
    *,
    speed: ArrayLike | None = None,
    tolerance: float = 0.01,
) -> Placement:
    """Place the replicas of E experts in `slots` slots, slots / ranks on each rank, for every layer.

    load: tokens that each expert was given, [L, E]; for policy windowed [W, L, E]. An array, a torch tensor or lists;
        it is not modified.
    nodes, groups: with groups that divide by nodes, the experts of a group stay on one node; otherwise it is planned as
        one node, and `note` says so. Not for windowed, which has no nodes.
    current: the placement in force, phy2log [L, slots]. It is changed by few exchanges, until the largest load of a
        layer is within `tolerance` of a fresh plan's. For policy balanced, as `speed`.
    policy: balanced puts no expert twice on a rank while a rank has fewer slots than there are experts (on its node);
        published is https://github.com/deepseek-ai/EPLB; windowed minimises the sum over windows of the largest load.
    speed: relative speeds of ranks [ranks]; a rank at 0.5 takes half the load.

    Deterministic: ties go to the lower index, and no thread count or process changes a bit. Raises BadOption for sizes
    that do not fit, for loads that are no counts and for what the policy would ignore, MissingExtra without numba.
    """
    if policy not in POLICIES:
        fix = f"use one of {', '.join(POLICIES)}"
        raise BadOption(name="policy", value=policy, reason="there is no such policy", fix=fix)
    counts = loads(load, policy)
    layers, experts = counts.shape[-2:]
    request = checked(experts, slots, ranks, nodes, groups)
    _refuse_ignored(policy, request, current, speed, tolerance)
    if policy == "published":
        found = published(counts, request.slots, request.ranks, request.nodes, request.groups)
        return Placement(found.phy2log, found.log2phy, found.logcnt, request.note)
    from deepinfer_compile.eplb.balanced import balanced, crowded
    from deepinfer_compile.eplb.pack import tables
    from deepinfer_compile.eplb.windowed import windowed

    if policy == "balanced":
        before = None if current is None else in_force(current, layers, request)
        phy2log = balanced(counts, request, speeds(speed, request.ranks), before, tolerance)
    elif request.crowded:
        phy2log = crowded(request, layers)
    else:
        phy2log = windowed(counts, request.slots, request.ranks)
    return Placement(phy2log, *tables(phy2log, experts), request.note)


def _refuse_ignored(policy: str, request: Request, current: object, speed: object, tolerance: float) -> None:
    """Raises BadOption for what would have no effect."""
    if not 0 <= tolerance < np.inf:
        fix = "give a fraction such as 0.01"
        raise BadOption(name="tolerance", value=tolerance, reason="it is a fraction of the largest load", fix=fix)
    if policy == "windowed" and request.nodes > 1:
        reason = "policy windowed plans without nodes"
        raise BadOption(name="nodes", value=request.nodes, reason=reason, fix="leave it out, or use policy 'balanced'")
    for name, value in (("current", current), ("speed", speed)):
        if policy != "balanced" and value is not None:
            reason = f"policy {policy} always plans anew, for ranks of one speed"
            raise BadOption(name=name, value="given", reason=reason, fix="leave it out, or use policy 'balanced'")


__all__ = [
    "POLICIES",
    "Placement",
    "duplicates",
    "imbalance",
    "moved",
    "rank_loads",
    "rebalance",
    "windowed_imbalance",
]
