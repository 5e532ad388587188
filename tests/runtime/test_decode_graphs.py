"""Replayed decode steps: when the host waits before it writes the inputs of the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_compile.runtime.cuda_graphs import DecodeGraphs, PackedInputs, _Captured
from deepinfer_compile.runtime.kernel_blocks import StepState
from tests.runtime.test_packed_inputs import CPU, step


def test_a_step_that_was_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copy of the inputs may not have ended."""
    events: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    given = step(1, 2, 0)

    class Packed(PackedInputs):
        def fill(self, given: Any) -> None:
            events.append("fill")
            super().fill(given)

    def interrupted() -> None:
        raise KeyboardInterrupt

    graphs = DecodeGraphs(None, CPU, 128, StepState(), None)  # type: ignore[arg-type]
    packed = Packed(given, 1, 2, CPU)
    graphs.captured[1] = _Captured(SimpleNamespace(replay=interrupted), packed, torch.zeros(1, 5), None)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            graphs.run(given)
    assert events == ["fill", "wait", "fill"]
