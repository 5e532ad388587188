"""An executor whose experts are spread over ranks: every step is a step of all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_compile.eplb.layout import in_order, placed
from deepinfer_compile.eplb.placement import Placement
from deepinfer_compile.errors import BadOption, BadRequest
from deepinfer_compile.ops.parallel import joined
from deepinfer_compile.runtime.batch import Flight, GroupMeta, StepInput
from deepinfer_compile.runtime.drawing import Numbers
from deepinfer_compile.runtime.engine import Engine
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.ranks import IDLE, WAIT, Ranks
from deepinfer_compile.runtime.tally import Tally

if TYPE_CHECKING:
    from deepinfer_compile.runtime.rebalance import Balancer

PAUSE_S = 0.005
"""How long a rank that has nothing to run sleeps while others wait for what comes from elsewhere."""


@dataclass(frozen=True)
class Spread:
    """Which slots hold which experts, as one rank sees it. section: `experts` of the manifest."""

    section: Mapping[str, int]
    placement: Placement
    ranks: Ranks

    @classmethod
    def of(cls, section: Mapping[str, int], ranks: Ranks, placement: Any = None, bundle: bytes = b"") -> Spread:
        """placement: a Placement, its phy2log, or None for the experts in order. bundle: what identifies it.

        Waits for the other ranks. Raises BadOption, also where these have something else; RankLost.
        """
        try:
            made = cls(section, cls._placement(section, placement), ranks)
        except BadOption:
            ranks.alike(b"none")
            raise
        if not ranks.alike(bundle + made.placement.phy2log.tobytes()):
            fix = "give all of them the same bundle, and the same placement"
            raise BadOption(name="placement", value="given", reason="the ranks load different things", fix=fix)
        return made

    @staticmethod
    def _placement(section: Mapping[str, int], placement: Any) -> Placement:
        layers, experts, slots, count = (section[name] for name in ("layers", "experts", "slots", "ranks"))
        if placement is None:
            return in_order(layers, experts, slots, count)
        given = placement.phy2log if isinstance(placement, Placement) else placement
        phy2log = np.asarray(given, np.int64)
        if phy2log.shape != (layers, count * section["room"]):
            reason = f"it is {list(phy2log.shape)}, this bundle has {layers} layers of {count * section['room']} slots"
            fix = "give the expert in each slot, layers by slots, -1 for an empty one"
            raise BadOption(name="placement", value="given", reason=reason, fix=fix)
        return placed(phy2log, experts)

    def experts_of(self, layer: int) -> list[int]:
        """The expert in each slot of this rank, -1 for none."""
        room = self.section["room"]
        first = self.ranks.rank * room
        return [int(e) for e in self.placement.phy2log[layer, first : first + room]]

    def inputs(self) -> dict[str, Tensor]:
        """The tables, by the names that programs have for them."""
        room, count = self.section["room"], self.section["ranks"]
        found = {"expert_offsets": torch.arange(count + 1) * room, "expert_rank": torch.tensor([self.ranks.rank])}
        for layer in range(self.section["layers"]):
            found[f"expert_slots_{layer}"] = torch.from_numpy(self.placement.log2phy[layer])
            found[f"expert_counts_{layer}"] = torch.from_numpy(self.placement.logcnt[layer])
        return found


class SpreadExecutor(BundleExecutor):
    """The `Executor` of one rank. `step` waits for the others, which call it or `finish` at the same time.

    balancer: what may place experts anew after a step.
    """

    balancer: Balancer | None = None

    def __init__(self, spread: Spread, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = spread.ranks
        self.tally = Tally(spread.section["layers"], spread.section["experts"])
        self._turn = threading.Lock()
        self.use(spread)

    def use(self, spread: Spread) -> None:
        """Give the programs these tables; the weights of slots must be as they say."""
        self.spread = spread
        for program in self.programs.values():
            for name, held in spread.inputs().items():
                if name in program.place:
                    program.bind(name, held.to(self.device))

    def step(self, inputs: StepInput) -> Tensor:
        """See `Executor`. Raises RankLost."""
        kind, most = self.ranks.agree(self._program(inputs), inputs.input_ids.shape[0])
        return self._together(kind, most, inputs)

    def start(self, inputs: StepInput, numbers: Numbers, *, following: bool = False) -> Flight | None:
        """Steps of several ranks only run to their end."""
        return None

    def finish(self) -> None:
        """Take part in the steps of others until no rank has work or waits for some. Raises RankLost."""
        while not self.ranks.lost:
            kind = self.attend(IDLE)
            if kind == IDLE:
                return
            if kind == WAIT:
                time.sleep(PAUSE_S)

    def attend(self, kind: str) -> str:
        """Say that there is nothing to run here, `idle` or `wait`; take part in the step that another rank needs. What
        the ranks needed. Raises RankLost."""
        found, most = self.ranks.agree(kind, 0)
        if found not in (IDLE, WAIT):
            self._together(found, max(most, 1), _nothing(len(self.groups)), {"kept": _ZERO, "kept_start": _ZERO})
        return found

    @contextmanager
    def call(self) -> Iterator[None]:
        """One call that all ranks make at the same time; at its end wait for theirs. Raises BadRequest, RankLost."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Raises BadRequest while another call is running."""
        if not self._turn.acquire(blocking=False):
            fix = "give all prompts to one call, and read or close its stream"
            raise BadRequest(request="generate", reason="ranks make one call at a time", fix=fix)

    def end(self) -> None:
        """Raises RankLost."""
        try:
            self.finish()
        finally:
            self._turn.release()

    @contextmanager
    def whole(self, what: str) -> Iterator[None]:
        """Something that must not end early: if it does, this rank does nothing more with the others."""
        try:
            yield
        except BaseException as error:
            self.ranks.leave(what, error)
            raise

    def _together(self, kind: str, most: int, inputs: StepInput, given: Mapping[str, Tensor] | None = None) -> Tensor:
        width = min(self.spread.section["chosen"], self.spread.section["room"])
        lanes = torch.empty(self.ranks.size * most * width, dtype=torch.uint8)
        balancer = self.balancer
        self.tally.begin(inputs.groups[0].slot >= 0, balancer is not None and balancer.counting)
        # the others would wait in the middle of the step, and take what comes next for its rest
        with self.whole("a step") if self.ranks.size > 1 else nullcontext():
            with joined(self.ranks, self.tally):
                logits = self.run(kind, inputs, {**(given or {}), "lanes": lanes})
            if balancer is not None:
                balancer.after_step(self)
        return logits


class SpreadEngine(Engine):
    """The engine of one rank. While its requests wait for pages from disk, it takes part in the steps of others."""

    _executor: SpreadExecutor

    def _rest(self, seconds: float = PAUSE_S) -> None:
        disk = self._disk
        if disk is not None and disk.reading and self._executor.attend(WAIT) == WAIT:
            super()._rest(seconds)


_ZERO = torch.zeros(1, dtype=torch.int64)


def _nothing(groups: int) -> StepInput:
    """A step of one token that belongs to no request and leaves nothing in caches."""
    none = torch.zeros(1, dtype=torch.int32)
    meta = GroupMeta(torch.full((1, 1), -1, dtype=torch.int32), torch.full((1,), -1))
    starts = torch.zeros(2, dtype=torch.int32)
    return StepInput(_ZERO, _ZERO, _ZERO, starts, none, torch.ones(1, dtype=torch.int64), (meta,) * groups)


__all__ = ["PAUSE_S", "Spread", "SpreadEngine", "SpreadExecutor"]
