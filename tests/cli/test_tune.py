"""`tune` from the command line: in Triton's interpreter with a real clock, killed and gone on, and in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile import sweep_machine
from deepinfer_compile.tuned import INTERPRETER
from deepinfer_compile.tuning import Store
from tests.cli.conftest import Run, document
from tests.sweeping import FakeMachine, FakeTimer, spec_of

ROOT = Path(__file__).parent.parent.parent
COMMAND = [sys.executable, "-m", "deepinfer_compile.cli", "tune"]
ENV = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
LINEAR = {"terms": 12, "lines": 5, "dtype": "float32", "biased": True, "align": 4, "chosen": False, "wide": False}
NORM = {
    "size": 40, "leading": 1, "dtype": "float32", "weight_dtype": "float32", "weighted": True, "residual": False,
    "eps": 1e-6, "offset": 0.0, "cast_first": True, "align": 1,
}  # fmt: skip


def shapes_file(folder: Path, name: str, *entries: Any) -> Path:
    file = folder / f"{name}.json"
    file.write_text(json.dumps(entries))
    return file


def interpreted(*arguments: object) -> Any:
    """The JSON that a run gives."""
    command = [*COMMAND, *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def test_kernels_are_swept_in_the_interpreter(tmp_path: Path) -> None:
    store = tmp_path / "store"
    norm = shapes_file(tmp_path, "norm", {"op": "rms_norm", "params": NORM, "tokens": [3, 9]})
    found = interpreted("rms_norm", "--shapes", norm, "--store", store)
    spec = spec_of("rms_norm")
    assert found["device"] == INTERPRETER
    assert [row["tokens"] for row in found["shapes"]] == [3, 9]
    (record,) = Store(store).records()
    assert str(Store(store).path(record.key)) == found["shapes"][0]["file"]
    assert record.key.device == INTERPRETER
    params = spec.params(**{**NORM, "dtype": torch.float32, "weight_dtype": torch.float32})
    legal = [vars(c) for c in spec.space(params, FakeMachine().limits)]
    for bucket, row in zip(record.buckets, found["shapes"], strict=True):
        assert sorted(map(str, legal)) == sorted(str(m.config) for m in bucket.measurements)
        assert bucket.counts() == {"legal": len(legal), "rejected": 0, "measured": len(legal)}
        assert all(m.us and m.us > 10 and m.samples in (1, 3) for m in bucket.measurements)
        assert row["best_us"] <= row["default_us"]


def test_a_killed_sweep_goes_on(tmp_path: Path) -> None:
    store = tmp_path / "store"
    linear = shapes_file(tmp_path, "linear", {"op": "linear", "params": LINEAR, "tokens": [3]})
    arguments = ["linear", "--shapes", str(linear), "--store", str(store)]
    quiet = subprocess.DEVNULL
    running = subprocess.Popen([*COMMAND, *arguments], cwd=ROOT, env=ENV, stdout=quiet, stderr=quiet)
    try:
        deadline = time.monotonic() + 60
        while measured(store) < 4 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
    left = measured(store)
    assert left >= 4
    found = interpreted(*arguments)["shapes"][0]
    assert left - 1 <= found["resumed"] <= left
    assert found["legal"] == found["measured"] > left
    assert sorted(p.suffix for p in store.iterdir() if not p.name.endswith(".lock")) == [".json"]


def measured(store: Path) -> int:
    """Measurements in the only journal."""
    return sum(len(p.read_bytes().splitlines()) - 1 for p in store.glob(".*.jsonl")) if store.exists() else 0


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    machine = FakeMachine(lambda c: "wrong" if c.rows == 64 else "")
    timer = FakeTimer(lambda c: 100.0 / c.rows)
    monkeypatch.setattr(sweep_machine, "this_machine", lambda: (machine, timer))
    return machine


def test_the_table_says_what_was_found(cli: Run, device: FakeMachine, tmp_path: Path) -> None:
    norm = shapes_file(tmp_path, "norm", {"op": "rms_norm", "params": NORM, "tokens": [1, 16], "context": 8})
    done = cli("tune", "rms_norm", "--shapes", norm, "--store", tmp_path / "s")
    assert done.exit_code == 0, done.output
    assert "rms_norm, 1 token (1 x 1 of 8): 24 measured, 5 rejected" in done.stderr
    assert "rms_norm, 16 tokens (16 x 1 of 8): 24 measured, 5 rejected" in done.stderr
    assert "rms_norm size=40 leading=1 dtype=float32" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.strip().startswith(("1 ", "16 "))]
    assert [row[:7] for row in rows] == [[str(n), "100.0", "3.1", "32.00", "29", "5", "24"] for n in (1, 16)]
    assert all(row[7:] == ["rows=32", "num_warps=1", "pdl=True"] for row in rows)
    assert "'out' is 1.0e-02 of its largest value off" in done.stdout
    again = cli("tune", "rms_norm", "--shapes", norm, "--store", tmp_path / "s", "--json")
    assert [row["stored"] for row in document(again)["shapes"]] == [True, True]
    assert document(again)["shapes"][0]["reasons"] == {
        "'out' is 1.0e-02 of its largest value off, more than 2.0e-06": 5
    }
    count = len(device.seen)
    assert cli("tune", "rms_norm", "--shapes", norm, "--store", tmp_path / "s", "--again").exit_code == 0
    assert len(device.seen) == 2 * count


def test_errors_have_their_exit_codes(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    store = tmp_path / "s"
    without = cli("tune", "linear", "--shapes", "default", "--store", store, "--json")
    assert without.exit_code == 3
    assert document(without)["error"] == "CannotMeasure"
    assert "no GPU" in document(without)["what"]
    unknown = cli("tune", "nothing", "--shapes", "default", "--store", store)
    assert unknown.exit_code == 2
    assert "no kernel has that name" in unknown.stderr
    missing = cli("tune", "linear", "--shapes", tmp_path / "none", "--store", store)
    assert missing.exit_code == 2
    assert "none cannot be measured: it cannot be read" in missing.stderr
    assert not store.exists()


def test_a_damaged_record_and_a_broken_kernel_are_errors(cli: Run, device: FakeMachine, tmp_path: Path) -> None:
    norm = shapes_file(tmp_path, "norm", {"op": "rms_norm", "params": NORM, "tokens": [1]})
    arguments = ("tune", "rms_norm", "--shapes", norm, "--store", tmp_path / "s")
    assert cli(*arguments).exit_code == 0
    (file,) = (tmp_path / "s").glob("*.json")
    file.write_text(file.read_text().replace('"us"', '"ms"', 1))
    damaged = cli(*arguments)
    assert damaged.exit_code == 8
    assert str(file) in damaged.stderr
    file.unlink()
    device.fault = lambda c: "wrong"
    broken = cli(*arguments)
    assert broken.exit_code == 4
    assert "no configuration of 29 passed" in broken.stderr
