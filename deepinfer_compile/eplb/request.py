"""What is asked of the balancer, checked before any work: sizes that fit together, loads that are loads."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from deepinfer_compile.eplb.placement import Floats, Ints
from deepinfer_compile.errors import BadOption

Policy = Literal["balanced", "published", "windowed"]
POLICIES: tuple[str, ...] = get_args(Policy)


@dataclass(frozen=True)
class Request:
    """Sizes that fit: slots divide by ranks, groups by nodes, experts by groups, ranks by nodes.

    note: what of the request is not done, and why.
    """

    experts: int
    slots: int
    ranks: int
    nodes: int
    groups: int
    note: str = ""

    @property
    def crowded(self) -> bool:
        """Whether a rank has a slot for every expert of its node, so that duplicates on a rank may be unavoidable."""
        return self.slots // self.ranks >= self.experts // self.nodes


def checked(experts: int, slots: int, ranks: int, nodes: int, groups: int) -> Request:
    """The request, as one node where groups do not divide by nodes. Raises BadOption with the nearest sizes."""
    for name, value in (("slots", slots), ("ranks", ranks), ("nodes", nodes), ("groups", groups)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise BadOption(name=name, value=value, reason="it is a count", fix=f"give a whole number of {name} from 1")
    below, above = slots // ranks * ranks, -(-max(slots, experts) // ranks) * ranks
    if slots < experts:
        reason = f"each of {experts} experts needs a slot"
        raise BadOption(name="slots", value=slots, reason=reason, fix=f"use {above} slots on {ranks} ranks, or more")
    if slots % ranks:
        near = f"{below} or {above}" if below >= experts else f"{above}"
        reason = f"every rank has as many slots, and {slots} do not divide by {ranks} ranks"
        raise BadOption(name="slots", value=slots, reason=reason, fix=f"use {near} slots")
    if groups % nodes:
        return Request(
            experts, slots, ranks, 1, 1, f"{groups} groups do not divide by {nodes} nodes: planned as one node"
        )
    if experts % groups:
        reason = f"groups have as many experts each, and {experts} experts do not divide by {groups}"
        raise BadOption(name="groups", value=groups, reason=reason, fix=f"use a divisor of {experts}, or 1")
    if ranks % nodes:
        reason = f"nodes have as many ranks each, and {ranks} ranks do not divide by {nodes}"
        raise BadOption(name="nodes", value=nodes, reason=reason, fix=f"use a divisor of {ranks}, or 1")
    return Request(experts, slots, ranks, nodes, groups)


def loads(given: Any, policy: str) -> Floats:
    """A copy of the loads in fp64, [L, E], for policy windowed [W, L, E]. Raises BadOption."""
    found: Floats = _array("load", given, np.float64)
    form = "[windows, layers, experts]" if policy == "windowed" else "[layers, experts]"
    if found.ndim != form.count(",") + 1:
        other = "sum over the windows, or use policy 'windowed'" if found.ndim == 3 else f"give numbers as {form}"
        raise BadOption(name="load", value=list(found.shape), reason=f"its shape is {form}", fix=other)
    if not found.size:
        raise BadOption(name="load", value=list(found.shape), reason="it is empty", fix=f"give numbers as {form}")
    wrong = ~(np.isfinite(found) & (found >= 0))
    if wrong.any():
        place = np.argwhere(wrong)[0]
        names = ("window", "layer", "expert")[-found.ndim :]
        where = ", ".join(f"{name} {index}" for name, index in zip(names, place))
        fix = "count the tokens that each expert was given; a count is finite and not negative"
        raise BadOption(
            name="load", value=float(found[tuple(place)]), reason="it is no number of tokens", fix=fix, where=where
        )
    with np.errstate(over="ignore"):
        sums = found.sum((0, -1) if found.ndim == 3 else -1)
    if not np.isfinite(sums).all():
        raise BadOption(name="load", value="inf", reason="the sum of a layer is too large", fix="scale the loads down")
    return found


def in_force(given: Any, layers: int, request: Request) -> Ints:
    """A copy of the plan in force [L, S]. Raises BadOption."""
    found: Ints = _array("current", given, np.int64)
    if found.shape != (layers, request.slots):
        reason = f"the plan in force has the shape [layers, slots] = [{layers}, {request.slots}]"
        raise BadOption(name="current", value=list(found.shape), reason=reason, fix="plan anew without it")
    outside = np.argwhere((found < 0) | (found >= request.experts))
    if len(outside):
        layer, slot = outside[0]
        reason = f"slot {slot} names an expert outside 0 to {request.experts - 1}"
        where = f"layer {layer}"
        raise BadOption(
            name="current", value=int(found[layer, slot]), reason=reason, fix="give experts' indices", where=where
        )
    present = np.zeros((layers, request.experts), np.bool_)
    np.put_along_axis(present, found, True, 1)
    if not present.all():
        layer, expert = np.argwhere(~present)[0]
        reason = f"expert {expert} has no slot in layer {layer}, so its tokens have nowhere to go"
        raise BadOption(name="current", value="it", reason=reason, fix="give the whole plan, or plan anew without it")
    return found


def speeds(given: Any, ranks: int) -> Floats:
    """Speeds [R] in fp64, ones where not given. Raises BadOption."""
    if given is None:
        return np.ones(ranks)
    found: Floats = _array("speed", given, np.float64)
    if found.shape != (ranks,) or not (np.isfinite(found) & (found > 0)).all():
        fix = f"give {ranks} positive numbers, 1 for a rank of usual speed"
        raise BadOption(name="speed", value=found.tolist(), reason="it is one speed a rank", fix=fix)
    return found


def _array(name: str, given: Any, dtype: type) -> Any:
    """A C-ordered copy of an array, a torch tensor on any device, or nested lists. Raises BadOption."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(given, torch.Tensor):
        kind = torch.float64 if dtype is np.float64 else torch.int64
        given = given.detach().to(device="cpu", dtype=kind).numpy()
    try:
        raw = np.asarray(given)
        if dtype is np.int64 and raw.dtype.kind not in "iu":
            raise TypeError("whole numbers are needed")
        return np.array(raw, dtype, order="C")
    except (TypeError, ValueError, OverflowError) as error:
        fix = "give an array, a tensor or nested lists of numbers, all rows of one length"
        raise BadOption(name=name, value=type(given).__name__, reason=str(error), fix=fix) from None


__all__ = ["POLICIES", "Policy", "Request", "checked", "in_force", "loads", "speeds"]
