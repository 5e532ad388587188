"""A sweep of real kernels in Triton's interpreter: a kernel that is wrong is never timed, and what is right agrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile import sweep_machine
from deepinfer_compile.errors import CannotMeasure, SweepFailed
from deepinfer_compile.kernels import render_kernel
from deepinfer_compile.sweep import Outcome, Sweep
from deepinfer_compile.sweep_machine import Interpreter, Timing, this_machine
from deepinfer_compile.targets.nvidia import SM90
from deepinfer_compile.tuning import Store
from tests.sweeping import shape, spec_of

NORM = spec_of("rms_norm")
CASE = next(c for c in NORM.cases if c.name == "127")
STORED = "tl.store(out"


class Clock:
    """Counts what it is given; the fewer rows a program has, the faster."""

    def __init__(self) -> None:
        self.timed = 0

    def __call__(self, run: Any, hopeless: float) -> Timing:
        run()
        self.timed += 1
        return Timing(float(self.timed), 1)


def swept(folder: Path, name: str = "rms_norm", params: Any = CASE.params, tokens: int = 7) -> tuple[Outcome, Clock]:
    clock = Clock()
    machine = Interpreter(SM90.name, SM90.limits)
    (found,) = Sweep(machine, clock, Store(folder)).run([shape(spec_of(name), params, tokens)])
    return found, clock


def times(factor: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configurations for which the kernel stores a result that is `factor` times what it should be."""

    def rendered(spec: Any, params: Any, config: Any, dialect: str) -> str:
        text = render_kernel(spec, params, config, dialect)
        (line,) = [line for line in text.splitlines() if STORED in line]
        place, value = line.strip().removeprefix("tl.store(").split(", ", 1)
        changed = f"tl.store({place}, {factor} * {value}"
        return text.replace(line.strip(), changed) if wrong(config) else text

    monkeypatch.setattr(sweep_machine, "render_kernel", rendered)


def test_a_kernel_that_is_one_percent_off_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times("1.01", lambda c: c.rows == 4, monkeypatch)
    found, clock = swept(tmp_path)
    bad = [m for m in found.bucket.measurements if m.config["rows"] == 4]
    assert len(bad) == found.bucket.counts()["rejected"] > 1
    assert all("of its largest value off, more than 2.0e-06" in m.rejected for m in bad)
    assert clock.timed == found.bucket.counts()["measured"]


def test_a_kernel_that_is_all_wrong_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times("1.01", lambda c: True, monkeypatch)
    with pytest.raises(SweepFailed, match="no configuration of 27 passed"):
        swept(tmp_path)


def test_a_kernel_that_cannot_run_is_rejected_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times("nothing_of_that_name", lambda c: c.num_warps == 2, monkeypatch)
    found, _ = swept(tmp_path)
    bad = {m.rejected for m in found.bucket.measurements if m.config["num_warps"] == 2}
    assert len(bad) == 1
    assert "nothing_of_that_name" in bad.pop()


@pytest.mark.parametrize(
    ("name", "case", "tokens"), [("linear", "odd", 3), ("experts", "odd", 7), ("cached_latent_attention", "block", 3)]
)
def test_every_kind_of_kernel_passes_as_it_is(
    name: str, case: str, tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A few of the configurations: operands that are written, scratch memory and several launches."""
    spec = spec_of(name)
    params = next(c.params for c in spec.cases if c.name == case)
    few = list(spec.space(params, SM90.limits))[::60]
    monkeypatch.setattr(Sweep, "_configs", lambda self, shape: few)
    found, _ = swept(tmp_path, name, params, tokens)
    assert found.bucket.counts() == {"legal": len(few), "rejected": 0, "measured": len(few)}


def test_the_interpreter_is_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    machine, _ = this_machine()
    assert (machine.name, machine.device, machine.dtypes) == ("interpreter", torch.device("cpu"), (torch.float32,))
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotMeasure):
        this_machine()
