"""What watches a pipeline: dumps, printing, numeric replay, reproducers. All are observers; no pass knows of them."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

from deepinfer_compile.errors import CompileError, NumericMismatch, OutputExists
from deepinfer_compile.exact import exact_program, exact_weights
from deepinfer_compile.graph import to_text
from deepinfer_compile.passbase import Pass, describe
from deepinfer_compile.pipeline import Observer, Record
from deepinfer_compile.program import Program
from deepinfer_compile.programjson import program_to_json
from deepinfer_compile.replay import Trace, trace_of

EXACT_TOLERANCE = 1e-9
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float64: EXACT_TOLERANCE}
"""Largest difference of logits, over the largest logit, between a stage and the captured graph."""
GROWTH = 1.5
"""How much rounding a rewrite may add; ours stay below 1.05 on every tiny model in fp32 and bf16."""
FORMS = ("exact", "native")


def program_text(program: Program) -> str:
    """All graphs of a program as text, blocks first."""
    parts = [
        f"# block {name}, layers {program.layers_of(name) or '-'}\n{to_text(gm)}" for name, gm in program.blocks.items()
    ]
    return "\n".join([*parts, f"# skeleton\n{to_text(program.skeleton)}"])


def diff_text(before: Program, after: Program, name: str) -> str:
    """Unified diff of two stages, one part a graph that changed, headed by the graph's name."""
    old, new = (dict((*p.blocks.items(), ("skeleton", p.skeleton))) for p in (before, after))
    parts: list[str] = []
    for graph in dict.fromkeys((*old, *new)):
        was, now = (to_text(gms[graph]).splitlines() if graph in gms else [] for gms in (old, new))
        parts += difflib.unified_diff(was, now, f"{graph} before {name}", f"{graph} after {name}", lineterm="", n=2)
    return "".join(f"{line}\n" for line in parts)


class Dump(Observer):
    """Write `NNN-pass.txt`, `.diff`, `remarks.txt` and `records.json` into a folder of its own."""

    MARK = ".deepinfer-dump"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0
        self.records: list[dict[str, object]] = []
        if folder.exists() and any(folder.iterdir()) and not (folder / self.MARK).exists():
            raise OutputExists(path=folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / self.MARK).write_text("")
        for old in folder.glob("[0-9][0-9][0-9]-*"):
            old.unlink()

    def start(self, program: Program, passes: Sequence[Pass]) -> None:
        self._write(f"{program.name}-start.txt", program_text(program))

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        stem = f"{after.name}-{p.name}"
        self._write(f"{stem}.txt", program_text(after))
        (self.folder / f"{self.count - 1:03d}-{stem}.diff").write_text(diff_text(before, after, p.name))
        with (self.folder / "remarks.txt").open("a" if self.records else "w") as out:
            out.writelines(f"{p.name} {r.kind} {r.graph} {r.node}: {r.reason} ({r.place})\n" for r in record.remarks)
        self.records.append(
            {"pass": describe(p), "program": after.name, "seconds": record.seconds, "nodes": record.nodes_after}
        )
        (self.folder / "records.json").write_text(json.dumps(self.records, indent=1))

    def _write(self, name: str, text: str) -> None:
        (self.folder / f"{self.count:03d}-{name}").write_text(text)
        self.count += 1


class PrintAfter(Observer):
    """Print stages: after a named pass, after `all`, or after every pass that `changed` something."""

    def __init__(self, which: str, out: TextIO | None = None) -> None:
        self.which = which
        self.out = out or sys.stdout

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        changed = self.which == "changed" and record.count("applied") > 0
        if self.which in ("all", p.name) or changed:
            print(f"== after {describe(p)}\n{program_text(after)}", file=self.out)


