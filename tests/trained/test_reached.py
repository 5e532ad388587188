"""What the committed weights reach on held-out files, by the models' own code on this interpreter's library.

Samples, because a CPU is slow: of the slow tests the first two windows of every sixth file, and the 64 prompts of the
evaluation; of the fast one a few windows. Starts of files are their dearest part, so a sample's bits a byte are an
upper estimate; `metrics.json` beside the weights holds the numbers of all files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trained import data, evaluate

SAMPLE = evaluate.Amount(every=6, windows=2, batch=4)
FEW = evaluate.Amount(every=60, windows=1, prompts=2, continued=12)
MOST_BYTES = 24 << 20
"""Of the weights of one model."""


def measured(name: str, amount: evaluate.Amount = SAMPLE) -> dict[str, Any]:
    folder = data.HERE / name
    return evaluate.measure(name, folder, amount, evaluate.held_out(folder), torch.device("cpu"))


def recorded(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return found


@pytest.mark.parametrize("name", ["ced", "v3"])
def test_weights_are_small_and_have_learnt(name: str) -> None:
    assert (data.HERE / name / "model.safetensors").stat().st_size <= MOST_BYTES
    got = measured(name, FEW)
    assert got["bits_per_byte"] <= 1.5
    assert got["parameters"]["all"] <= 11e6
    assert max(load["busiest"] for load in got["router"].values()) > 1.1


@pytest.mark.slow
def test_ced_reaches_what_it_must() -> None:
    got = measured("ced")
    assert got["bits_per_byte"] <= 1.5
    assert got["accepted_per_step"] >= 1.5
    assert got["calibration_error"] <= 0.05
    assert got["drafted_tokens"] > 10_000
    assert got["parameters"]["all"] <= 11e6
    _is_used_but_uneven(got["router"])
    assert recorded(data.HERE / "ced")["bits_per_byte"] <= 1.5


@pytest.mark.slow
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
