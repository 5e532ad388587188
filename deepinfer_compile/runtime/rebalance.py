"""Experts that move to where the load is, between steps of a running process.

Ranks step together, so all of them come to the same step and need no message to agree on it. There they sum what their
tokens chose (one all-reduce), and each makes the same plan of it: `eplb.rebalance` is deterministic. Only layers that
are out of balance are planned again, from the placement in force, so that few weights move; a rank reads those of its
changed slots from the bundle's files. Loads are counted in the last `window` steps before that and at no other time, in
one table of layers by experts, whatever the window.

A plan is made for what was, so a window must be long enough to say what will be: with few choices in it, a rank has
more than others by chance, and what such a load says is not followed (`CHANCE`). The load of a rank is counted in rows
of experts, the worst layer counts: every layer waits for its slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from deepinfer_compile.eplb import imbalance, rebalance
from deepinfer_compile.eplb.placement import Floats, Ints
from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime.ranks import Ranks
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.runtime.tally import Tally

CHANCE = 3.0
"""Standard deviations of a count by which a rank may be above the threshold without a reason."""


@dataclass(frozen=True)
class Rebalance:
    """When experts are placed anew. Needs the extra `eplb`.

    interval: steps between two looks at the load. window: the steps before a look in which it is counted. threshold: a
    layer stays as it is while the largest load of a rank is at most so many times the mean, and where it is more only
    by what few choices make likely.
    """

    interval: int = 3000
    window: int = 1000
    threshold: float = 1.1

    def __post_init__(self) -> None:
        for name, steps in (("interval", self.interval), ("window", self.window)):
            if type(steps) is not int or steps < 1:
                raise BadOption(name=name, value=steps, reason="it counts steps", fix="give a whole number from 1")
        if self.window > self.interval:
            reason = f"only {self.interval} steps are between two looks at the load"
            raise BadOption(name="window", value=self.window, reason=reason, fix=f"use {self.interval} or less")
        if not 1 <= self.threshold < math.inf:
            fix = "give a number such as 1.1"
            raise BadOption(
                name="threshold", value=self.threshold, reason="no load is more even than the mean", fix=fix
            )


@dataclass(frozen=True)
class ExpertStats:
    """What rebalancing did so far on this rank.

    rebalanced, skipped: looks at the load after which experts moved, and did not. slots_moved, bytes_moved: of this
    rank, all layers. seconds: spent on all of it, waiting for other ranks included. Of the last look, alike on all
    ranks: choices, what tokens chose in the window, all layers; before, the largest load of a rank over the mean, in
    the worst layer (1 without load); after, the same with the placement that is in force now.
    """

    rebalanced: int = 0
    skipped: int = 0
    slots_moved: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0
    choices: int = 0
    before: float = 1.0
    after: float = 1.0


class Balancer:
    """Looks at the load of one rank's `tally` when it is time.

    spread: any placement. move: puts another in force on an executor; gives slots and bytes that moved. It is given the
    executor and does not hold it: a cycle would keep the process group until Python ends, which its threads do not
    survive. Raises MissingExtra.
    """

    def __init__(
        self,
        options: Rebalance,
        tally: Tally,
        spread: Spread,
        move: Callable[[SpreadExecutor, Spread], tuple[int, int]],
    ) -> None:
        self.options, self.tally, self.stats = options, tally, ExpertStats()
        self._move = move
        self._steps = 0
        _prepare(spread)

    @property
    def counting(self) -> bool:
        """Whether the next step is in the window."""
        return self._steps >= self.options.interval - self.options.window

    def after_step(self, executor: SpreadExecutor) -> None:
        """A step of all ranks has ended. Raises RankLost."""
        self._steps += 1
        if self._steps < self.options.interval:
            return
        self._steps = 0
        begin = time.perf_counter()
        self._look(executor)
        self.stats = replace(self.stats, seconds=self.stats.seconds + time.perf_counter() - begin)

    def _look(self, executor: SpreadExecutor) -> None:
        spread, was = executor.spread, self.stats
        ranks: Ranks = spread.ranks
        load = ranks.total(self.tally.take()).numpy()
        old = spread.placement.phy2log
        new = planned(load, old, ranks.size, self.options.threshold)
        before, after = (float(unevenness(load, plan, ranks.size).max(initial=1.0)) for plan in (old, new))
        seen = replace(was, choices=int(load.sum()), before=before, after=after)
        if np.array_equal(old, new):
            self.stats = replace(seen, skipped=was.skipped + 1)
            return
        slots, size = self._move(executor, Spread.of(spread.section, ranks, new))
        self.stats = replace(
            seen,
            rebalanced=was.rebalanced + 1,
            slots_moved=was.slots_moved + slots,
            bytes_moved=was.bytes_moved + size,
        )


def unevenness(load: Ints, phy2log: Ints, ranks: int) -> Floats:
    """`imbalance` of each layer [L] under a load [L, E], for plans [L, S] with empty slots (-1) too."""
    experts = load.shape[1]
    # an expert more, of which empty slots hold a copy, and which nobody chooses
    wider = np.concatenate((load, np.zeros((len(load), 1), load.dtype)), axis=1).astype(np.float64)
    return imbalance(wider, np.where(phy2log < 0, experts, phy2log), ranks)


def planned(load: Ints, phy2log: Ints, ranks: int, threshold: float) -> Ints:
    """The plan [L, S] for a load [L, E], from the one in force [L, S]: layers that are even enough, had little
    load or would not be more even stay as they are."""
    before = unevenness(load, phy2log, ranks)
    found = phy2log.copy()
    chance = CHANCE / np.sqrt(np.maximum(load.sum(1) / ranks, 1))
    uneven = np.flatnonzero(before > threshold + chance)
    if not len(uneven):
        return found
    held = np.stack([_filled(load[layer], phy2log[layer], ranks) for layer in uneven])
    found[uneven] = rebalance(load[uneven], held.shape[1], ranks, current=held).phy2log
    worse = unevenness(load, found, ranks) >= before
    found[worse] = phy2log[worse]
    return found


def _filled(load: Ints, slots: Ints, ranks: int) -> Ints:
    """The slots [S] of a layer with the most loaded expert that its rank has not in each empty one."""
    found = slots.copy()
    room = len(slots) // ranks
    for place in np.flatnonzero(slots < 0):
        rank = place // room
        counts = np.bincount(found[found >= 0], minlength=len(load))
        share = load / counts
        mine = found[rank * room : (rank + 1) * room]
        share[mine[mine >= 0]] = -1
        found[place] = int(share.argmax())
    return found


def _prepare(spread: Spread) -> None:
    """Compile the planner now, not in the middle of serving. Raises MissingExtra."""
    from deepinfer_compile.eplb.relabel import relabelled

    count, experts = spread.ranks.size, spread.section["experts"]
    load = np.arange(experts)[None]
    held = _filled(load[0], spread.placement.phy2log[0], count)[None]
    new = rebalance(load, held.shape[1], count, current=held).phy2log
    relabelled(held, new, np.ones(count), 1, experts)


__all__ = ["Balancer", "ExpertStats", "Rebalance", "planned", "unevenness"]
