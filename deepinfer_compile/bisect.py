"""Find the rewrite that changes the results: first the pass, then its first wrong application."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer_compile.errors import BadOption, CompileError, GraphInvalid, NumericMismatch, PassFailed
from deepinfer_compile.observe import NumericReplay
from deepinfer_compile.passbase import Pass, PassContext, Remark, make
from deepinfer_compile.pipeline import Observer, Pipeline, Record, run_pass
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_from_json


@dataclass(frozen=True)
class Culprit:
    """What bisection found. application: 1-based number of the wrong rewrite of the pass, 0 if the pass as a whole.

    node, reason, place: of that rewrite, as the pass reported it; place is in the user's model.
    """

    name: str
    application: int
    node: str
    reason: str
    error: str
    place: str = ""


@dataclass
class _Progress(Observer):
    """How many passes came to an end, and what the last one made."""

    last: Program
    done: int = 0

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        self.last, self.done = after, self.done + 1


WRONG = (NumericMismatch, GraphInvalid, PassFailed)
"""Errors that say that a pass is wrong; every other one says something of the model or the options."""


def bisect(
    pipeline: Pipeline, program: Program, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Sequence[int]
) -> Culprit | None:
    """The first wrong rewrite of a pipeline on a program, or None if all results hold.

    A rewrite is wrong if the results change with it, or if the graph is not valid or the pass fails after it.
    """
    watch, progress = NumericReplay(weights, ids, rows), _Progress(program)
    try:
        # what a pass made counts as progress only once its results held
        pipeline.run(program, observers=[watch, progress])
    except WRONG as err:
        return _narrow(pipeline.passes[progress.done], progress.last, watch, err)
    return None


def _narrow(p: Pass, before: Program, watch: NumericReplay, error: CompileError) -> Culprit:
    """The first wrong rewrite of one pass."""
    said = str(error).splitlines()[0]
    applied = [r for r in _attempt(p, before, watch, None)[1] if r.kind == "applied"]
    if not applied or _attempt(p, before, watch, 0)[0]:
        return Culprit(p.name, 0, "", "the pass is wrong even when it rewrites nothing", said)
    low, high = 0, len(applied)
    while high - low > 1:
        middle = (low + high) // 2
        if _attempt(p, before, watch, middle)[0]:
            high = middle
        else:
            low = middle
    last = applied[high - 1]
    return Culprit(p.name, high, f"{last.graph or 'skeleton'}.{last.node}", last.reason, said, last.place)


def _attempt(p: Pass, before: Program, watch: NumericReplay, limit: int | None) -> tuple[bool, list[Remark]]:
    """Whether the pass is wrong when it may rewrite `limit` times, and what it remarked."""
    ctx = PassContext(limit=limit)
    try:
        run_pass(p, before, ctx, [replace(watch)], [])
    except WRONG:
        return True, ctx.remarks
    return False, ctx.remarks


def replay(file: Path) -> str:
    """Run a reproducer again. Returns what happened, in words. Raises BadOption for a file that is none."""
    try:
        data: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as err:
        raise BadOption(name="file", value=str(file), reason=str(err), fix="give a *.reproducer.json file") from None
    if not isinstance(data, dict) or data.get("format") != "deepinfer-reproducer":
        raise BadOption(name="file", value=str(file), reason="not a reproducer", fix="give a *.reproducer.json file")
    program = program_from_json(data["program"])
    failed = make(data["pass"], **data["options"])
    try:
        Pipeline((failed,), given=program.facts).run(program)
    except CompileError as err:
        return f"fails again: {err}"
    return f"pass {data['pass']} succeeds now; it failed with: {data['error']}"
