"""Two units in one process: engines over models that notice every wrong page, and mail that is lists.

A rank that waits for mail lets the ranks of the other unit run a step, so that whoever drives one unit drives both.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.errors import RankLost
from deepinfer_compile.runtime.engine import EngineOptions
from deepinfer_compile.runtime.mail import END, LOST, Message
from deepinfer_compile.runtime.ranks import Ranks
from deepinfer_compile.runtime.roles import DECODE, PREFILL
from deepinfer_compile.runtime.unit import Unit
from deepinfer_compile.runtime.units import DecodeEngine, PromptEngine
from tests.runtime.fakes import HashExecutor

NO_ROWS = torch.zeros(0, dtype=torch.uint8)


class Box:
    """`Mail` of one rank. sent: (kind, peer, bytes of rows) of what it said. wait: called when it waits."""

    def __init__(self, rank: int, peers: tuple[int, ...], boxes: dict[int, Box]) -> None:
        self.rank, self.peers, self.boxes = rank, peers, boxes
        self.open = set(peers)
        self.inbox: deque[Message] = deque()
        self.sent: list[tuple[str, int, int]] = []
        self.wait: Callable[[], None] = lambda: None
        self.lost = ""
        boxes[rank] = self

    def begin(self) -> None:
        self.open = set(self.peers)

    def send(self, peer: int, kind: str, body: dict[str, Any], rows: Tensor = NO_ROWS) -> None:
        self.sent.append((kind, peer, rows.nbytes))
        self.boxes[peer].inbox.append(Message(self.rank, kind, json.loads(json.dumps(body)), rows.clone()))

    def take(self, seconds: float = 0.0) -> list[Message]:
        if seconds and not self.inbox:
            self.wait()
        found = list(self.inbox)
        self.inbox.clear()
        for message in found:
            if message.kind == LOST:
                raise RankLost(rank=self.rank, ranks=len(self.boxes), reason=message.body["reason"], patience="")
            if message.kind == END:
                self.open.discard(message.peer)
        return found

    def say_end(self) -> None:
        for peer in self.peers:
            self.send(peer, END, {})

    def close(self, lost: str = "") -> None:
        self.lost = lost


class UnitModel(HashExecutor):
    """The parts of a `UnitExecutor` that engines use, for a unit of one rank."""

    def __init__(self, role: str, box: Box, number: int, **options: Any) -> None:
        super().__init__(**options)
        self.unit, self.mail, self.ranks = Unit(role, box, len(box.boxes)), box, Ranks()
        self.ranks.rank = number
        self.serve: Any = None

    def attend(self, kind: str) -> str:
        return kind

    @contextmanager
    def whole(self, what: str) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.ranks.lost = self.ranks.lost or f"{what} of this rank ended early"
            raise


class Units:
    """`prompts` ranks that read and `decodes` that decode. Options of the engines, those of `there` of the second."""

    def __init__(
        self,
        prompts: int = 1,
        decodes: int = 1,
        *,
        eos: tuple[int, ...] = (),
        codec: Any = None,
        here: dict[str, Any] | None = None,
        there: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        boxes: dict[int, Box] = {}
        first, second = tuple(range(prompts)), tuple(range(prompts, prompts + decodes))
        options = {"memory_bytes": 10**9, **options}
        self.prompts: list[PromptEngine] = []
        self.decodes: list[DecodeEngine] = []
        for i, rank in enumerate(first):
            model = UnitModel(PREFILL, Box(rank, second, boxes), i)
            self.prompts.append(PromptEngine(model, EngineOptions(**{**options, **(here or {})}), eos))
        for i, rank in enumerate(second):
            model = UnitModel(DECODE, Box(rank, first, boxes), i)
            self.decodes.append(DecodeEngine(model, EngineOptions(**{**options, **(there or {})}), eos, codec))
        for engine in self.prompts:
            engine._mail.wait = self.decode

    def decode(self) -> None:
        """A step of each rank that decodes."""
        for engine in self.decodes:
            engine.step()

    def run(self, after: Callable[[], None] = lambda: None, most: int = 5000) -> None:
        """Until no request is left. after: called after each round of steps."""
        for _ in range(most):
            if not any(engine.alive for engine in self.prompts):
                break
            for engine in self.prompts:
                engine.step()
            self.decode()
            after()
        self.decode()
        engines = [*self.prompts, *self.decodes]
        assert not any(engine.alive for engine in engines), "requests are left"
        for engine in engines:
            assert not any(engine.pages_used), "pages are left"
        for engine in self.decodes:
            assert not engine._granted
            assert not engine._offers
            assert not engine._home
            assert not engine.scheduler.held
        for engine in self.prompts:
            assert not engine._away
            assert not engine._offered

    def sent(self) -> list[tuple[str, int, int]]:
        """What all ranks that read prompts said."""
        return [entry for engine in self.prompts for entry in engine._mail.sent]
