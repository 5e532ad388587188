"""What is known of the pages in a folder: which hang on which, until when each is kept, and which go first.

A node is a page of tokens; it has a file for each cache group that still needs it. Nobody finds a page whose parent is
gone, so a node goes with all that hang on it, and what makes room is always a node on which nothing hangs: the last one
of those below the node that was not used for the longest time. No input or output happens here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Entry:
    """A node. parent: the key of the one it hangs on, empty for none. until: the time from which it is not kept.
    sizes: bytes of its file of each group. children: the nodes that hang on it, in the order they came."""

    parent: str
    until: float
    sizes: dict[int, int] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A node as a folder showed it. used: when it was used last."""

    key: str
    parent: str
    used: int
    until: float
    sizes: dict[int, int]


class DiskIndex:
    """The nodes of a folder by key. files, size: how many files they have, and bytes in all."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._deadlines: list[tuple[float, str]] = []
        self.files = self.size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Entry | None:
        """A node, which the caller does not change."""
        return self._entries.get(key)

    def load(self, found: Sequence[Found]) -> list[str]:
        """Take up the nodes of a folder. Returns the keys of those that nothing leads to, which it has not taken.

        A node's parent may be missing, and be itself or below it.
        """
        below: dict[str, list[Found]] = {}
        for one in found:
            below.setdefault(one.parent, []).append(one)
        todo, taken = list(below.get("", ())), dict[str, Found]()
        while todo:
            one = todo.pop()
            taken[one.key] = one
            todo += below.get(one.key, ())
        for one in taken.values():
            self._entries[one.key] = Entry(one.parent, one.until)
        for one in taken.values():
            for group, size in one.sizes.items():
                self.add(one.key, one.parent, group, size, one.until)
            heapq.heappush(self._deadlines, (one.until, one.key))
        for one in sorted(taken.values(), key=lambda one: one.used):
            self._entries.move_to_end(one.key)
        return [one.key for one in found if one.key not in taken]

    def add(self, key: str, parent: str, group: int, size: int, until: float) -> None:
        """A file is there; its node's parent is, and keeps it at least as long as it was kept."""
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = Entry(parent, until)
            heapq.heappush(self._deadlines, (until, key))
        if parent:
            self._entries[parent].children[key] = None
        old = entry.sizes.get(group)
        self.files += old is None
        self.size += size - (old or 0)
        entry.sizes[group] = size
        self.touch(key, until)

    def touch(self, key: str, until: float) -> float:
        """A node is used now, and kept until then if it was not kept longer; returns until when it is."""
        entry = self._entries[key]
        entry.until = max(entry.until, until)
        self._entries.move_to_end(key)
        return entry.until

    def remove(self, key: str) -> list[tuple[str, Entry]]:
        """Take out a node, if it is there, and all that hang on it; returns them."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        if entry.parent:
            del self._entries[entry.parent].children[key]
        gone, todo = [], [key]
        while todo:
            one = todo.pop()
            held = self._entries.pop(one)
            gone.append((one, held))
            todo += held.children
            self.files -= len(held.sizes)
            self.size -= sum(held.sizes.values())
        return gone

    def remove_file(self, key: str, group: int) -> None:
        """Take out a node's file of one group; the node stays."""
        size = self._entries[key].sizes.pop(group, None)
        if size is not None:
            self.files -= 1
            self.size -= size

    def oldest(self) -> str:
        """The node that goes first for room; empty if there is none."""
        key = next(iter(self._entries), "")
        while key and (entry := self._entries[key]).children:
            key = next(iter(entry.children))
        return key

    def expired(self, now: float) -> str:
        """A node that is kept no more; empty if there is none. It stays until it is removed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, key = heapq.heappop(self._deadlines)
            entry = self._entries.get(key)
            if entry is None:
                continue
            if entry.until <= now:
                return key
            heapq.heappush(self._deadlines, (entry.until, key))
        return ""

    def deadline(self) -> float:
        """When to look for expired nodes next: never later than the first expires."""
        return self._deadlines[0][0] if self._deadlines else float("inf")

    def leads(self, key: str, spans: Sequence[int | None]) -> bool:
        """Whether a request can start after a node: it and those above have what each group needs.

        spans: per group how many pages it reads back, None for all.
        """
        for group, span in enumerate(spans):
            one, count = key, 1 if span is None else span
            while one and count:
                entry = self._entries[one]
                if group not in entry.sizes:
                    return False
                one, count = entry.parent, count - 1
        return True
