"""What the committed weights reach on held-out files of this interpreter's standard library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.trained.data import HERE
from tests.trained.evaluate import Amount, held_out, measure

CPU = torch.device("cpu")
MOST_BITS = 1.5
"""A byte; `xz -9e`, file by file, takes 1.61."""
MOST_BYTES = 24 << 20


@pytest.mark.parametrize("name", ["ced", "v3"])
def test_weights_are_small_and_have_learnt(name: str) -> None:
    assert (HERE / name / "model.safetensors").stat().st_size <= MOST_BYTES
    some = Amount(every=30, windows=1, prompts=2, continued=12)
    found = measure(name, HERE / name, some, held_out(HERE / name), CPU)
    assert found["bits_per_byte"] < MOST_BITS
    assert found["parameters"]["all"] <= 11_000_000
    busiest = [layer["busiest"] for layer in found["router"].values()]
    assert max(busiest) > 1.2, "a real router is never even"


@pytest.mark.slow
def test_drafts_are_accepted_and_their_confidence_is_right() -> None:
    found: dict[str, Any] = measure("ced", HERE / "ced", Amount(every=13), held_out(HERE / "ced"), CPU)
    assert found["bits_per_byte"] < MOST_BITS
    assert found["accepted_per_step"] >= 1.5
    assert found["calibration_error"] <= 0.05
    assert found["drafted_tokens"] > 10_000
