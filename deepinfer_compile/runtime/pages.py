"""Which page of which cache group holds which tokens of which request.

Each cache group has one pool of page numbers and one table with a row per seat (a running request) and a column per
logical page. All requests of a step grow or give back pages in a few array operations, since a loop over requests
would take a large part of the host time of a step. Pages are not shared between requests, so none is counted.

A window group gives a page back once no later query can read it. `backtrack` positions more are kept, for callers that
may drop the newest tokens again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.errors import BadOption, OutOfMemory
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup

Ints = NDArray[np.int64]


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` tokens from a page start."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """Page numbers 0..count-1, handed out newest first so that few pages stay warm."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.reset()

    def reset(self) -> None:
        """Take all pages back."""
        self._stack = np.arange(self.count - 1, -1, -1, dtype=np.int32)
        self.free = self.count

    def take(self, count: int) -> NDArray[np.int32]:
        """`count` page numbers; the caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} pages asked for, {self.free} free")
        self.free -= count
        return self._stack[self.free : self.free + count].copy()

    def give(self, pages: NDArray[np.int32]) -> None:
        """Return pages taken before."""
        end = self.free + len(pages)
        if end > self.count:
            raise ValueError(f"{len(pages)} pages given back, {self.count - self.free} were taken")
        self._stack[self.free : end] = pages
        self.free = end


class GroupTable:
    """Pages of one cache group. table: i32[seats, pages of max_model_len], -1 where there is none. reach: positions
    before its own that a query may read, None for all."""

    def __init__(self, group: CacheGroup, pages: int, seats: int, max_model_len: int, backtrack: int) -> None:
        self.pool = PagePool(pages)
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
        """Pages in use, a number per group."""
        return tuple(group.pool.count - group.pool.free for group in self.groups)

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

    def promise(self, length: int, chunk: int, promised: list[int]) -> bool:
        """Whether a new request of `length` tokens finds pages now, its first step taking `chunk` of them.

        Groups that keep the whole context must hold all of it, else it would soon wait with its pages taken.
        promised: per group, pages of earlier answers that are not taken yet; a yes adds to it.
        """
        free = [group.pool.free - taken for group, taken in zip(self.groups, promised)]
        needs = [pages_for(length if unlimited else chunk) for unlimited in self._unlimited]
        if any(need > left for need, left in zip(needs, free)):
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


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken now without swapping. Raises BadOption where the system does not say."""
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    reason = f"{meminfo} does not say how much memory is available"
    raise BadOption(name="memory_bytes", value=None, reason=reason, fix="give memory_bytes")
