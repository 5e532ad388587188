"""Messages between the two units of a job: those that read prompts, and those that decode.

A message is a size, a header in JSON and a run of bytes, sent from rank to rank beside the collectives of the units, so
that no unit waits for a step of the other. One thread sends, so that a step does not wait for rows to travel; and one a
peer receives. All of them last for one call. While a rank has nothing to say, the sending thread says that it is there:
a peer that says nothing for as long as its group waits, or is gone, is lost.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer_compile.errors import RankLost
from deepinfer_compile.runtime.ranks import Ranks, Sent

THERE, END, LOST = "there", "end", "lost"
LAST_S = 10.0
"""How long threads may take to end after a rank was lost; what then still waits ends with the process."""
_NO_ROWS = torch.zeros(0, dtype=torch.uint8)


@dataclass(frozen=True)
class Message:
    """What a rank of the other unit says. rows: u8."""

    peer: int
    kind: str
    body: dict[str, Any] = field(default_factory=dict)
    rows: Tensor = _NO_ROWS


class Mail(Protocol):
    """What carries messages. peers: ranks of the other unit. open: those of them that may still say something."""

    peers: tuple[int, ...]
    open: set[int]

    def begin(self) -> None:
        """A call begins, on all ranks."""
        ...

    def send(self, peer: int, kind: str, body: dict[str, Any], rows: Tensor = _NO_ROWS) -> None:
        """Say something; the rows are not to be changed any more."""
        ...

    def take(self, seconds: float = 0.0) -> list[Message]:
        """What has come, in the order of each peer; wait for it so long. Raises RankLost."""
        ...

    def say_end(self) -> None:
        """Nothing more is said here in this call."""
        ...

    def close(self, lost: str = "") -> None:
        """End a call: wait until all have said theirs. lost: why this rank does not go on; the peers are told."""
        ...


class GroupMail:
    """The `Mail` of a process group. ranks: of both units. patience: seconds that the group waits."""

    def __init__(self, ranks: Ranks, peers: Sequence[int], sent: Sent, patience: float) -> None:
        assert ranks.group is not None
        self.ranks, self.peers, self.sent, self._group = ranks, tuple(peers), sent, ranks.group
        self.open: set[int] = set()
        self._interval = min(patience / 4, 15.0)
        self._threads: list[threading.Thread] = []
        self._ended = True

    def begin(self) -> None:
        """See `Mail`."""
        self._in: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._out: queue.SimpleQueue[tuple[int, bytes, Tensor] | None] = queue.SimpleQueue()
        self.open, self._ended = set(self.peers), False
        receiving = [threading.Thread(target=self._receive, args=(peer,), daemon=True) for peer in self.peers]
        self._threads = [threading.Thread(target=self._send_all, daemon=True), *receiving]
        for thread in self._threads:
            thread.start()

    def send(self, peer: int, kind: str, body: dict[str, Any], rows: Tensor = _NO_ROWS) -> None:
        """See `Mail`."""
        if not self.ranks.lost:
            self._queue(peer, kind, body, rows)

    def take(self, seconds: float = 0.0) -> list[Message]:
        """See `Mail`."""
        found = []
        for message in self._waiting(seconds):
            if message.kind == LOST:
                self.ranks.lost = self.ranks.lost or f"rank {message.peer}: {message.body['reason']}"
                break
            if message.kind == END:
                self.open.discard(message.peer)
            found.append(message)
        if self.ranks.lost:
            raise self._lost()
        return found

    def say_end(self) -> None:
        """See `Mail`."""
        self._last(END, {})

    def close(self, lost: str = "") -> None:
        """See `Mail`."""
        self.ranks.lost = lost = self.ranks.lost or lost
        self._last(*((LOST, {"reason": lost}) if lost else (END, {})))
        begin = time.monotonic()
        for thread in self._threads:
            thread.join(max(0.0, begin + LAST_S - time.monotonic()) if lost else None)
        self._threads = []
        if not lost:
            self.take()

    def _last(self, kind: str, body: dict[str, Any]) -> None:
        """Say the last thing of this call to all peers, once."""
        if not self._ended:
            for peer in self.peers:
                self._queue(peer, kind, body)
            self._ended = True
            self._out.put(None)

    def _queue(self, peer: int, kind: str, body: dict[str, Any], rows: Tensor = _NO_ROWS) -> None:
        if not self._ended:
            head = json.dumps({"kind": kind, **body}, default=lambda number: number.item()).encode()
            self._out.put((peer, head, rows))

    def _lost(self) -> RankLost:
        ranks = self.ranks
        return RankLost(rank=ranks.rank, ranks=ranks.size, reason=ranks.lost, patience=ranks.patience)

    def _waiting(self, seconds: float) -> Iterator[Message]:
        """Take out what has come."""
        try:
            yield self._in.get(timeout=seconds) if seconds else self._in.get_nowait()
            while True:
                yield self._in.get_nowait()
        except queue.Empty:
            return

    def _send_all(self) -> None:
        """What the sending thread does: until nothing more is said."""
        while True:
            try:
                item = self._out.get(timeout=self._interval)
                if item is None:
                    return
                items = [item]
            except queue.Empty:
                items = [(peer, json.dumps({"kind": THERE}).encode(), _NO_ROWS) for peer in self.peers]
            for peer, head, rows in items:
                self._post(peer, head, rows)

    def _post(self, peer: int, head: bytes, rows: Tensor) -> None:
        """Send a message; where its peer does not take it, that is a message from there."""
        sizes = torch.tensor([len(head), rows.nbytes])
        parts = [sizes, torch.frombuffer(bytearray(head), dtype=torch.uint8), rows]
        try:
            for part in parts if len(rows) else parts[:2]:
                self._group.send([part], peer, 0).wait()
        except RuntimeError as error:
            self._in.put(_gone(peer, error))
            return
        self.sent.mail += sizes.nbytes + len(head)
        self.sent.handed += rows.nbytes

    def _receive(self, peer: int) -> None:
        """What a receiving thread does: until its peer says nothing more."""
        try:
            while True:
                sizes = torch.zeros(2, dtype=torch.int64)
                self._group.recv([sizes], peer, 0).wait()
                head, rows = (torch.empty(size, dtype=torch.uint8) for size in sizes.tolist())
                for part in (head, rows) if len(rows) else (head,):
                    self._group.recv([part], peer, 0).wait()
                body = json.loads(bytes(head.numpy()))
                kind = body.pop("kind")
                if kind != THERE:
                    self._in.put(Message(peer, kind, body, rows))
                if kind in (END, LOST):
                    return
        except RuntimeError as error:
            self._in.put(_gone(peer, error))


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long the ranks of a group wait for each other."""
    found: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return found


def _gone(peer: int, error: RuntimeError) -> Message:
    """That a peer is not there any more, of which the other threads of the same rank need not say it again."""
    return Message(peer, LOST, {"reason": (str(error).strip().splitlines() or [type(error).__name__])[0]})


__all__ = ["END", "LOST", "GroupMail", "Mail", "Message", "timeout_of"]
