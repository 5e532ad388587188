"""Requests whose cache rows leave a rank's caches, and requests that come with rows.

A prompt that was read stays where it is, on its seat, until a rank that decodes has room for it: so memory for rows in
neither cache is bounded, and a rank that has too many of them reads no more prompts. Where a rank that decodes runs out
of pages, the rows of the youngest request wait in its memory, since nobody there reads tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from deepinfer_compile.runtime.batch import Executor
from deepinfer_compile.runtime.page_rows import PageRows
from deepinfer_compile.runtime.pages import Pages, pages_for
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.scheduler import Plan, Scheduler

NO_PAGES = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True)
class Held:
    """The cache rows of a request outside of caches. done: tokens that they are of. pages: for each cache group, u8
    [pages, bytes of its form], from the first page that the next token reads on."""

    done: int
    pages: tuple[Tensor, ...]

    @classmethod
    def taken(cls, executor: Executor, pages: Pages, seat: int, done: int) -> Held:
        """A copy of what a seat has."""
        spans = [group.table[seat, first:end] for group, (first, end) in zip(pages.groups, spans_of(pages, done))]
        return cls(done, tuple(executor.read_pages(i, span.tolist()) for i, span in enumerate(spans)))

    @classmethod
    def cut(cls, executor: Executor, pages: Pages, done: int, rows: Tensor) -> Held | None:
        """Of what `joined` gave on another rank; None where it is not of the size that it has here."""
        counts = [end - first for first, end in spans_of(pages, done)]
        widths = [executor.page_form(i).size for i in range(len(counts))]
        sizes = [count * width for count, width in zip(counts, widths)]
        if len(rows) != sum(sizes):
            return None
        parts = zip(rows.split(sizes), counts, widths)
        return cls(done, tuple(part.view(count, width) for part, count, width in parts))

    def joined(self) -> Tensor:
        """All of it in one run of bytes."""
        return torch.cat([part.flatten() for part in self.pages])

    def put(self, executor: Executor, pages: Pages, seat: int) -> None:
        """Write it into the pages of a seat."""
        for i, (group, (first, end)) in enumerate(zip(pages.groups, spans_of(pages, self.done))):
            form = executor.page_form(i)
            rows = [PageRows(form, part) for part in self.pages[i]]
            if executor.write_pages(i, group.table[seat, first:end].tolist(), rows) != end - first:
                raise AssertionError("rows have not the form of the caches that they were checked against")


def spans_of(pages: Pages, done: int) -> list[tuple[int, int]]:
    """For each cache group, the logical pages that a token at position `done` reads, first and behind the last."""
    return [(group.first(done), pages_for(done)) for group in pages.groups]


class PromptSeats(Scheduler):
    """The scheduler of a rank that reads prompts."""

    def park(self, request: Request) -> None:
        """A request stays on its seat and runs no more."""
        self._kept = None
        self._running = self._running[self._running != request.seat]


class HandedSeats(Scheduler):
    """The scheduler of a rank that decodes: requests come with their rows and one more token, and run a token a step.

    held: rows of requests that wait for a seat.
    """

    executor: Executor

    def restart(self, requests: list[Request]) -> None:
        """Forget all; nobody here can read tokens again."""
        super().restart([])
        self.held: dict[str, Held] = {}

    def bring(self, request: Request, held: Held) -> None:
        """Queue a request with the rows of all tokens but the newest."""
        self.held[request.id] = held
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """See `Scheduler`."""
        self.held.pop(request.id, None)
        super().remove(request)

    def put(self, request: Request) -> None:
        """Write the rows of a request that has got its seat."""
        self.held.pop(request.id).put(self.executor, self.pages, request.seat)

    def has_room(self, done: int, promised: Sequence[int]) -> bool:
        """Whether there is a seat, and pages, for a request with so many rows after those that wait, and others with
        the promised numbers of rows."""
        before = [*promised, *(held.done for held in self.held.values())]
        return len(self._free) > len(before) and self._fit([*before, done])

    def _fit(self, rows: Iterable[int]) -> bool:
        """Whether requests with so many rows, and room for a token each, find pages."""
        need = [0] * len(self.pages.groups)
        for done in rows:
            for i, (first, _) in enumerate(spans_of(self.pages, done)):
                need[i] += pages_for(done + 1) - first
        return all(count <= group.pool.free for count, group in zip(need, self.pages.groups))

    def _admit(self, plan: Plan) -> Plan:
        new: list[int] = []
        rows: list[int] = []
        while self.waiting and self._free and self._fit([*rows, self.held[self.waiting[0].id].done]):
            request = self.waiting.popleft()
            rows.append(self.held[request.id].done)
            new.append(self._seat(request, rows[-1]))
        if not new:
            return plan
        joined, count = np.array(new), np.ones(len(new), dtype=np.int64)
        if not self.pages.try_grow(joined, self._done[joined] + count):
            raise AssertionError("counted pages are gone")
        self._running = np.concatenate((self._running, joined))
        return Plan(np.concatenate((plan.seats, joined)), np.concatenate((plan.count, count)), new)

    def _seat(self, request: Request, done: int) -> int:
        """Take a seat as if the rows had been written there."""
        seat = self._take_seat(request, False, None)
        del self._feed[seat]
        self._done[seat], self._newest[seat] = done, request.output_ids[-1]
        for group in self.pages.groups:
            group.adopt(seat, group.first(done), NO_PAGES)
        return seat

    def _expect(self, request: Request) -> None:
        """Nothing is read from disk: rows come with their request."""

    def _preempt(self, request: Request) -> None:
        self.held[request.id] = Held.taken(self.executor, self.pages, request.seat, int(self._done[request.seat]))
        super()._preempt(request)


__all__ = ["HandedSeats", "Held", "PromptSeats", "spans_of"]