@dataclass
class NumericReplay(Observer):
    """Replay every stage against the captured program and name the first pass that changes what it computes.

    Each stage runs twice: widened to fp64, where it must agree to EXACT_TOLERANCE, and as it is, where its logits must
    have the type they had, stay within TOLERANCES of it, and lie no further from the fp64 logits than GROWTH times
    what the captured program's do. A cached stage reads in chunks, between other requests; what it writes to its caches
    must be what the stage before it wrote, or read as keys and values, and nothing may be written elsewhere. The errors
    of all stages are kept in `errors`. Choose ids with `replay.sample_length`, or they may miss a corner of the mask.
    """

    weights: Mapping[str, Tensor]
    ids: Sequence[int]
    rows: Sequence[int]
    chunk: int = 13
    native: bool = True
    errors: list[tuple[str, float, float]] = field(default_factory=list)
    _wanted: dict[str, Trace] = field(default_factory=dict)
    _before: dict[str, Trace] = field(default_factory=dict)

    def start(self, program: Program, passes: Sequence[Pass]) -> None:
        if not self._wanted:
            self._wanted = self._before = self._both(program)

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        try:
            got = self._both(after)
        except (RuntimeError, IndexError, TypeError, ValueError) as err:
            raise NumericMismatch(name=p.name, detail=f"the program does not run: {str(err).splitlines()[0]}") from err
        exact, native = (relative(got[k].logits, self._wanted[k].logits) if k in got else 0.0 for k in FORMS)
        self.errors.append((p.name, exact, native))
        for form, trace in got.items():
            for problem in self._problems(form, trace):
                raise NumericMismatch(name=p.name, detail=problem)
        self._before = got

    def _problems(self, form: str, got: Trace) -> Iterator[str]:
        """What is wrong with a stage, in words."""
        wanted, before = self._wanted[form].logits, self._before[form]
        said = "in fp64 " if form == "exact" else ""
        if got.logits.dtype != wanted.dtype:
            yield f"the logits are {got.logits.dtype} and were {wanted.dtype}"
        limit = EXACT_TOLERANCE if form == "exact" else TOLERANCES[wanted.dtype]
        error = relative(got.logits, wanted)
        if not error <= limit:
            yield f"{said}the logits differ by {error:.1e} (limit {limit:.0e})"
        if form == "native":
            truth = self._wanted["exact"].logits
            had, has = (rounding(t, truth) for t in (wanted, got.logits))
            if not has <= GROWTH * max(had, torch.finfo(wanted.dtype).eps):
                yield f"rounding grew from {had:.1e} to {has:.1e} (limit {GROWTH} times): is a narrower type in use?"
        for name in (n for n in got.kept if got.cached and n in before.kept):
            error = relative_rows(got.kept[name], before.kept[name])
            if not error <= limit:
                yield f"{said}what is kept in {name} differs by {error:.1e} (limit {limit:.0e})"
        if got.stray:
            yield f"rows that belong to no token were written in {', '.join(got.stray)}"

    def _both(self, program: Program) -> dict[str, Trace]:
        out = {"exact": self._trace(exact_program(program), exact_weights(self.weights))}
        if self.native:
            out["native"] = self._trace(program, self.weights)
        return out

    def _trace(self, program: Program, weights: Mapping[str, Tensor]) -> Trace:
        return trace_of(program, weights, self.ids, self.rows, self.chunk if program.caches else None)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value; infinite where shapes differ or a value is not finite."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


def relative_rows(got: Tensor, want: Tensor) -> float:
    """The same of cache rows, which may hold NaN where nothing is stored, in the same places."""
    if got.shape != want.shape or not torch.equal(got.isnan(), want.isnan()):
        return float("inf")
    return relative(got.nan_to_num(), want.nan_to_num())


def rounding(got: Tensor, truth: Tensor) -> float:
    """Root mean square error over that of the truth, of the median row: one row that routes otherwise says nothing."""
    if got.shape != truth.shape or not bool(got.isfinite().all()):
        return float("inf")
    error = (got.double() - truth.double()).square().mean(-1) / truth.double().square().mean(-1).clamp(min=1e-30)
    return float(error.sqrt().median())


class Reproducer(Observer):
    """When a pass fails, write the program before it and the pass as one JSON file that `replay` runs again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def failed(self, p: Pass, before: Program, error: CompileError) -> str:
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{p.name}.reproducer.json"
        data = {
            "format": "deepinfer-reproducer",
            "pass": p.name,
            "options": {k: v for k, v in vars(p).items() if isinstance(v, (int, float, str, bool, type(None)))},
            "error": str(error),
            "torch": str(torch.__version__),
            "program": program_to_json(before, places=True),
        }
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(data))
        scratch.replace(file)
        return f"reproducer: {file} (run it with `deepinfer-compile replay {file}`)"
