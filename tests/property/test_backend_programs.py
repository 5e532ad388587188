"""Random programs give eager's results through the backend, and hold the dialect ops that they must.

The graphs that Inductor would be given run as they are; `test_inductor_programs` compiles a sample. The slow test runs
2,000 programs, and every raising pass alone on each: `pytest -m slow -s tests/property/test_backend_programs.py`
prints what became of them.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.property.alone import door_and_passes
from tests.property.checking import Report, check, eager_door
from tests.property.patterns import PATTERNS, Pattern
from tests.property.programs import Program
from tests.property.writing import write

FAST, CHUNK, ALL = 5, 25, 2000
totals: Counter[str] = Counter()
KNOWN_REASONS = (
    "as_strided reads memory",
    "it calls _",
    "two inputs share memory",
    "it changes the shape or storage of an input",
    "it returns a view of an input that it writes to",
    "an output lies in memory in a way that the raised graph does not keep",
    "an output shares memory in a way that the raised graph does not keep",
    "it writes to an input whose elements share memory",
    "autograd is recording",
)
"""What the backend may leave to Inductor. A pass that fails, or a graph that torch cannot trace, is none of them."""

TORCHS_OWN = {886: "a write through unfold(-1, 2, 2), functional, lands elsewhere"}
"""Programs that Inductor alone gets wrong as well: they are compared with Inductor in place of eager."""


def program_of(seed: int) -> Program:
    """Three of four programs have a pattern or a near miss in them, some two."""
    draw = random.Random(seed)
    found: tuple[Pattern, ...] = tuple(draw.sample(PATTERNS, draw.choice([0, 1, 1, 2])))
    return write(seed, found)


def check_ops(program: Program, report: Report) -> None:
    """Every graph that was raised holds what its patterns say, and says what it missed."""
    wanted: Counter[str] = Counter()
    for found in program.found:
        wanted.update(found.finds)
    for graph in report.prepared:
        if graph.left:
            continue
        assert graph.ran == {op: n for op, n in wanted.items() if n}, f"{[f.name for f in program.found]}\n{program}"
        said = [r.reason for record in graph.records for r in record.remarks if r.kind == "missed"]
        for found in program.found:
            assert not found.missed or any(found.missed in reason for reason in said), f"{found} {said}\n{program}"


def count(program: Program, report: Report) -> None:
    """Add one program to the totals."""
    totals["programs"] += 1
    raised = [p for p in report.prepared if not p.left]
    totals["graphs"] += len(report.prepared)
    totals["graphs raised"] += len(raised)
    for reason in report.left:
        totals[f"left: {reason.split(': ')[-1]}"] += 1
    if raised:
        near = sum(bool(f.missed) for f in program.found)
        totals["patterns"] += len(program.found) - near
        totals["near misses"] += near
        totals["programs with either, checked"] += bool(program.found)
        totals["ops found"] += sum(raised[0].ran.values())


def run(seeds: range, door: Callable[[Report], Callable[..., Any]] = eager_door) -> None:
    """Check programs and count what became of them."""
    for seed in seeds:
        program = program_of(seed)
        own = seed in TORCHS_OWN
        report = check(program, door, exact=not own, reference="inductor" if own else "")
        for reason in report.left:
            assert any(known in reason for known in KNOWN_REASONS), f"{reason}\n{program}"
        check_ops(program, report)
        count(program, report)


@pytest.mark.parametrize("chunk", range(6))
def test_programs(chunk: int) -> None:
    run(range(chunk * FAST, (chunk + 1) * FAST))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(ALL // CHUNK))
def test_all_programs(chunk: int) -> None:
    if chunk == 0:
        totals.clear()
    rewrites: Counter[str] = Counter()
    run(range(chunk * CHUNK, (chunk + 1) * CHUNK), door_and_passes(rewrites))
    totals.update({f"rewrites of {name} alone": n for name, n in rewrites.items()})


@pytest.mark.slow
def test_totals() -> None:
    """Behind all programs: how many there were of each kind."""
    if totals["programs"] < ALL:
        pytest.skip("counts what test_all_programs did, and that did not run here in full")
    print(*(f"\n{name}: {n}" for name, n in sorted(totals.items())))
    assert totals["graphs raised"] >= 0.7 * totals["graphs"]
    assert totals["programs with either, checked"] >= 1000


@pytest.mark.slow
@pytest.mark.parametrize("at", range(0, len(PATTERNS), 20))
def test_each_pattern(at: int) -> None:
    for i, pattern in enumerate(PATTERNS[at : at + 20]):
        program = write(90_000 + at + i, (pattern,), lines=3)
        assert [f.name for f in program.found] == [pattern.name]
        check_ops(program, check(program))
