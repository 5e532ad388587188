"""Every raising pass alone, on the functional graphs of random programs: the values stay what they were.

`test_backend_programs` does the same with all its programs.
"""

from __future__ import annotations

from collections import Counter

from deepinfer_compile.presets import BACKEND, RAISE
from tests.property.alone import ALONE, door_and_passes
from tests.property.checking import check
from tests.property.patterns import PATTERNS
from tests.property.writing import write

SOME = [p for i, p in enumerate(PATTERNS) if i % 13 == 0 or p.name in ("latent ", "experts by_stack")]


def test_every_raising_pass_of_the_presets_is_here() -> None:
    """But the one that changes what a program returns, which `test_raise_output_projection` compares."""
    named = {p.name for p in (*RAISE, *BACKEND) if p.name.startswith("raise-")} - {"raise-output-projection"}
    assert {p.name for passes in ALONE.values() for p in passes} == named


def test_passes_alone() -> None:
    """Programs around enough patterns that every pass has something to do."""
    rewrites: Counter[str] = Counter()
    for i, pattern in enumerate(SOME):
        program = write(70_000 + i, (pattern,), lines=3)
        check(program, door_and_passes(rewrites))
    assert all(rewrites[name] for name in ALONE), rewrites
