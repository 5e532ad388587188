"""What the committed weights reach on held-out files, by the models' own code on this interpreter's library.

A sample, because a CPU is slow: the first two windows of every sixth file, and 32 prompts. Starts of files are the
dearest part of them, so the sample's bits a byte are an upper estimate; `metrics.json` beside the weights holds the
numbers of all files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trained import data, evaluate

pytestmark = pytest.mark.slow
SAMPLE = evaluate.Amount(every=6, windows=2, prompts=32, continued=128, batch=4)


def measured(name: str) -> dict[str, Any]:
    folder = data.HERE / name
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"no weights in tests/trained/{name}: they are written by python -m tests.trained.train {name}")
    return evaluate.measure(name, folder, SAMPLE, evaluate.held_out(folder), torch.device("cpu"))


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


def test_ced_reaches_what_it_must() -> None:
    got = measured("ced")
    assert got["bits_per_byte"] <= 1.5
    assert got["accepted_per_step"] >= 1.5
    assert got["calibration_error"] <= 0.05
    assert got["parameters"]["all"] <= 11e6
    _is_used_but_uneven(got["router"])
    assert recorded(data.HERE / "ced")["bits_per_byte"] <= 1.5


def test_v3_reaches_what_it_must() -> None:
    got = measured("v3")
    assert got["bits_per_byte"] <= 1.5
    assert got["ahead"] >= 0.3
    assert got["parameters"]["all"] <= 11e6
    _is_used_but_uneven(got["router"])
    assert recorded(data.HERE / "v3")["bits_per_byte"] <= 1.5


def _is_used_but_uneven(router: dict[str, dict[str, float]]) -> None:
    assert all(load["idlest"] > 0 for load in router.values())
    assert max(load["busiest"] for load in router.values()) > 1.1
