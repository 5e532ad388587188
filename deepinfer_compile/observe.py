"""What watches a pipeline: dumps, printing, numeric replay, reproducers. All are observers; no pass knows of them."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping, Sequence
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
from deepinfer_compile.replay import logits_of

EXACT_TOLERANCE = 1e-9
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2, torch.float64: EXACT_TOLERANCE}
"""Largest difference of logits, over the largest logit, between a stage and the captured graph."""


def program_text(program: Program) -> str:
    """All graphs of a program as text, blocks first."""
    parts = [
        f"# block {name}, layers {program.layers_of(name) or '-'}\n{to_text(gm)}" for name, gm in program.blocks.items()
    ]
    return "\n".join([*parts, f"# skeleton\n{to_text(program.skeleton)}"])


def diff_text(before: Program, after: Program, name: str) -> str:
    """Unified diff of two stages."""
    old, new = program_text(before).splitlines(), program_text(after).splitlines()
    return "\n".join(difflib.unified_diff(old, new, f"before {name}", f"after {name}", lineterm="", n=2)) + "\n"


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
    """Replay every stage against the captured program and name the first pass that leaves tolerance.

    Each stage runs twice: widened to fp64, where it must agree to EXACT_TOLERANCE, and as it is, where it must stay
    within TOLERANCES of its dtype. A cached stage is read in chunks. The errors of all stages are kept in `errors`.
    """

    weights: Mapping[str, Tensor]
    ids: Sequence[int]
    rows: Sequence[int]
    chunk: int = 13
    native: bool = True
    errors: list[tuple[str, float, float]] = field(default_factory=list)
    _wanted: dict[str, Tensor] = field(default_factory=dict)

    def start(self, program: Program, passes: Sequence[Pass]) -> None:
        if not self._wanted:
            self._wanted = self._both(program)

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        got = self._both(after)
        exact, native = (relative(got[k], self._wanted[k]) if k in got else 0.0 for k in ("exact", "native"))
        self.errors.append((p.name, exact, native))
        limit = TOLERANCES[self._wanted["native"].dtype] if "native" in got else 0.0
        if not exact <= EXACT_TOLERANCE:
            raise NumericMismatch(
                name=p.name, detail=f"in fp64 the logits differ by {exact:.1e} (limit {EXACT_TOLERANCE:.0e})"
            )
        if "native" in got and not native <= limit:
            raise NumericMismatch(name=p.name, detail=f"the logits differ by {native:.1e} (limit {limit:.0e})")

    def _both(self, program: Program) -> dict[str, Tensor]:
        out = {"exact": self._logits(exact_program(program), exact_weights(self.weights))}
        if self.native:
            out["native"] = self._logits(program, self.weights)
        return out

    def _logits(self, program: Program, weights: Mapping[str, Tensor]) -> Tensor:
        return logits_of(program, weights, self.ids, self.rows, self.chunk if program.caches else None)


def relative(got: Tensor, want: Tensor) -> float:
    """Largest difference over the largest value; infinite where shapes differ or a value is not finite."""
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-30))


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
