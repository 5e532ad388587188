"""The executor of a rank whose unit reads prompts, or decodes: it runs the programs of that, with its unit alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

import torch.distributed as dist

from deepinfer_compile.runtime.batch import StepInput
from deepinfer_compile.runtime.mail import Mail
from deepinfer_compile.runtime.ranks import IDLE
from deepinfer_compile.runtime.roles import PREFILL
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor


@dataclass(frozen=True)
class Unit:
    """What a rank does in a job of two units. mail: to the other one. ranks: of the job, all together."""

    role: str
    mail: Mail
    ranks: int

    @property
    def prefill(self) -> bool:
        """Whether it reads prompts."""
        return self.role == PREFILL


class UnitExecutor(SpreadExecutor):
    """The `Executor` of one rank of a unit. serve: what a rank without prompts does in a call."""

    def __init__(self, unit: Unit, spread: Spread, *args: Any, **kwargs: Any) -> None:
        super().__init__(spread, *args, **kwargs)
        self.unit, self.mail = unit, unit.mail
        self.serve: WeakMethod[Callable[[], None]] | None = None

    def begin(self) -> None:
        """See `SpreadExecutor`. Raises RankLost."""
        if self.ranks.lost:
            self.ranks.agree(IDLE, 0)
        super().begin()
        self.mail.begin()

    def finish(self) -> None:
        """Do the rest of a call, take part in the steps of the unit, and wait for the other one. Raises RankLost."""
        try:
            with self.whole("a call"):
                if not self.ranks.lost:
                    self._serve()
                    self.mail.say_end()
                super().finish()
        finally:
            if self.ranks.lost:
                self._leave()
            self.mail.close(self.ranks.lost)

    def _leave(self) -> None:
        """Part with the unit, so that its ranks do not wait in a collective for one that does not go on, while that
        waits for the other unit and this for them."""
        group, self.ranks.group = self.ranks.group, None
        if group is not None:
            dist.destroy_process_group(group)

    def _serve(self) -> None:
        serve = self.serve() if self.serve is not None else None
        if serve is not None:
            serve()

    def _program(self, inputs: StepInput) -> str:
        return PREFILL if self.unit.prefill else super()._program(inputs)


__all__ = ["Unit", "UnitExecutor"]
