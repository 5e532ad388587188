"""Pages in the order in which they fell idle, of which thousands come and go in a few array operations.

A conversation of 256k tokens has 4096 pages, and a loop over them would take longer than all else that a step does on
the host. So pages stand in runs, as they came, and each knows the number under which it came last: where that is not
its number in a run, it has left or come again, and whoever looks there passes it by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

SLACK = 1024
"""Places in runs that may be out of date, beside as many as there are pages."""


class IdlePages:
    """Some of the pages 0..count-1, the longest idle first."""

    def __init__(self, count: int) -> None:
        self._number = np.full(count, -1, dtype=np.int64)
        self._since = np.zeros(count)
        self._runs: deque[tuple[NDArray[np.int32], int]] = deque()
        self._at = 0  # in the first run: those before have left
        self._next = 0
        self._size = 0
        self._places = 0

    def __len__(self) -> int:
        return self._size

    def __contains__(self, page: int) -> bool:
        return bool(self._number[page] >= 0)

    def __iter__(self) -> Iterator[int]:
        """All of them; none may come or go meanwhile."""
        for pages, first in self._runs:
            yield from pages[self._stay(pages, first)].tolist()

    def add(self, pages: NDArray[np.int32], now: float) -> None:
        """Pages that are not there, none twice, fall idle."""
        if not len(pages):
            return
        first, self._next = self._next, self._next + len(pages)
        self._number[pages] = np.arange(first, self._next)
        self._since[pages] = now
        self._runs.append((pages, first))
        self._size += len(pages)
        self._places += len(pages)
        if self._places > 2 * self._size + SLACK:
            self._tidy()

    def remove(self, pages: NDArray[np.int32]) -> int:
        """Pages, none twice, are idle no more; how many of them were."""
        found = int((self._number[pages] >= 0).sum())
        self._number[pages] = -1
        self._size -= found
        return found

    def first(self) -> int:
        """The one idle for longest. Raises LookupError without any."""
        while self._runs:
            pages, first = self._runs[0]
            if self._at < len(pages) and self._number[pages[self._at]] == first + self._at:
                return int(pages[self._at])
            stay = np.flatnonzero(self._stay(pages[self._at :], first + self._at))
            if len(stay):
                self._at += int(stay[0])
                continue
            self._runs.popleft()
            self._places -= len(pages)
            self._at = 0
        raise LookupError("no page is idle")

    def before(self, time: float) -> int | None:
        """The one idle for longest, if that was before a time."""
        if not self._size:
            return None
        page = self.first()
        return page if self._since[page] < time else None

    def _stay(self, pages: NDArray[np.int32], first: int) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = self._number[pages] == np.arange(first, first + len(pages))
        return found

    def _tidy(self) -> None:
        """Make the runs one, of the pages that are there; their order stays."""
        pages = np.concatenate([pages[self._stay(pages, first)] for pages, first in self._runs])
        self._number[pages] = np.arange(self._next, self._next + len(pages))
        self._runs = deque([(pages, self._next)])
        self._next += len(pages)
        self._at, self._places = 0, len(pages)


__all__ = ["IdlePages"]
