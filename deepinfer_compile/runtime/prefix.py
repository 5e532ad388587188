"""Which full cache pages hold which tokens, so that a request starts after the pages its prompt shares with others.

What a page's rows depend on is all tokens up to its end; and, where rotary frequencies depend on the length of the
prompt, that length. So pages are found in a tree: a node is one page of tokens after the tokens of its parent, looked
up by those tokens themselves. A hash that two contents share costs a comparison and can never give a wrong page.

A node has a page in every cache group that still holds its rows. A request that starts at a position needs all pages
before it in groups that keep the whole context, and in a window group those that the window reaches. Rows of a window
layer depend, through the layers below, on more than one window, so they are never made from a window's tokens alone:
a hit ends where every group has what it needs, and what only some groups hold is computed again (`recomputed`).

A page enters the tree when the step that filled it has succeeded, and leaves it when it is needed for other tokens,
was idle for longer than the time to live, or the request that wrote it was failed by the model. Newest tokens that
`backtrack` allows to be dropped again are not in it. A page that fills with what the tree holds already is exchanged
for the one in the tree.

Where the layers above a boundary run on the last rows of a prompt alone (`kept.py`), a window group's page before these
lacks their rows, so it does not enter the tree. A request that goes on from a hit reads windows that begin where those
of the request before began: an approximation as good as the one that it was built with.

Reuse is the default: rows are taken only where all that decides them is equal, so tokens differ no more than they do
when a prompt is read in other chunks or beside other requests, which is by rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.kept import first_kept
from deepinfer_compile.runtime.pages import Ints, Pages
from deepinfer_compile.runtime.prefix_disk import DiskTier, Taken
from deepinfer_compile.runtime.prefix_keys import Asked, Key, digest_of, page_key
from deepinfer_compile.runtime.prefix_nodes import Node, NodePages, Trails
from deepinfer_compile.runtime.request import Request

Seen = tuple[int, int, list[Node], NDArray[np.int32]]
"""When a request was looked up, in changes of the tree, with how many tokens, and what was found; see `look`."""
NEVER = 1 << 62
"""Full pages of a seat that has nothing to add to the tree."""


@dataclass
class PrefixStats:
    """What the cache did so far, and holds now.

    queries, hits: requests that looked for a prefix, and found one; a preempted one looks again. queried_tokens,
    hit_tokens: tokens of their prompts (and outputs, when preempted), and those that were not computed again.
    recomputed: tokens that were, although a cache group still had their rows. evictions: pages that were needed for
    others. expired: pages idle for too long. cached: idle pages with rows now, a number per cache group.
    restored: pages taken from disk. damaged: pages there that could not be used. disk_dropped: pages that were not
    written because too many waited for it. disk_failures: pages that could not be read, written or deleted; the disk
    is not used after the first. disk_evictions, disk_expired: pages deleted for their place, and because none of their
    users needs them any more. disk_pages, disk_bytes: what is there now.
    """

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    recomputed: int = 0
    evictions: int = 0
    expired: int = 0
    cached: tuple[int, ...] = ()
    restored: int = 0
    damaged: int = 0
    disk_dropped: int = 0
    disk_failures: int = 0
    disk_evictions: int = 0
    disk_expired: int = 0
    disk_pages: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class Hit:
    """Where a request can start. nodes: the pages before. pages: per cache group, those it must hold. known: how many
    pages of tokens the groups with whole contexts hold."""

    nodes: list[Node]
    pages: list[NDArray[np.int32]]
    known: int

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return len(self.nodes) * PAGE_SIZE


class PrefixCache:
    """The tree of kept pages of all cache groups.

    reads_hint: rows depend on the length of the prompt, see `StepInput.context_hint`. keep: rows at the end of a prompt
    of which windows are whole, 0 for all. time_to_live: seconds. disk: where pages outlive the process.
    """

    def __init__(
        self,
        pages: Pages,
        *,
        seats: int,
        backtrack: int = 0,
        reads_hint: bool = True,
        keep: int = 0,
        time_to_live: float = 180.0,
        disk: DiskTier | None = None,
    ) -> None:
        self.groups = pages.groups
        self._pages = pages
        self._backtrack, self._keep = backtrack, keep
        self._reads_hint, self._time_to_live = reads_hint, time_to_live
        self._stats = PrefixStats()
        self.disk = disk
        self._asked: WeakKeyDictionary[Request, Asked] = WeakKeyDictionary()
        self._seen: WeakKeyDictionary[Request, Seen] = WeakKeyDictionary()
        self._noted = np.zeros(seats, dtype=np.int64)
        for i, group in enumerate(self.groups):
            group.pool.lost = partial(self._evict, i)
        self.reset()

    @property
    def stats(self) -> PrefixStats:
        """Counters since the beginning, as they are now."""
        found = replace(self._stats, cached=self._pages.cached)
        return self.disk.count(found) if self.disk is not None else found

    def reset(self) -> None:
        """Begin with an empty tree; the pools have been reset too."""
        if self.disk is not None:
            self.disk.drop_all()
        root = self.disk.root if self.disk is not None else b""
        self._table, self.trails = NodePages(len(self.groups)), Trails()
        self.root = Node(None, (b"", 0), self._table, root)
        self.owners: list[dict[int, Node]] = [{} for _ in self.groups]
        self._asked.clear()
        self._seen.clear()
        self._tip = [self.root] * len(self._noted)
        self._path = [list[Node]() for _ in self._noted]
        self._noted.fill(0)

    def clear(self, identity: str = "") -> None:
        """Forget all rows. Running requests go on, and what they hold is not reused.

        identity: of the model from now on, whose pages on disk stay; without it, there is none on disk any more.
        """
        if self.disk is not None:
            self.disk.clear(identity)
        for group, owners in zip(self.groups, self.owners):
            for page in owners:
                group.pool.forget(page)
        self.reset()
        self._noted.fill(NEVER)

    def expect(self, request: Request) -> None:
        """Begin to read from disk what a request that is queued needs."""
        if self.disk is not None:
            self.disk.expect(self, request)

    def waits(self, request: Request) -> bool:
        """Whether a request is known to wait for pages from disk."""
        return self.disk is not None and self.disk.waits(request)

    def ready(self, request: Request) -> bool:
        """Whether nothing is on its way from disk any more that a waiting request would take."""
        return self.disk is None or self.disk.ready(self, request)

    def drop(self, request: Request) -> None:
        """A request does not wait any more."""
        if self.disk is not None:
            self.disk.drop(request)

    def find(self, request: Request) -> Hit:
        """The longest start of a request that is cached; its last token never is."""
        begin = time.perf_counter()
        self._expire()
        nodes, held = self.look(request)
        usable, known = self.reach(held >= 0)
        pages = [held[group.first(usable * PAGE_SIZE) : usable, i].copy() for i, group in enumerate(self.groups)]
        nodes = nodes[:usable]
        request.spent(time.perf_counter() - begin)
        return Hit(nodes, pages, known)

    def is_coming(self, request: Request, hit: Hit, others: Iterable[Request]) -> bool:
        """Whether one of the `others`, which run, is about to fill the page that a request lacks first after a hit."""
        page, tip = len(hit.nodes), hit.nodes[-1] if hit.nodes else self.root
        if request.length <= (page + 1) * PAGE_SIZE:
            return False
        key, here = self._key(request, page), [one for one in others if self._tip[one.seat] is tip]
        return any(self._noted[one.seat] == page and self._key(one, page) == key for one in here)

    def join(self, seat: int, request: Request, hit: Hit | None) -> None:
        """Give a request that takes an empty seat the pages of a hit (None: it did not look for any)."""
        begin = time.perf_counter()
        self._join(seat, request, hit)
        request.spent(time.perf_counter() - begin)
        if request.timing is not None and not request.timing.first:
            request.timing.seated = time.perf_counter()

    def _join(self, seat: int, request: Request, hit: Hit | None) -> None:
        self._note_rows(request, hit)
        self._asked.pop(request, None)
        self._seen.pop(request, None)
        if self.disk is not None:
            self.disk.drop(request)
        self._tip[seat], self._noted[seat], self._path[seat] = self.root, 0, []
        if hit is None:
            return
        self._stats.queries += 1
        self._stats.hits += bool(hit.nodes)
        self._stats.queried_tokens += request.length
        self._stats.hit_tokens += hit.tokens
        self._stats.recomputed += (hit.known - len(hit.nodes)) * PAGE_SIZE
        if not hit.nodes:
            return
        for group, pages in zip(self.groups, hit.pages):
            group.adopt(seat, group.first(hit.tokens), pages)
        self._path[seat] = hit.nodes.copy()
        self._move(seat, hit.nodes[-1], len(hit.nodes))

    def _note_rows(self, request: Request, hit: Hit | None) -> None:
        """Note where the rows before a request's first token come from."""
        timing = request.timing
        if timing is None or timing.first:
            return
        nodes = hit.nodes if hit is not None else []
        taken = self.disk.taken(request) if self.disk is not None else Taken()
        end, size = len(nodes), 0
        for i, group in enumerate(self.groups):
            first = group.first(end * PAGE_SIZE)
            size += group.bytes_per_page * (end - first - taken.count(i, first, end))
        timing.ram_rows = PAGE_SIZE * (min(taken.before, end) if taken.size else end)
        timing.disk_rows = PAGE_SIZE * end - timing.ram_rows
        timing.ram_bytes, timing.disk_bytes = size, taken.size
        timing.recomputed_rows = request.length - end * PAGE_SIZE

    def note(self, seats: Ints, done: Ints, request: Callable[[int], Request]) -> bool:
        """Add what has become full. done: written rows of each seat. Whether a table changed."""
        full = (done - self._backtrack) // PAGE_SIZE
        grown = np.flatnonzero(full > self._noted[seats])
        changed = False
        for i in grown.tolist():
            seat = int(seats[i])
            for page in range(int(self._noted[seat]), int(full[i])):
                changed |= self._add(seat, page, request(seat))
        return changed

    def store(self, request: Request) -> None:
        """Have written to disk what a request that ends leaves behind."""
        if self.disk is not None and self._noted[request.seat] != NEVER:
            self.disk.store(self, self._path[request.seat], request)

    def leave(self, seat: int, request: Request, *, failed: bool) -> None:
        """Note that a request gives its pages back. failed: they may hold wrong rows, so forget them."""
        path, self._path[seat] = self._path[seat], []
        if not failed:
            self.trails.add(request.prompt, request.output_ids, path)
        self._move(seat, self.root, 0)
        if not failed or not path:
            return
        if self.disk is not None:
            for node in path:
                self.disk.remove(node)
        self._forget_below(path[0])

    def _forget_below(self, top: Node) -> None:
        """Forget the rows of a node and of all below it; what running requests hold of them is not reused."""
        nodes = [top]
        for node in nodes:
            nodes += node.children.values()
        below = set(map(id, nodes))
        for seat, tip in enumerate(self._tip):
            if id(tip) in below:
                self._path[seat] = []
                self._move(seat, self.root, NEVER)
        for node in nodes:
            for i, page in enumerate(node.pages.tolist()):
                if page >= 0:
                    self._drop(i, page)

    def reach(self, there: NDArray[np.bool_]) -> tuple[int, int]:
        """How many pages a hit has, and how many the groups with whole contexts have. there: [pages, groups]."""
        end = np.arange(1, len(there) + 1)
        fits = np.empty_like(there)
        for i, group in enumerate(self.groups):
            held = end - np.maximum.accumulate(np.where(there[:, i], 0, end))
            first = 0 if group.reach is None else np.maximum(end * PAGE_SIZE - group.reach, 0) // PAGE_SIZE
            fits[:, i] = held >= end - first
        whole = [group.reach is None for group in self.groups]
        usable, known = (end[each.all(axis=1)].max(initial=0) for each in (fits, fits[:, whole]))
        return int(usable), int(known)

    def child(self, node: Node, key: Key, digest: bytes = b"") -> Node:
        """The node of a page after another, made if there is none. digest: its name, if it is known."""
        found = node.children.get(key)
        if found is None:
            if self.disk is not None and not digest:
                digest = digest_of(node.digest, key)
            found = node.children[key] = Node(node, key, self._table, digest)
        return found

    def asked(self, request: Request) -> Asked:
        """What a request's pages hold."""
        found = self._asked.get(request)
        if found is None or found.length != request.length:
            found = self._asked[request] = Asked.of(request, self._reads_hint)
        return found

    def walk(self, request: Request) -> list[Node]:
        """The nodes of a request's full pages, its last token's not among them."""
        asked = self.asked(request)
        first = self.root.children.get(asked.key(0)) if asked.count else None
        nodes = self.trails.follow(asked.tokens, first) if first is not None else []
        known = len(nodes)
        for page in range(known, asked.count if nodes else 0):
            node = nodes[-1].children.get(asked.key(page))
            if node is None:
                break
            nodes.append(node)
        if len(nodes) - known > self.trails.shortest:
            self.trails.add(asked.tokens, (), nodes.copy())
        return nodes

    def look(self, request: Request) -> tuple[list[Node], NDArray[np.int32]]:
        """The nodes that `walk` gives, and their pages, [nodes, groups], for nobody to change. While the tree stays as
        it is, nothing is looked up again."""
        seen, changes = self._seen.get(request), self._table.changes
        if seen is None or seen[:2] != (changes, request.length):
            nodes = self.walk(request)
            seen = self._seen[request] = changes, request.length, nodes, self._table.of(nodes)
        return seen[2:]

    def _key(self, request: Request, page: int) -> Key:
        return page_key(request, page, self._reads_hint)

    def _add(self, seat: int, page: int, request: Request) -> bool:
        """Move a seat's tip to its next full page. Whether a page was exchanged."""
        whole = not self._keep or page * PAGE_SIZE >= first_kept(len(request.prompt), self._keep)
        node = self.child(self._tip[seat], self._key(request, page))
        self._path[seat].append(node)
        self._move(seat, node, page + 1)
        changed = False
        for i, group in enumerate(self.groups):
            own, known = int(group.table[seat, page]), int(node.pages[i])
            if own < 0 or own == known:  # given back already, for a step that is under way
                continue
            if known >= 0:
                group.exchange(seat, page, known)
                changed = True
            elif whole or group.reach is None:
                self.own(node, i, own)
        return changed

    def own(self, node: Node, group: int, page: int) -> None:
        """A held page is the one of a node now."""
        self._table.put(node, group, page)
        self.owners[group][page] = node
        self.groups[group].pool.keep(page)

    def _move(self, seat: int, node: Node, noted: int) -> None:
        left = self._tip[seat]
        node.tips += 1
        left.tips -= 1
        self._tip[seat], self._noted[seat] = node, noted
        self.prune(left)

    def prune(self, node: Node) -> None:
        """Take a node that leads to nothing out of the tree, and those above it that then lead to nothing."""
        while node.parent is not None and not node.children and not node.tips and node.pages.max(initial=-1) < 0:
            if node.parent.children.get(node.key) is node:
                del node.parent.children[node.key]
                node.leave()
            node = node.parent

    def _drop(self, group: int, page: int) -> None:
        """Forget the rows of a page."""
        node = self.owners[group].pop(page)
        self._table.put(node, group, -1)
        self.groups[group].pool.forget(page)
        self.prune(node)

    def _evict(self, group: int, page: int) -> None:
        self._stats.evictions += 1
        self._drop(group, page)

    def _expire(self) -> None:
        """Forget pages that were idle for too long."""
        for i, group in enumerate(self.groups):
            idle, oldest = group.pool.idle, group.pool.clock() - self._time_to_live
            while (page := idle.before(oldest)) is not None:
                self._drop(i, page)
                self._stats.expired += 1
