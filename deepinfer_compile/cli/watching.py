"""Observers that the command line adds: one pass only, and errors per program and pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer_compile.cli.examine import ROWS, sample_ids
from deepinfer_compile.cli.opening import Subject
from deepinfer_compile.errors import NumericMismatch
from deepinfer_compile.observe import Dump, NumericReplay
from deepinfer_compile.passbase import Pass
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.pipeline import Observer, Record
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import sample_length, vocabulary


@dataclass
class OnePass(Observer):
    """Dump the program before and after one pass, wherever it runs."""

    name: str
    to: Dump

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        if p.name == self.name:
            self.to.start(before, (p,))
            self.to.after(p, before, after, record)


@dataclass
class Row:
    """The errors of one stage; see `NumericReplay`."""

    program: str
    name: str
    exact: float
    native: float


@dataclass
class Errors(NumericReplay):
    """A numeric replay that also keeps which program each error is of, the failing one included."""

    stages: list[Row] = field(default_factory=list)

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        try:
            super().after(p, before, after, record)
        finally:
            # the last entry is this stage's only if the replay itself came to an end
            if len(self.errors) > len(self.stages):
                self.stages.append(Row(after.name, *self.errors[-1]))


def samples(program: Program) -> tuple[Sequence[int], Sequence[int]]:
    """Token ids to replay, past the widest window if that is near, and the rows whose logits are compared."""
    count = sample_length(program)
    return sample_ids(vocabulary(program), count), sorted({*(r for r in ROWS if r < count), count // 2, count - 1})


def replay_stages(opened: Subject) -> tuple[list[Row], NumericMismatch | None]:
    """The errors of every stage, phases included, up to the first that leaves tolerance, which is given too."""
    watch = Errors(opened.weights, *samples(opened.program))
    try:
        packed, _ = default().run(opened.program, observers=[watch])
        phase_programs(packed, {}, [watch])
    except NumericMismatch as err:
        return watch.stages, err
    return watch.stages, None


__all__ = ["OnePass", "replay_stages", "samples"]
