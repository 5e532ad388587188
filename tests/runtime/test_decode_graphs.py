"""Replayed decode steps: what waits for what, and what a step that follows reads. Streams and events write down what
they are asked for; a replay computes its tokens from its inputs."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepinfer_compile.runtime.cuda_graphs import TURNS, DecodeGraphs, PackedInputs, _Turn
from deepinfer_compile.runtime.kernel_blocks import StepState
from tests.runtime.test_packed_inputs import CPU, step

LOG: list[str] = []


class Event:
    def __init__(self, name: str) -> None:
        self.name = name

    def record(self, stream: Any = None) -> None:
        LOG.append(f"{self.name} recorded")

    def synchronize(self) -> None:
        LOG.append(f"host waits for {self.name}")


class Stream:
    names = iter(())

    def __init__(self, device: Any = None) -> None:
        self.name = next(Stream.names)

    def wait_event(self, event: Event) -> None:
        LOG.append(f"{self.name} waits for {event.name}")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> DecodeGraphs:
    """Graphs of four requests, two turns a and b."""
    LOG.clear()
    Stream.names = iter(("main", "into", "out"))
    main = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: LOG.append("host waits for all"))
    made = DecodeGraphs(None, CPU, 128, StepState(), None)  # type: ignore[arg-type]
    packed = [PackedInputs(step(3, 2, 0), 4, 2, CPU) for _ in range(TURNS)]
    made.captured[4] = deque(turn(name, *pair) for name, pair in zip("ab", (packed, packed[::-1])))
    return made


def turn(name: str, own: PackedInputs, other: PackedInputs) -> _Turn:
    drawn, here = torch.zeros(4, dtype=torch.int64), torch.full((4,), -7)

    def replay() -> None:
        LOG.append(f"replay {name}")
        drawn.copy_((own.inputs["input_ids"] * 3 + own.inputs["position_ids"])[0])
        other.inputs["input_ids"].copy_(drawn)

    events = (Event(f"{what} {name}") for what in ("sent", "done", "ended"))
    return _Turn(SimpleNamespace(replay=replay), own, torch.zeros(4, 5), (drawn, here), *events)


def test_a_step_that_follows_reads_the_tokens_of_the_last(graphs: DecodeGraphs) -> None:
    """Rows of requests and of nobody, with every other input its own."""
    given = [step(3, 2, seed) for seed in range(3)]
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
    want = want * 3 + given[2]["position_ids"]
    assert third.tokens().tolist() == want[0].tolist()
    fresh = graphs.start(given[0], {})
    assert fresh is not None
    want = given[0]["input_ids"] * 3 + given[0]["position_ids"]
    assert fresh.tokens().tolist() == want[0].tolist()


def test_inputs_of_a_step_that_follows_are_copied_beside_the_step_before(graphs: DecodeGraphs) -> None:
    given = step(3, 2, 1)
    graphs.start(given, {})
    LOG.clear()
    graphs.start(given, {}, following=True)
    assert LOG == [
        "host waits for sent b",
        "into waits for done b",  # its own last replay, not the one under way
        "sent b recorded",
        "main waits for sent b",
        "replay b",
        "done b recorded",
        "out waits for done b",
        "ended b recorded",
    ]


def test_new_ids_are_not_written_before_the_step_before_has_left_its_own(graphs: DecodeGraphs) -> None:
    given = step(3, 2, 1)
    graphs.start(given, {})
    LOG.clear()
    graphs.start(given, {})
    assert LOG[:3] == ["host waits for sent b", "into waits for done a", "sent b recorded"]


@pytest.mark.parametrize("drawing", [False, True])
def test_a_start_that_was_interrupted_is_waited_for(graphs: DecodeGraphs, drawing: bool) -> None:
    """What it had started is under way, and no event says when it ends."""
    given = step(3, 2, 1)

    def run() -> None:
        graphs.start(given, {}) if drawing else graphs.run(given)

    def interrupted() -> None:
        raise KeyboardInterrupt

    run()
    assert "host waits for all" not in LOG
    whole, graphs.captured[4][0].graph.replay = graphs.captured[4][0].graph.replay, interrupted
    with pytest.raises(KeyboardInterrupt):
        run()
    graphs.captured[4][-1].graph.replay = whole
    run()
    assert LOG.count("host waits for all") == 1
    run()
    assert LOG.count("host waits for all") == 1
