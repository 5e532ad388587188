"""What of the tree of cached pages is on disk: which are written when a request ends, and which a new one gets back.

A new request takes pages from disk into the pools first, where they are as idle as if they had been there all along;
then it looks for its hit. Of a window only the pages are written that a request needs which goes on after the prompt or
after the answer, so with windows a hit from disk ends at one of these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.request import Request

if TYPE_CHECKING:
    from deepinfer_compile.runtime.prefix import Key, Node, PrefixCache, PrefixStats


class Rows(Protocol):
    """Access to the rows of pages, see `Executor`."""

    def read_page(self, group: int, page: int) -> dict[str, Tensor]: ...

    def write_page(self, group: int, page: int, rows: Mapping[str, Tensor]) -> bool: ...


class DiskTier:
    """Moves pages between the pools and a folder. rows: gets and puts what pages hold."""

    def __init__(self, disk: DiskPages, rows: Rows) -> None:
        self._disk, self._rows = disk, rows
        self._restored = 0
        self._sought: Request | None = None

    @property
    def root(self) -> bytes:
        """What the names of all pages of this model begin from."""
        return self._disk.root

    def count(self, stats: PrefixStats) -> PrefixStats:
        """The counters with those of the disk."""
        disk = self._disk
        return replace(
            stats,
            restored=self._restored,
            damaged=disk.damaged,
            disk_failures=disk.failures,
            disk_pages=len(disk),
            disk_bytes=disk.size,
        )

    def clear(self, identity: str) -> None:
        """Go over to another model, or delete all pages of this one if there is no identity."""
        self._sought = None
        if identity:
            self._disk.adopt(identity)
        else:
            self._disk.clear()

    def remove(self, node: Node, group: int) -> None:
        """Delete a page if it is there."""
        self._disk.remove(node.digest, group)

    def store(self, tree: PrefixCache, node: Node, count: int, request: Request) -> None:
        """Write the pages up to a request's newest full one, its `count`th, which is `node`'s."""
        ends = (count, min(count, (len(request.prompt) - 1) // PAGE_SIZE))
        for page in range(count - 1, -1, -1):
            for i, group in enumerate(tree.groups):
                needed = any(group.first(end * PAGE_SIZE) <= page < end for end in ends)
                if needed and node.pages[i] >= 0 and not self._disk.has(node.digest, i):
                    self._disk.write(node.digest, i, self._rows.read_page(i, node.pages[i]))
            assert node.parent is not None
            node = node.parent

    def restore(self, tree: PrefixCache, request: Request) -> None:
        """Take the pages that make a longer hit from disk, if the pools have room for them; once for a request."""
        if request is self._sought:
            return
        self._sought = request
        while not self._try(tree, request):
            pass

    def _try(self, tree: PrefixCache, request: Request) -> bool:
        """Restore; False if a file turned out to be of no use, and is there no more."""
        nodes, keys = tree.walk(request), tree.keys(request)
        there = [[page >= 0 for page in node.pages] for node in nodes]
        there += [[False] * len(tree.groups)] * (len(keys) - len(nodes))
        found, digest = [], self.root
        for key, row in zip(keys, there):
            digest = digest_of(digest, key)
            found.append([has or self._disk.has(digest, i) for i, has in enumerate(row)])
        usable = tree.reach(found)[0]
        if usable <= tree.reach(there)[0]:
            return True
        wanted = [
            {page for page in range(group.first(usable * PAGE_SIZE), usable) if not there[page][i]}
            for i, group in enumerate(tree.groups)
        ]
        held = [np.array([n.pages[i] for n in nodes if n.pages[i] >= 0], np.int32) for i in range(len(tree.groups))]
        for group, pages in zip(tree.groups, held):
            group.pool.share(pages)
        fits = all(len(missing) <= group.pool.free for group, missing in zip(tree.groups, wanted))
        done = not fits or self._read(tree, keys[:usable], wanted)
        for group, pages in zip(tree.groups, held):
            group.pool.give(pages)
        return done

    def _read(self, tree: PrefixCache, keys: list[Key], wanted: list[set[int]]) -> bool:
        """Read the wanted pages of each group into pages that are idle afterwards; False at the first that fails.

        All are taken before a node is made: to take one may prune nodes that no page or request keeps in the tree.
        """
        taken = [group.pool.take(len(pages)) for group, pages in zip(tree.groups, wanted)]
        left = [iter(pages.tolist()) for pages in taken]
        node, whole = tree.root, True
        for page, key in enumerate(keys):
            node = tree.child(node, key)
            for i in range(len(tree.groups)):
                whole = whole and (page not in wanted[i] or self._read_page(tree, node, i, next(left[i])))
            if not whole:
                break
        for group, pages in zip(tree.groups, taken):
            group.pool.give(pages)
        tree.prune(node)
        return whole

    def _read_page(self, tree: PrefixCache, node: Node, group: int, page: int) -> bool:
        """Read a node's page of one group; False where the file is of no use, and there no more."""
        rows = self._disk.read(node.digest, group)
        if rows is None:
            return False
        if not self._rows.write_page(group, page, rows):
            self._disk.discard(node.digest, group)
            return False
        tree.own(node, group, page)
        self._restored += 1
        return True


def digest_of(parent: bytes, key: Key) -> bytes:
    """The name of a page on disk: a hash of what it holds and of the name of the page before."""
    tokens, hint = key
    return hashlib.sha256(parent + tokens + hint.to_bytes(8, "little")).digest()
