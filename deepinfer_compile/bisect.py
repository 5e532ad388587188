"""Find the rewrite that changes the results: first the pass, then its first wrong application."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from deepinfer_compile.errors import BadOption, CompileError, NumericMismatch
from deepinfer_compile.observe import NumericReplay
from deepinfer_compile.passbase import make
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_from_json


@dataclass(frozen=True)
class Culprit:
    """What bisection found. application: 1-based number of the wrong rewrite of the pass, 0 if the pass as a whole."""

    name: str
    application: int
    node: str
    reason: str
    error: str


def bisect(
    pipeline: Pipeline, program: Program, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Sequence[int]
) -> Culprit | None:
    """The first wrong rewrite of a pipeline on a program, or None if all results hold."""
    found = _failure(pipeline, program, weights, ids, rows, {})
    if found is None:
        return None
    name, error = found
    upto = pipeline.upto(name)
    low, high = 0, _applications(upto, program, name)
    if high == 0 or _failure(upto, program, weights, ids, rows, {name: 0}) is not None:
        return Culprit(name, 0, "", "the pass is wrong even when it rewrites nothing", error)
    while high - low > 1:
        middle = (low + high) // 2
        if _failure(upto, program, weights, ids, rows, {name: middle}) is None:
            low = middle
        else:
            high = middle
    _, records = upto.run(program, limits={name: high})
    last = [r for r in records[-1].remarks if r.kind == "applied"][high - 1]
    return Culprit(name, high, f"{last.graph}.{last.node}", last.reason, error)


def _failure(
    pipeline: Pipeline,
    program: Program,
    weights: Mapping[str, Tensor],
    ids: Sequence[int],
    rows: Sequence[int],
    limits: dict[str, int],
) -> tuple[str, str] | None:
    watch = NumericReplay(weights, ids, rows)
    try:
        pipeline.run(program, observers=[watch], limits=limits)
    except NumericMismatch as err:
        return str(err.values["name"]), str(err).splitlines()[0]
    except CompileError as err:
        if "name" not in err.values:
            raise
        return str(err.values["name"]).split("{")[0], str(err).splitlines()[0]
    return None


def _applications(pipeline: Pipeline, program: Program, name: str) -> int:
    records: list[Record] = []
    try:
        _, records = pipeline.run(program)
    except CompileError:
        return 0
    return records[-1].count("applied") if records and records[-1].name == name else 0


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
