"""Replayed decode steps: when the host waits before it writes the inputs of the next one, and what one that follows
reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepinfer_compile.runtime.cuda_graphs import TURNS, DecodeGraphs, PackedInputs, _Captured
from deepinfer_compile.runtime.kernel_blocks import StepState
from tests.runtime.test_packed_inputs import CPU, step


def packed_on(events: list[str], monkeypatch: pytest.MonkeyPatch) -> PackedInputs:
    """Inputs whose turns write down what they wait for, as on a GPU."""
    stream = SimpleNamespace(synchronize=lambda: events.append("all"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    packed = PackedInputs(step(1, 2, 0), 1, 2, CPU)
    for i, turn in enumerate(packed._turns):
        turn._sent = SimpleNamespace(record=lambda: None, synchronize=lambda i=i: events.append(f"copy {i}"))  # type: ignore[assignment]
    return packed


def test_the_host_waits_for_the_copy_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    packed = packed_on(events, monkeypatch)
    given = {name: held.numpy() for name, held in step(1, 2, 1).items()}
    assert [packed.fill(given) for _ in range(4)] == [0, 1, 0, 1]
    assert events == ["copy 0", "copy 1", "copy 0", "copy 1"]


def test_a_copy_that_was_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may not have ended, and no event says when."""
    events: list[str] = []
    packed = packed_on(events, monkeypatch)
    given = {name: held.numpy() for name, held in step(1, 2, 1).items()}

    def interrupted() -> None:
        raise KeyboardInterrupt

    whole, packed._turns[0]._sent.record = packed._turns[0]._sent.record, interrupted  # type: ignore[union-attr]
    with pytest.raises(KeyboardInterrupt):
        packed.fill(given)
    packed._turns[0]._sent.record = whole  # type: ignore[union-attr]
    for _ in range(TURNS):
        packed.fill(given)
    assert events == ["copy 0", "copy 1", "all"]


def test_a_step_that_follows_reads_the_tokens_of_the_last() -> None:
    """Rows of requests and of nobody, with every other input its own."""
    packed = PackedInputs(step(3, 2, 0), 4, 2, CPU)
    drawn = torch.zeros(4, dtype=torch.int64)

    def replay() -> None:
        drawn.copy_((packed.inputs["input_ids"] * 3 + packed.inputs["position_ids"])[0])
        packed.inputs["input_ids"].copy_(drawn)

    events = tuple(SimpleNamespace(record=lambda: None, synchronize=lambda: None) for _ in range(TURNS))
    here = tuple(torch.full((4,), -7) for _ in range(TURNS))
    graphs = DecodeGraphs(None, CPU, 128, StepState(), None)  # type: ignore[arg-type]
    graphs.captured[4] = _Captured(SimpleNamespace(replay=replay), packed, torch.zeros(4, 5), drawn, here, events)
    given: list[dict[str, Any]] = [step(3, 2, seed) for seed in range(3)]
    first = graphs.start(given[0], {})
    second = graphs.start(given[1], {}, following=True)
    assert first is not None
    assert second is not None
    want = given[0]["input_ids"] * 3 + given[0]["position_ids"]
    assert first.tokens().tolist() == want[0].tolist()
    third = graphs.start(given[2], {}, following=True)
    assert third is not None
    want = want * 3 + given[1]["position_ids"]
    assert second.tokens().tolist() == want[0].tolist()
    assert torch.equal(packed.inputs["slot_12"][:3], given[2]["slot_12"])
    want = want * 3 + given[2]["position_ids"]
    assert third.tokens().tolist() == want[0].tolist()
    fresh = graphs.start(given[0], {})
    assert fresh is not None
    assert np.array_equal(fresh.tokens(), (given[0]["input_ids"] * 3 + given[0]["position_ids"])[0].numpy())
