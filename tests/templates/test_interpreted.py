"""Numerics of the kernels on the CPU: the files `interpreted_*.py` beside this one run in a process of their own.

Triton chooses between its compiler and its interpreter when it is imported, so the choice must not reach other tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FILES = {f.stem.removeprefix("interpreted_"): f for f in sorted(Path(__file__).parent.glob("interpreted_*.py"))}
ROOT = Path(__file__).parent.parent.parent
THIRDS = {"bundle": ("bundle", "sample"), "cases": ("cases", "linears", "sweep")}
"""Files that share a process, whose start takes as long as one of the short ones; the others share the last."""

TOGETHER = {name for names in THIRDS.values() for name in names}
SHARED = {**THIRDS, "others": tuple(name for name in FILES if name not in TOGETHER)}
RUNS = [
    *(pytest.param([FILES[name] for name in names], "not slow", id=third) for third, names in SHARED.items()),
    *(
        pytest.param([f], "slow", marks=pytest.mark.slow, id=f"{name}-slow")
        for name, f in FILES.items()
        if "mark.slow" in f.read_text()
    ),
]


@pytest.mark.parametrize(("files", "marks"), RUNS)
def test_interpreted(files: list[Path], marks: str) -> None:
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-p", "no:cacheprovider", "-p", "no:xdist", "-m", marks]
    command = [sys.executable, "-m", "pytest", *options, *map(str, files)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout or "100%" in done.stdout
