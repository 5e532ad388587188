"""What is known of the pages in a folder: which hang on which, in which files they are, until when each is kept, and
which go first.

A node is a page of tokens; in each cache group that still needs it, a file holds its rows. Nobody finds a page whose
parent is gone, so a node goes with all that hang on it, and what makes room is always a node on which nothing hangs:
the last one of those below the node that was not used for the longest time. No input or output happens here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain


@dataclass(eq=False)
class PageFile:
    """Pages of one cache group, each of which hangs on the one before. name: from the folder on. parent: the node that
    the first one hangs on, empty for none. head, stride: bytes before the pages, and of each. pages: nodes in their
    order, those that are still there."""

    name: str
    group: int
    parent: str
    head: int
    stride: int
    pages: list[str]

    @property
    def size(self) -> int:
        """Bytes, 0 where there is no page any more."""
        return self.head + self.stride * len(self.pages) if self.pages else 0

    def links(self) -> Iterator[tuple[str, str]]:
        """Each page, and what it hangs on."""
        return zip(self.pages, (self.parent, *self.pages))


@dataclass(slots=True, eq=False)
class Entry:
    """A node. parent: the key of the one it hangs on, empty for none. until: the time from which it is not kept.
    places: by group, its file and its number there. children: the nodes that hang on it, in the order they came."""

    parent: str
    until: float
    places: dict[int, tuple[PageFile, int]] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """A file as a folder showed it. used: when it was used last. until: when it is kept no more."""

    file: PageFile
    used: int
    until: float


class DiskIndex:
    """The nodes of a folder by key. pages: how many there are, each in its groups. size: bytes of all files."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()
        self._deadlines: list[tuple[float, str]] = []
        self.pages = self.size = 0

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, key: str) -> Entry | None:
        """A node, which the caller does not change."""
        return self._entries.get(key)

    def load(self, found: Sequence[Found]) -> list[PageFile]:
        """Take up the files of a folder. Returns those that hold less than they did, which are cut before the first
        page that nothing leads to, or that another file holds too.

        A node's parent may be missing, and be itself or below it.
        """
        files, counts = [one.file for one in found], [len(one.file.pages) for one in found]
        above = dict[str, str]()
        for key, parent in chain.from_iterable(file.links() for file in files):
            above.setdefault(key, parent)
        for file in files:
            _cut(file, lambda key, parent: above[key] == parent)
        above = dict(chain.from_iterable(file.links() for file in files))
        rooted = _rooted(above)
        # longer ones first, since two processes may have written the same pages in runs of another length
        for one in sorted(found, key=lambda one: (-len(one.file.pages), one.file.name)):
            _cut(one.file, lambda key, _, group=one.file.group: key in rooted and not self._holds(key, group))
            self._take(one, above)
        for one in sorted(found, key=lambda one: one.used):
            for key in reversed(one.file.pages):
                self._entries.move_to_end(key)
        return [file for file, count in zip(files, counts) if len(file.pages) < count]

    def _holds(self, key: str, group: int) -> bool:
        return key in self._entries and group in self._entries[key].places

    def _take(self, one: Found, above: dict[str, str]) -> None:
        """Take up a file, and the nodes that it hangs on, whose files may come later."""
        path, key = list[str](), one.file.parent if one.file.pages else ""
        while key and key not in self._entries:
            path.append(key)
            key = above[key]
        for key in reversed(path):
            self._new(key, above[key], one.until)
        self.add(one.file, one.until)

    def add(self, file: PageFile, until: float) -> None:
        """A file is there, of pages that are in none of its group; the node it hangs on is, and keeps them at least as
        long as they were kept."""
        self.size += file.size
        self.pages += len(file.pages)
        for number, (key, parent) in enumerate(file.links()):
            if key not in self._entries:
                self._new(key, parent, until)
            self._entries[key].places[file.group] = file, number
            self.touch(key, until)

    def _new(self, key: str, parent: str, until: float) -> None:
        self._entries[key] = Entry(parent, until)
        heapq.heappush(self._deadlines, (until, key))
        if parent:
            self._entries[parent].children[key] = None

    def touch(self, key: str, until: float) -> float:
        """A node is used now, and kept until then if it was not kept longer; returns until when it is."""
        entry = self._entries[key]
        entry.until = max(entry.until, until)
        self._entries.move_to_end(key)
        return entry.until

    def remove(self, key: str) -> list[PageFile]:
        """Take out a node, if it is there, and all that hang on it; returns the files that held them."""
        entry = self._entries.get(key)
        if entry is None:
            return []
        if entry.parent:
            del self._entries[entry.parent].children[key]
        todo, files = [key], dict[PageFile, None]()
        for one in todo:
            todo += self._entries[one].children
        for one in todo:
            for group in list(self._entries[one].places):
                files |= dict.fromkeys(self.remove_page(one, group))
        for one in todo:
            del self._entries[one]
        return list(files)

    def remove_page(self, key: str, group: int) -> list[PageFile]:
        """Take out a node's page of one group, and those behind it in its file, which is returned; the nodes stay."""
        if not self._holds(key, group):
            return []
        file, number = self._entries[key].places[group]
        for one in file.pages[number:]:
            del self._entries[one].places[group]
        self.pages -= len(file.pages) - number
        self.size -= file.size
        del file.pages[number:]
        self.size += file.size
        return [file]

    def move(self, file: PageFile, number: int, to: PageFile) -> None:
        """The pages of a file from a number on are in another one now, which has no others."""
        self.size -= file.size
        del file.pages[number:]
        self.size += file.size + to.size
        for place, key in enumerate(to.pages):
            self._entries[key].places[to.group] = to, place

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
                if group not in entry.places:
                    return False
                one, count = entry.parent, count - 1
        return True


def _cut(file: PageFile, stays: Callable[..., bool]) -> None:
    """Take out the first page that does not stay, by itself and its parent, and those behind it."""
    for number, (key, parent) in enumerate(file.links()):
        if not stays(key, parent):
            del file.pages[number:]
            return


def _rooted(above: dict[str, str]) -> set[str]:
    """The nodes from which one comes to the empty one, by what each hangs on."""
    below: dict[str, list[str]] = {}
    for key, parent in above.items():
        below.setdefault(parent, []).append(key)
    todo = list(below.get("", ()))
    for one in todo:
        todo += below.get(one, ())
    return set(todo)
