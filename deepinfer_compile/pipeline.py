"""Run a literal list of passes: copy, run, tidy, verify, record, observe. Nothing else runs a pass.

The order is proven when the pipeline is made: what a pass needs must be made by an earlier one and not broken since. A
pass that fails leaves the program as it was before it; the error carries a reproducer if an observer wrote one.
"""

from __future__ import annotations

import hashlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepinfer_compile.errors import CompileError, ExpectedMatchMissing, PassFailed, PipelineOrder, UnknownPass
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import remove_dead, same_graph
from deepinfer_compile.passbase import Pass, PassContext, Remark, describe, each_block, options_of
from deepinfer_compile.program import Program
from deepinfer_compile.verify import verify

START: frozenset[Fact] = frozenset({Fact.SHAPES, Fact.FUNCTIONAL})


@dataclass(frozen=True)
class Record:
    """What one pass did. `source` is a hash of the pass's source file, so that a record names its code."""

    name: str
    options: dict[str, Any]
    source: str
    seconds: float
    nodes_before: int
    nodes_after: int
    remarks: tuple[Remark, ...]
    facts: tuple[str, ...]
    waived: str = ""

    def count(self, kind: str) -> int:
        """How many remarks are of a kind."""
        return sum(r.kind == kind for r in self.remarks)


class Observer:
    """Watches a pipeline. Every hook does nothing by default."""

    def start(self, program: Program, passes: Sequence[Pass]) -> None:
        """Before the first pass."""

    def after(self, p: Pass, before: Program, after: Program, record: Record) -> None:
        """After a pass was verified."""

    def failed(self, p: Pass, before: Program, error: CompileError) -> str:
        """A pass failed on `before`; return words on where a reproducer lies, or nothing."""
        return ""


@dataclass(frozen=True)
class Pipeline:
    """An ordered list of passes, valid by construction."""

    passes: tuple[Pass, ...]
    given: frozenset[Fact] = START

    def __post_init__(self) -> None:
        held = set(self.given)
        breaker: dict[Fact, str] = {}
        for p in self.passes:
            missing = p.needs - held
            if missing:
                names = sorted(f.name for f in missing)
                by = ", ".join(sorted({breaker[f] for f in missing if f in breaker})) or "no pass"
                raise PipelineOrder(name=p.name, missing=names, breaker=by)
            held -= p.breaks
            breaker.update(dict.fromkeys(p.breaks, p.name))
            held |= p.makes

    def _index(self, name: str) -> int:
        for i, p in enumerate(self.passes):
            if p.name == name:
                return i
        raise UnknownPass(name=name, known=", ".join(p.name for p in self.passes))

    def insert(self, *, p: Pass, after: str | None = None, before: str | None = None) -> Pipeline:
        """A pipeline with `p` after or before the named pass (at the end if neither is given)."""
        i = len(self.passes)
        if after is not None:
            i = self._index(after) + 1
        elif before is not None:
            i = self._index(before)
        return replace(self, passes=(*self.passes[:i], p, *self.passes[i:]))

    def without(self, name: str) -> Pipeline:
        """A pipeline without the named pass."""
        i = self._index(name)
        return replace(self, passes=self.passes[:i] + self.passes[i + 1 :])

    def upto(self, name: str) -> Pipeline:
        """The passes up to and including the named one."""
        return replace(self, passes=self.passes[: self._index(name) + 1])

    def run(
        self,
        program: Program,
        *,
        settings: dict[str, Any] | None = None,
        observers: Sequence[Observer] = (),
        limits: dict[str, int] | None = None,
    ) -> tuple[Program, list[Record]]:
        """Run all passes. `limits` caps how many rewrites a pass may do (bisection)."""
        records: list[Record] = []
        for o in observers:
            o.start(program, self.passes)
        for p in self.passes:
            ctx = PassContext(dict(settings or {}), (limits or {}).get(p.name))
            program = run_pass(p, program, ctx, observers, records)
        return program, records


def run_pass(
    p: Pass, before: Program, ctx: PassContext, observers: Sequence[Observer], records: list[Record]
) -> Program:
    """Run one pass on a copy of a program and verify what it made. Adds its record; `before` stays as it is.

    Raises what the pass raises, PassFailed in place of what is no CompileError, GraphInvalid, ExpectedMatchMissing.
    """
    begin = time.perf_counter()
    try:
        after = _apply(p, before.clone(), ctx)
        known = dict(before.graphs())
        changed = frozenset(n for n, gm in after.graphs() if n not in known or not same_graph(known[n], gm))
        after = replace(after, facts=(after.facts - p.breaks) | p.makes)
        verify(after, changed, p.name)
        waived = _expectations(p, after, ctx)
    except CompileError as err:
        notes = [note for o in observers if (note := o.failed(p, before, err))]
        for note in notes:
            err.add_note(note)
        raise
    except Exception as err:  # a pass may fail in any way; the caller must learn which pass, on which graph
        failure = PassFailed(name=describe(p), graph=ctx.graph, reason=f"{type(err).__name__}: {err}", reproducer="")
        for o in observers:
            if note := o.failed(p, before, failure):
                failure.add_note(note)
        raise failure from err
    seconds = time.perf_counter() - begin
    facts = tuple(sorted(f.name for f in after.facts))
    record = Record(
        p.name,
        options_of(p),
        source_hash(p),
        seconds,
        before.node_count(),
        after.node_count(),
        tuple(ctx.remarks),
        facts,
        waived,
    )
    records.append(record)
    for o in observers:
        o.after(p, before, after, record)
    return after


def _apply(p: Pass, program: Program, ctx: PassContext) -> Program:
    if p.level == "skeleton":
        program = p.run_program(program, ctx)
    else:
        for gm in each_block(program, ctx):
            p.run(gm, ctx)
    for _, gm in program.graphs():
        remove_dead(gm.graph)
        gm.recompile()
    return program


def _expectations(p: Pass, program: Program, ctx: PassContext) -> str:
    """Check what the settings say that this pass must match; returns the waiver used, if any."""
    expected: Callable[[Program], dict[str, int]] | None = getattr(p, "expected", None)
    if expected is None:
        return ""
    for graph, count in expected(program).items():
        found = sum(r.kind == "applied" and r.graph == graph for r in ctx.remarks)
        if found >= count:
            continue
        near = next(
            (f"{r.node}: {r.reason}" for r in ctx.remarks if r.kind == "missed" and r.graph == graph), "none seen"
        )
        if p.name in ctx.settings.get("waive", ()):
            return f"{p.name} matched {found} of {count} in {graph} (waived): {near}"
        raise ExpectedMatchMissing(name=p.name, expected=count, found=found, graph=graph, miss=near)
    return ""


def source_hash(p: Pass) -> str:
    """First 12 hex digits of the SHA-256 of the file that defines the pass."""
    file = inspect.getsourcefile(type(p))
    if file is None:
        return ""
    with open(file, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()[:12]
