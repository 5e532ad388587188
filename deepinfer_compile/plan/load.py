"""Which experts get how many tokens, where their replicas lie, and what the fullest rank of a step gets.

Loads are a recorded trace or drawn: shares by rank r proportional to r**-skew, in another order for each layer. Slots
that are left over when experts and replicas do not divide by ranks stay empty: to the balancer they are experts
without load, so that it alone decides where everything lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from deepinfer_compile.eplb import imbalance, rank_loads, rebalance
from deepinfer_compile.eplb.placement import Floats, Ints
from deepinfer_compile.errors import BadOption

GRID = 160
"""Points at which the distribution of the fullest rank is evaluated."""


@dataclass(frozen=True, eq=False)
class Load:
    """Shares of a layer's choices that each expert gets, [layers, experts], summing to 1. windows: the same of each
    recorded step [steps, layers, experts], or None. source: where it is from, in words."""

    shares: Floats
    windows: Floats | None
    source: str


def drawn(layers: int, experts: int, skew: float, seed: int) -> Load:
    """Shares that fall with the rank of an expert to the power of -skew; 0 is an even load."""
    falling = np.arange(1, experts + 1, dtype=np.float64) ** -skew
    rng = np.random.default_rng(seed)
    # an order by uniform numbers is the same in every version of numpy, a permutation need not be
    order = np.argsort(rng.random((layers, experts)), axis=1, kind="stable")
    shares = (falling / falling.sum())[order]
    return Load(shares, None, f"drawn: share of the r-th expert as r^-{skew:g}, seed {seed}; an assumption")


def recorded(given: Any, layers: int, experts: int, name: str) -> Load:
    """Counts as JSON lists, [layers, experts] or [steps, layers, experts]. Raises BadOption."""
    wanted = f"[{layers}, {experts}] or [steps, {layers}, {experts}]"
    fix = f"give tokens of each expert as {wanted}, the layers that route and their experts"
    try:
        counts = np.array(given, np.float64)
    except (TypeError, ValueError):
        raise BadOption(name="--trace", value=name, reason="its lists are no array of numbers", fix=fix) from None
    if counts.ndim not in (2, 3) or counts.shape[-2:] != (layers, experts) or not counts.size:
        raise BadOption(name="--trace", value=name, reason=f"its shape is {list(counts.shape)}, not {wanted}", fix=fix)
    if not np.isfinite(counts).all() or (counts < 0).any() or (counts.sum(-1) == 0).any():
        reason = "a count is negative or infinite, or a layer has no tokens"
        raise BadOption(name="--trace", value=name, reason=reason, fix="count the choices of every step and layer")
    total = counts.sum(0) if counts.ndim == 3 else counts
    windows = counts / counts.sum(-1, keepdims=True) if counts.ndim == 3 else None
    steps = f", {len(counts)} steps" if counts.ndim == 3 else ""
    return Load(total / total.sum(-1, keepdims=True), windows, f"recorded in {name}{steps}")


@dataclass(frozen=True, eq=False)
class Placed:
    """Experts of all layers on ranks. phy2log: int64 [layers, slots]; numbers from `experts` on are empty slots."""

    experts: int
    ranks: int
    redundant: int
    phy2log: Ints

    @property
    def slots(self) -> int:
        """Slots of a rank."""
        return int(self.phy2log.shape[1]) // self.ranks

    @property
    def empty(self) -> int:
        """Slots of a layer that hold nothing."""
        return int(self.phy2log.shape[1]) - self.experts - self.redundant

    @cached_property
    def shares(self) -> Any:
        """A function from expert shares [..., L, E] to slot shares [..., L, S]."""
        counts = np.stack([np.bincount(row, minlength=self.experts + self.empty) for row in self.phy2log])

        def spread(shares: Floats) -> Floats:
            each = self.padded(shares) / counts
            index = np.broadcast_to(self.phy2log, (*each.shape[:-1], self.phy2log.shape[-1]))
            return np.take_along_axis(each, index, -1)

        return spread

    def padded(self, shares: Floats) -> Floats:
        """Shares [..., E] with zeros for the empty slots."""
        return np.concatenate([shares, np.zeros((*shares.shape[:-1], self.empty))], -1)

    def imbalance(self, load: Load) -> Floats:
        """Of each layer the fullest rank over the mean; of recorded steps the mean over them."""
        if load.windows is None:
            return imbalance(self.padded(load.shares), self.phy2log, self.ranks)
        found = [imbalance(self.padded(step), self.phy2log, self.ranks) for step in load.windows]
        return np.asarray(np.mean(found, 0), np.float64)


def slots_of(experts: int, redundant: int, ranks: int) -> int:
    """Slots of a rank: as many as the fullest needs."""
    return -(-(experts + redundant) // ranks)


def in_order(load: Load, ranks: int) -> Placed:
    """Experts by number, ranks that differ by one expert at most, no replicas."""
    layers, experts = load.shares.shape
    room = slots_of(experts, 0, ranks)
    first = np.arange(ranks + 1) * experts // ranks
    row = np.full((ranks, room), -1, np.int64)
    for r in range(ranks):
        row[r, : first[r + 1] - first[r]] = np.arange(first[r], first[r + 1])
    flat = row.ravel()
    flat[flat < 0] = experts + np.arange((flat < 0).sum())
    return Placed(experts, ranks, 0, np.tile(flat, (layers, 1)))


def placed(load: Load, ranks: int, redundant: int, policy: str) -> Placed:
    """Experts and their replicas where the balancer puts them. Raises BadOption, MissingExtra."""
    layers, experts = load.shares.shape
    slots = slots_of(experts, redundant, ranks) * ranks
    empty = slots - experts - redundant
    padded = np.concatenate([load.shares, np.zeros((layers, empty))], -1)
    found = rebalance(padded, slots, ranks, policy=policy)  # type: ignore[arg-type]
    return Placed(experts, ranks, redundant, found.phy2log)


@dataclass(frozen=True, eq=False)
class Peaks:
    """Of each layer [L]: choices that a rank gets on average and the fullest expects to get, and slots that are hit on
    the rank where most are."""

    mean: Floats
    fullest: Floats
    touched: Floats


def peaks(plan: Placed, load: Load, choices: Floats) -> Peaks:
    """In closed form, for `choices` [L] of all ranks together in one step.

    Drawn loads: choices hit slots independently, so that a slot's and a rank's number is Poisson and ranks are taken as
    independent. Recorded steps are taken as they are, scaled to `choices`: they have their own chance in them.
    """
    mean = choices / plan.ranks
    if load.windows is not None:
        steps = plan.shares(load.windows) * choices[:, None]
        by_rank = steps.reshape(*steps.shape[:2], plan.ranks, -1)
        hit = np.minimum(by_rank, 1.0).sum(-1).max(-1)
        return Peaks(mean, by_rank.sum(-1).max(-1).mean(0), hit.mean(0))
    rates = rank_loads(plan.padded(load.shares), plan.phy2log, plan.ranks) * choices[:, None]
    slots = (plan.shares(load.shares) * choices[:, None]).reshape(len(choices), plan.ranks, -1)
    fullest = np.array([largest_poisson(row) for row in rates])
    return Peaks(mean, fullest, most_touched(1.0 - np.exp(-slots)))


def largest_poisson(rates: Floats) -> float:
    """The expected largest of independent Poisson numbers with these rates [R]."""
    top = float(rates.max())
    if top == 0:
        return 0.0
    width = top**0.5
    first = max(0.0, np.floor(top - 6 * width))
    last = np.ceil(top + (6 + np.sqrt(2 * np.log(len(rates)))) * width + 12)
    if last - first <= GRID:
        grid = np.arange(first, last)
        at = grid
    else:
        grid = np.linspace(first - 0.5, last, GRID)
        at = np.maximum(grid, 0.0)
    below = torch.special.gammaincc(torch.from_numpy(at + 1.0)[:, None], torch.from_numpy(rates)[None, :])
    beyond = 1.0 - below.clamp(min=0.0).log().sum(1).exp().numpy()
    if last - first <= GRID:
        return float(first + beyond.sum())
    return float(first + ((beyond[1:] + beyond[:-1]) / 2 * np.diff(grid)).sum())


def most_touched(chance: Floats) -> Floats:
    """The expected largest number of slots [L] that are hit on a rank; chance [L, R, slots] of each to be hit."""
    layers, ranks, slots = chance.shape
    spread = np.zeros((layers, ranks, slots + 1))
    spread[..., 0] = 1.0
    for k in range(slots):
        moved = spread[..., :-1] * chance[..., k, None]
        spread *= 1.0 - chance[..., k, None]
        spread[..., 1:] += moved
    upto = np.clip(np.cumsum(spread, -1), 0.0, 1.0)
    with np.errstate(divide="ignore"):
        below = np.exp(np.log(upto).sum(1))
    return np.asarray((1.0 - below[:, :-1]).sum(-1), np.float64)


__all__ = ["Load", "Peaks", "Placed", "drawn", "in_order", "largest_poisson", "most_touched", "peaks", "placed"]
__all__ += ["recorded", "slots_of"]
