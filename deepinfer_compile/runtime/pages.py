"""Which page of which cache group holds which tokens of which request.

Each cache group has one pool of page numbers and one table with a row per seat (a running request) and a column per
logical page. All requests of a step grow or give back pages in a few array operations, since a loop over requests
would take a large part of the host time of a step.

A full page whose rows may serve later requests is marked as kept (`prefix.py` knows what it holds). Several requests
may hold it at once, all as the same logical page, and none writes to it. When the last one gives it back it stays
idle: still readable, and the next to be handed out once no unused page is left. Unused and idle pages are both free.

A window group gives a page back once no later query can read it. `backtrack` positions more are kept, for callers that
may drop the newest tokens again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.errors import BadOption, OutOfMemory
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup
from deepinfer_compile.runtime.idle import IdlePages

Ints = NDArray[np.int64]
_NONE = np.zeros(0, dtype=np.int32)


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens from a page start."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """Page numbers 0..count-1, handed out newest first so that few pages stay warm, and idle ones after all others.

    idle: pages that nobody holds and whose rows are kept, the longest idle first.
    lost: told of each page whose rows are about to go because it is needed for others.
    """

    def __init__(self, count: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = count
        self.clock = clock
        self.lost: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Take all pages back and keep no rows."""
        self._stack = np.arange(self.count - 1, -1, -1, dtype=np.int32)
        self._unused = self.count
        self._holders = np.zeros(self.count, dtype=np.int32)
        self._kept = np.zeros(self.count, dtype=bool)
        self._place = np.zeros(self.count, dtype=np.int64)
        self.idle = IdlePages(self.count)

    @property
    def free(self) -> int:
        """Pages that can be taken."""
        return self._unused + len(self.idle)

    def take(self, count: int) -> NDArray[np.int32]:
        """`count` page numbers; the caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} free")
        while self._unused < count:
            page = self.idle.first()
            if self.lost is not None:
                self.lost(page)
            self.forget(page)
        self._unused -= count
        pages = self._stack[self._unused : self._unused + count].copy()
        self._holders[pages] = 1
        return pages

    def share(self, pages: NDArray[np.int32]) -> None:
        """Hold kept pages, none twice, once more."""
        if not self._kept[pages].all():
            raise ValueError("pages shared whose rows are not kept")
        self._holders[pages] += 1
        self.idle.remove(pages)

    def give(self, pages: NDArray[np.int32]) -> None:
        """Return pages, each as often as it was taken or shared; of kept ones the last given fall idle first."""
        inside = pages.min(initial=0) >= 0 and pages.max(initial=-1) < self.count
        if not inside or (self._holders[pages] == 0).any():
            raise ValueError(f"{len(pages)} pages given back, {self.count - self.free} were taken")
        np.subtract.at(self._holders, pages, 1)
        gone = pages[self._holders[pages] == 0]
        kept = self._kept[gone]
        self.idle.add(self._once(gone[kept][::-1]), self.clock())
        self._push(self._once(gone[~kept]))

    def keep(self, page: int) -> None:
        """From now on the rows of a held page are kept."""
        self._kept[page] = True

    def forget(self, page: int) -> None:
        """The rows of a kept page need not be kept any more."""
        self._kept[page] = False
        one = np.array([page], dtype=np.int32)
        if self.idle.remove(one):
            self._push(one)

    def unheld(self, pages: NDArray[np.int32]) -> int:
        """How many of some pages nobody holds."""
        return int((self._holders[pages] == 0).sum())

    def _once(self, pages: NDArray[np.int32]) -> NDArray[np.int32]:
        """Pages without their later repetitions."""
        order = np.arange(len(pages))
        self._place[pages[::-1]] = order[::-1]  # of equal ones the last that is written stays
        first: NDArray[np.int32] = pages[self._place[pages] == order]
        return first

    def _push(self, pages: NDArray[np.int32]) -> None:
        end = self._unused + len(pages)
        self._stack[self._unused : end] = pages
        self._unused = end


class GroupTable:
    """Pages of one cache group. table: i32[seats, pages of max_model_len], -1 where there is none. reach: positions
    before its own that a query may read, None for all."""

    def __init__(self, group: CacheGroup, pages: int, seats: int, max_model_len: int, backtrack: int) -> None:
        self.pool, self.bytes_per_page = PagePool(pages), group.bytes_per_page
        self.table = np.full((seats, pages_for(max_model_len)), -1, dtype=np.int32)
        self._first = np.zeros(seats, dtype=np.int64)
        self._end = np.zeros(seats, dtype=np.int64)
        self.reach = group.window - 1 + backtrack if group.window else None

    def reset(self) -> None:
        """Take back the pages of all seats."""
        self.pool.reset()
        self.table.fill(-1)
        self._first.fill(0)
        self._end.fill(0)

    def missing(self, seats: Ints, tokens: Ints) -> Ints:
        """Pages that each seat lacks to hold positions below `tokens`."""
        lack: Ints = np.maximum(-(-tokens // PAGE_SIZE) - self._end[seats], 0)
        return lack

    def grow(self, seats: Ints, count: Ints) -> None:
        """Append `count` pages to each seat."""
        total = int(count.sum())
        if total == 0:
            return
        self._cells(seats, self._end[seats], count, self.pool.take(total))
        self._end[seats] += count

    def adopt(self, seat: int, first: int, pages: NDArray[np.int32]) -> None:
        """Begin an empty seat with kept pages, the first of which is its logical page `first`."""
        self.pool.share(pages)
        self._first[seat] = first
        self._end[seat] = first + len(pages)
        self.table[seat, first : first + len(pages)] = pages

    def exchange(self, seat: int, column: int, page: int) -> None:
        """Hold a kept page of the same rows in place of the one that a seat has there."""
        self.pool.share(np.array([page], dtype=np.int32))
        self.pool.give(self.table[seat, column : column + 1].copy())
        self.table[seat, column] = page

    def first(self, start: int) -> int:
        """The first logical page that a query at position `start` reads."""
        return 0 if self.reach is None else max(start - self.reach, 0) // PAGE_SIZE

    def trim(self, seats: Ints, start: Ints) -> None:
        """Give back the pages that no query at position `start` or later reads."""
        if self.reach is None:
            return
        first = np.maximum(start - self.reach, 0) // PAGE_SIZE
        count = np.minimum(first, self._end[seats]) - self._first[seats]
        if count.max(initial=0) <= 0:
            return
        self._drop(seats, np.maximum(count, 0))

    def clear(self, seat: int) -> None:
        """Give back all pages of a seat."""
        seats = np.array([seat])
        self._drop(seats, self._end[seats] - self._first[seats])
        self._first[seat] = self._end[seat] = 0

    def _drop(self, seats: Ints, count: Ints) -> None:
        self.pool.give(self._cells(seats, self._first[seats], count, None))
        self._first[seats] += count

    def _cells(self, seats: Ints, start: Ints, count: Ints, value: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """Put `value` (none: -1) into columns start..start+count of each seat; return what was there."""
        column = np.arange(int(count.sum())) + np.repeat(start - np.cumsum(count) + count, count)
        row = np.repeat(seats, count)
        before = self.table[row, column]
        self.table[row, column] = -1 if value is None else value
        return before


class Pages:
    """The tables of all cache groups, moved together."""

    def __init__(
        self, groups: tuple[CacheGroup, ...], pages: tuple[int, ...], *, seats: int, max_model_len: int, backtrack: int
    ) -> None:
        self.groups = [GroupTable(g, n, seats, max_model_len, backtrack) for g, n in zip(groups, pages, strict=True)]
        self._unlimited = [g.window == 0 for g in groups]

    @property
    def used(self) -> tuple[int, ...]:
        """Pages that requests hold, a number per group."""
        return tuple(group.pool.count - group.pool.free for group in self.groups)

    @property
    def cached(self) -> tuple[int, ...]:
        """Pages that nobody holds and whose rows are kept, a number per group."""
        return tuple(len(group.pool.idle) for group in self.groups)

    def reset(self) -> None:
        """Take back the pages of all seats."""
        for group in self.groups:
            group.reset()

    def trim(self, seats: Ints, start: Ints) -> None:
        """Give back what left the windows of requests whose next query is at position `start`."""
        for group in self.groups:
            group.trim(seats, start)

    def try_grow(self, seats: Ints, tokens: Ints) -> bool:
        """Give every seat room for positions below `tokens`; do nothing and return False if a pool cannot."""
        missing = [group.missing(seats, tokens) for group in self.groups]
        if any(count.sum() > group.pool.free for group, count in zip(self.groups, missing)):
            return False
        for group, count in zip(self.groups, missing):
            group.grow(seats, count)
        return True

    def lacking(self, seats: Ints, tokens: Ints) -> NDArray[np.bool_]:
        """Which seats have no room yet for positions below `tokens`."""
        lack = np.zeros(len(seats), dtype=bool)
        for group in self.groups:
            lack |= group.missing(seats, tokens) > 0
        return lack

    def promise(self, length: int, chunk: int, promised: list[int], shared: Sequence[NDArray[np.int32]] = ()) -> bool:
        """Whether a new request of `length` tokens finds pages now, its first step taking `chunk` of them.

        Groups that keep the whole context must hold all of it, else it would soon wait with its pages taken.
        promised: per group, pages of earlier answers that are not taken yet; a yes adds to it. shared: per group, kept
        pages that it begins with; those that are idle count as free until it holds them.
        """
        for i, group in enumerate(self.groups):
            begun = shared[i] if shared else _NONE
            need = pages_for(length) - len(begun) if self._unlimited[i] else pages_for(chunk)
            if need + group.pool.unheld(begun) > group.pool.free - promised[i]:
                return False
        promised[:] = [taken + pages_for(chunk) for taken in promised]
        return True

    def clear(self, seat: int) -> None:
        """Give back all pages of a seat."""
        for group in self.groups:
            group.clear(seat)


@dataclass(frozen=True)
class Demand:
    """Pages of one cache group: for one request at most, and for all seats full at once."""

    one: int
    all: int


def demand(group: CacheGroup, *, seats: int, max_model_len: int, chunk: int, backtrack: int) -> Demand:
    """Pages that requests of `max_model_len` tokens need, when a step adds at most `chunk` tokens in all."""
    whole = pages_for(max_model_len)
    if not group.window:
        return Demand(whole, whole * seats)
    # n consecutive positions touch at most (n + 62) // 64 + 1 pages; a step that adds c tokens to a request
    # needs the window before the first of them as well.
    steady = (group.window + backtrack + PAGE_SIZE - 2) // PAGE_SIZE + 1
    one = (group.window - 1 + backtrack + chunk + PAGE_SIZE - 2) // PAGE_SIZE + 1
    together = seats * (steady + 1) + pages_for(chunk)
    return Demand(min(one, whole), min(together, whole * seats))


def plan_pages(
    groups: tuple[CacheGroup, ...],
    *,
    seats: int,
    max_model_len: int,
    chunk: int,
    backtrack: int,
    memory_bytes: int | None,
) -> tuple[int, ...]:
    """Pages of each group's pool: enough for `seats` full requests, or what `memory_bytes` allows.

    `memory_bytes` defaults to half of the memory available now. Raises OutOfMemory when one request of
    `max_model_len` tokens does not fit.
    """
    wanted = [demand(g, seats=seats, max_model_len=max_model_len, chunk=chunk, backtrack=backtrack) for g in groups]
    memory = available_bytes() // 2 if memory_bytes is None else memory_bytes
    least = sum(d.one * g.bytes_per_page for d, g in zip(wanted, groups))
    most = sum(d.all * g.bytes_per_page for d, g in zip(wanted, groups))
    if least > memory:
        terms = " + ".join(f"{d.one} pages of {g.name} x {g.bytes_per_page:,}" for d, g in zip(wanted, groups))
        source = "half of the available memory" if memory_bytes is None else "memory_bytes"
        arithmetic = f"one request of {max_model_len} tokens needs {terms} = {least:,} bytes; {source} is {memory:,}"
        raise OutOfMemory(arithmetic=arithmetic)
    if most <= memory:
        return tuple(d.all for d in wanted)
    share = memory - least
    return tuple(d.one + (d.all - d.one) * share // (most - least) for d in wanted)


def caches_in_words(groups: tuple[CacheGroup, ...], counts: tuple[int, ...], memory_bytes: int | None) -> str:
    """What the pools take and how that came about."""
    if not groups:
        return "no caches"
    terms = " + ".join(f"{n} pages of {g.name} x {g.bytes_per_page:,} bytes" for g, n in zip(groups, counts))
    total = sum(n * g.bytes_per_page for g, n in zip(groups, counts))
    allowed = "half of the available memory" if memory_bytes is None else f"{memory_bytes:,} bytes"
    return f"caches of {terms} = {total:,} bytes, {allowed} allowed"


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken now without swapping. Raises BadOption where the system does not say."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    reason = f"{meminfo} does not say how much memory is available"
    raise BadOption(name="memory_bytes", value=None, reason=reason, fix="give memory_bytes")
