"""The nodes of the tree of cached pages, and paths through it that are known without a lookup for every page.

A conversation that goes on was there before but for its newest page or two, and to find its thousands of nodes one by
one takes longer than the step that it waits for. So paths of requests that ran are kept with their tokens. A request
whose tokens agree with those of a path, which two arrays show in one comparison, has its nodes, as far as they are
still in the tree; from there on nodes are looked up. What a path says is what a lookup would find, so it does not
matter which are kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.pages import Ints
from deepinfer_compile.runtime.prefix_keys import Key

SHORTEST = 32
"""Pages for which a path is worth its keeping."""
MOST_PATHS, MOST_TOKENS = 64, 1 << 22
"""That are kept, since each is looked at, and tokens of all of them together, but for one."""
FIRST_LOOK, WIDER = 16, 8
"""Pages that are compared first, and how many times more each time after, since most tokens differ soon or never."""
GONE = 0
"""The row of nodes that are not in the tree."""


class NodePages:
    """Pages of nodes, a row each. pages: i32[rows, cache groups], -1 where the rows of a page are gone. changes: how
    often a node came or went, or the page of one."""

    def __init__(self, groups: int) -> None:
        self.pages = np.full((64, groups), -1, dtype=np.int32)
        self._free: list[int] = []
        self._next = GONE + 1
        self.changes = 0

    def take(self) -> int:
        """A row for a node that has no page yet."""
        self.changes += 1
        if self._free:
            return self._free.pop()
        if self._next == len(self.pages):
            self.pages = np.concatenate((self.pages, np.full_like(self.pages, -1)))
        self._next += 1
        return self._next - 1

    def put(self, node: Node, group: int, page: int) -> None:
        """Note a node's page, or that it has none (-1)."""
        self.changes += 1
        self.pages[node.row, group] = page

    def give(self, row: int) -> None:
        """Return the row of a node that has no page any more."""
        self.changes += 1
        self._free.append(row)

    def of(self, nodes: list[Node]) -> NDArray[np.int32]:
        """The pages of nodes, [nodes, groups]."""
        return self.pages[np.fromiter(map(attrgetter("row"), nodes), np.int64, len(nodes))]


class Node:
    """A page of tokens after the tokens of its parent. digest: its name on disk. tips: running requests whose newest
    full page it is. row: of its pages, GONE where it is not in the tree."""

    __slots__ = ("_table", "children", "digest", "key", "parent", "row", "tips")

    def __init__(self, parent: Node | None, key: Key, table: NodePages, digest: bytes) -> None:
        self.parent, self.key, self.digest = parent, key, digest
        self.children: dict[Key, Node] = {}
        self.tips = 0
        self._table, self.row = table, table.take()

    @property
    def pages(self) -> NDArray[np.int32]:
        """One per cache group, -1 where the rows are gone; see `NodePages.put`."""
        found: NDArray[np.int32] = self._table.pages[self.row]
        return found

    def leave(self) -> None:
        """It is not in the tree any more, and has no pages."""
        self._table.give(self.row)
        self.row = GONE


@dataclass(frozen=True, eq=False)
class Trail:
    """A path from the first page on. prompt, answer: its tokens, and maybe more."""

    prompt: Ints
    answer: Ints
    nodes: list[Node]

    @property
    def size(self) -> int:
        """Tokens that it keeps."""
        return len(self.prompt) + len(self.answer)

    def part(self, start: int, end: int) -> Ints:
        """Tokens start..end."""
        length = len(self.prompt)
        if end <= length:
            return self.prompt[start:end]
        return np.concatenate((self.prompt[start:], self.answer[max(start - length, 0) : end - length]))

    def agrees(self, tokens: Ints, start: int, end: int) -> int:
        """The first of the pages start..end with other tokens, `end` if there is none."""
        step = FIRST_LOOK
        while start < end:
            stop = min(start + step, end)
            other = self.part(start * PAGE_SIZE, stop * PAGE_SIZE) != tokens[start * PAGE_SIZE : stop * PAGE_SIZE]
            first = int(other.argmax())
            if other[first]:
                return start + first // PAGE_SIZE
            start, step = stop, step * WIDER
        return end


class Trails:
    """The paths that were walked last. shortest: pages of a path from which on it is kept."""

    def __init__(self, shortest: int = SHORTEST) -> None:
        self.shortest = shortest
        self._kept: deque[Trail] = deque()

    def add(self, prompt: Ints, answer: Iterable[int], nodes: list[Node]) -> None:
        """Keep a path, which nobody changes any more, in place of those that are its beginning; or one of which it is
        the beginning. prompt, answer: its tokens, and maybe more."""
        if len(nodes) < self.shortest:
            return
        others = [one for one in self._kept if one.nodes[0].row != GONE and not _begins(one.nodes, nodes)]
        first = next((one for one in others if _begins(nodes, one.nodes)), None)
        if first is None:
            first = Trail(prompt, np.fromiter(answer, np.int64), nodes)
        self._kept = deque([first, *(one for one in others if one is not first)])
        total = sum(one.size for one in self._kept)
        while len(self._kept) > 1 and total > MOST_TOKENS:
            total -= self._kept.pop().size
        if len(self._kept) > MOST_PATHS:  # the shortest is the one soonest looked up
            self._kept.remove(min(self._kept, key=lambda one: len(one.nodes)))

    def follow(self, tokens: Ints, first: Node) -> list[Node]:
        """The nodes of the pages of tokens, of which only whole ones count, as far as a path has them.

        first: the node of the first page. So keys that hold more than tokens are those of the path, too: what else they
        hold is the same for equal beginnings.
        """
        best = [first]
        for one in self._kept:
            if one.nodes[0] is not first:
                continue
            end = min(bisect_left(one.nodes, True, key=_is_gone), len(tokens) // PAGE_SIZE)
            if end > len(best) and one.agrees(tokens, len(best) - 1, len(best) + 1) > len(best):
                agreed = one.agrees(tokens, 0, end)
                best = one.nodes[:agreed] if agreed > len(best) else best
        return best


def _begins(path: list[Node], other: list[Node]) -> bool:
    """Whether a path is the beginning of another that is longer, or the same."""
    return len(path) <= len(other) and path[-1] is other[len(path) - 1]


def _is_gone(node: Node) -> bool:
    """Whether a node has left the tree; so have all below it then, and none above one that is there."""
    return node.row == GONE


__all__ = ["Node", "NodePages", "Trail", "Trails"]
