"""What of the tree of cached pages is on disk: which are written when a request ends, and which a new one gets back.

Pages that a request needs are read from the moment it is queued, by threads (`disk_thread.py`), and it waits for them
when it would start; meanwhile others run, and start. Then they go into the pools, all of a group in one call since a
copy for each page and cache would take longer than the disk, and they are as idle there as if they had been there all
along, and the request looks for its hit. What waits in memory to go there is bounded, but for one
request. Copies between the pools and the host are made by the thread that runs the steps, since only it knows who holds
a page; what a long request leaves behind is copied over several steps, since others wait for them.

Of a window only the pages are written that a request needs which goes on after the prompt or after the answer, so with
windows a hit from disk ends at one of these. Pages are written from the start of a request on, and none after one that
was not: it would be of no use. What a request used is kept as long as its class says, from its end on.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, islice
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.disk_files import fits
from deepinfer_compile.runtime.disk_reading import Page, Reading
from deepinfer_compile.runtime.disk_thread import DiskThread
from deepinfer_compile.runtime.page_rows import Form, PageRows
from deepinfer_compile.runtime.prefix_runs import runs_of, spans_of
from deepinfer_compile.runtime.request import Request

if TYPE_CHECKING:
    from deepinfer_compile.runtime.prefix import PrefixCache, PrefixStats
    from deepinfer_compile.runtime.prefix_nodes import Node

COPIED = 64 << 20
"""Bytes of ended requests that each step copies for the disk, about, while there are other requests."""
STAGED = 1 << 30
"""Bytes read that may wait for their requests to start; the reading that crosses this is the last one begun."""
PATIENCE = 60.0
"""Seconds that a change of the model waits for what is queued for disk."""
FILE = 1 << 20
"""Bytes that a file should have at most: more make a disk no faster, and leave it later."""
NAMED = 256
"""Pages that are named and looked for together."""
TRIES = 2
"""How often pages are read for a request, of which some may leave the pools while it waits for others."""


class Rows(Protocol):
    """Access to the rows of pages, see `Executor`."""

    def page_form(self, group: int) -> Form: ...

    def read_pages(self, group: int, pages: Sequence[int]) -> Tensor: ...

    def host_memory(self, size: int) -> Tensor: ...

    def write_pages(self, group: int, pages: Sequence[int], rows: Sequence[PageRows]) -> int: ...


@dataclass
class Taken:
    """What a request got from disk. before: pages of the hit that it would have had without. read: bool[pages, groups],
    which were read, None for none. size: bytes of their rows."""

    before: int = 0
    read: NDArray[np.bool_] | None = None
    size: int = 0

    def count(self, group: int, first: int, end: int) -> int:
        """How many of the pages first..end of a group were read."""
        return 0 if self.read is None else int(self.read[first:end, group].sum())


class DiskTier:
    """Moves pages between the pools and a folder. rows: gets and puts what pages hold. keep: by the class of a request,
    seconds that its pages are kept there after their last use; those of a class with 0 are not written."""

    def __init__(self, disk: DiskPages, rows: Rows, keep: Mapping[str, float]) -> None:
        self._disk, self._rows, self._keep = disk, rows, keep
        self.work = DiskThread(disk, memory=rows.host_memory)
        rows.host_memory(1)  # made before a request waits for it
        self._restored = 0
        self._leaving: deque[Iterator[int]] = deque()
        self._readings: dict[Request, list[Reading]] = {}
        self._hungry: set[Request] = set()
        self._settled: dict[Request, Taken] = {}
        weakref.finalize(self, self.work.end).atexit = False

    @property
    def root(self) -> bytes:
        """What the names of all pages of this model begin from."""
        return self._disk.root

    @property
    def reading(self) -> bool:
        """Whether some request waits for pages."""
        return any(self.waits(request) for request in self._readings)

    def count(self, stats: PrefixStats) -> PrefixStats:
        """The counters with those of the disk."""
        disk = self._disk
        return replace(
            stats,
            restored=self._restored,
            damaged=disk.damaged,
            disk_dropped=self.work.dropped,
            disk_failures=disk.failures,
            disk_evictions=disk.evictions,
            disk_expired=disk.expired,
            disk_pages=len(disk),
            disk_bytes=disk.size,
        )

    def clear(self, identity: str) -> None:
        """Go over to another model, or delete all pages of this one if there is no identity."""
        self.drop_all()
        if not identity:
            self.work.empty()
        change = partial(self._disk.adopt, identity) if identity else self._disk.clear
        if not self.work.call(change, PATIENCE):
            self.work.give_up()

    def remove(self, node: Node) -> None:
        """Delete a page if it is there, and all that hang on it."""
        self.work.remove(node.digest)

    def store(self, tree: PrefixCache, path: list[Node], request: Request) -> None:
        """Have a request's full pages written, whose nodes nobody changes any more; see `pump`."""
        self.work.check()
        if self.work.off or self._keep[request.params.retention] <= 0:
            return
        until = self._until(request)
        ends = (len(path), min(len(path), (len(request.prompt) - 1) // PAGE_SIZE))
        self.work.touch((one.digest for one in reversed(path)), until)  # ends go before what they hang on
        self._leaving.append(self._write(tree, path, ends, until))

    def pump(self, most: float | None = None) -> None:
        """Copy about so many bytes of what is to be written (default: COPIED); the rest waits for the next call."""
        most = COPIED if most is None else most
        while self._leaving and most > 0:
            size = next(self._leaving[0], None)
            if size is None:
                self._leaving.popleft()
            most -= size or 0

    def _write(self, tree: PrefixCache, path: list[Node], ends: tuple[int, int], until: float) -> Iterator[int]:
        """Copy the pages that are not on disk, those of a file together and the first first; yields their bytes.

        A page may have left the pools meanwhile: then those that hang on it are of no use either.
        """
        spans = spans_of(tree.groups, path, ends, self.work.has)
        linked = any(group.reach is None for group in tree.groups)
        # without whole contexts pages do not hang on one another
        most = [fits(self._rows.page_form(i), FILE) if linked else 1 for i in range(len(tree.groups))]
        pages = sorted({page for each in spans for span in each for page in span})
        for _, together in groupby(pages, key=lambda page: page // max(most)):
            size, full, some = 0, False, list(together)
            runs, end = runs_of(tree.groups, path, spans, some, most, self.work.has)
            for i, run in runs:
                full = self.work.full
                if full:
                    break
                nodes = path[run.start : run.stop]
                content = self._rows.read_pages(i, [int(one.pages[i]) for one in nodes])
                above = path[run.start - 1].digest if linked and run.start else b""
                form = self._rows.page_form(i)
                self.work.write([one.digest for one in nodes], i, form, content, above, until)
                size += content.nbytes
            if full or end <= some[-1]:
                end = some[0] if full and not size else end
                self.work.dropped += len(path) - (some[0] if full else end)
                if end and linked:
                    self.work.trim(path[end - 1].digest)
                return
            yield size

    def _until(self, request: Request) -> float:
        """Until when the pages of a request are kept, if it is used now."""
        return self._disk.clock() + self._keep[request.params.retention]

    def expect(self, tree: PrefixCache, request: Request) -> None:
        """Begin to read what a request that is queued needs from disk, if there is room for it in memory."""
        known = request in self._settled or request in self._readings
        if not known and not self.work.off and self._staged() < STAGED:
            begin = time.perf_counter()
            request.spent(self._begin(tree, request, self._lacking(tree, request, {})) - begin)

    def waits(self, request: Request) -> bool:
        """Whether a request is known to wait, for its own pages or for room in memory to read them."""
        if self.work.off:
            return False
        under_way = not all(held.done for held in self._readings.get(request, ()))
        return under_way or (request in self._hungry and self._staged() >= STAGED)

    def ready(self, tree: PrefixCache, request: Request) -> bool:
        """Whether all that a waiting request gets from disk is in the pools, as it is from then on; see `expect`.

        Pages that the pools have no room for are not taken.
        """
        self.work.check()
        if request in self._settled:
            return True
        if self.waits(request):
            return False
        begin = time.perf_counter()
        readings = self._readings.get(request, [])
        came = {page: rows for held in readings for page, rows in held.rows.items()}
        more = self._lacking(tree, request, came) if self._may_lack(tree, request, readings) else []
        if more and not self.work.off:
            if readings or self._staged() < STAGED:
                request.spent(self._begin(tree, request, more) - begin)
            else:
                self._hungry.add(request)
                request.spent(time.perf_counter() - begin)
            return False
        self.drop(request)
        self._settled[request] = Taken(self._usable(tree, request) if came else 0)
        found = time.perf_counter()
        while came and not self._install(tree, request, came):
            pass
        read = time.perf_counter() - found + sum(held.seconds for held in readings) if readings else 0.0
        request.spent(found - begin, read)
        return True

    def taken(self, request: Request) -> Taken:
        """What was read for a request that waits."""
        return self._settled.get(request) or Taken()

    def drop(self, request: Request) -> None:
        """A request does not wait any more."""
        self._settled.pop(request, None)
        self._hungry.discard(request)
        for held in self._readings.pop(request, []):
            self.work.drop(held)

    def drop_all(self) -> None:
        """Begin anew with all requests that wait, and write nothing more of those that ended."""
        self._leaving.clear()
        for request in {*self._settled, *self._hungry, *self._readings}:
            self.drop(request)

    def _staged(self) -> int:
        return sum(held.size for readings in self._readings.values() for held in readings)

    def _usable(self, tree: PrefixCache, request: Request) -> int:
        """Pages of the hit that the pools make."""
        return tree.reach(tree.look(request)[1] >= 0)[0]

    def _lacking(self, tree: PrefixCache, request: Request, came: Container[Page]) -> list[Page]:
        """What of a longer hit is on disk, beside what came from there."""
        groups = len(tree.groups)
        missing = self._missing(
            tree, request, lambda names: self.work.have(names, groups) | _among(came, names, groups)
        )[1]
        return [page for pages in missing for page in pages.values() if page not in came]

    def _may_lack(self, tree: PrefixCache, request: Request, readings: Sequence[Reading]) -> bool:
        """Whether it is worth to look for more pages: not where all came, and the pools are as they were then."""
        last = readings[-1] if readings else None
        whole = last is not None and len(last.rows) == len(last.pages) and last.known is tree.look(request)[0]
        return len(readings) < TRIES and not whole

    def _begin(self, tree: PrefixCache, request: Request, pages: list[Page]) -> float:
        """Begin to read pages; when that was."""
        self._hungry.discard(request)
        if not pages:
            return time.perf_counter()
        reading = self.work.read(pages, self._until(request))
        reading.known = tree.look(request)[0]
        self._readings.setdefault(request, []).append(reading)
        return reading.began

    def _missing(
        self, tree: PrefixCache, request: Request, has: Callable[[list[bytes]], NDArray[np.bool_]]
    ) -> tuple[int, list[dict[int, Page]]]:
        """How many pages a longer hit has with those of another place, 0 where there is none, and per group the pages
        from there by number. has: which of some pages, by their names, are there: [names, groups]."""
        (nodes, held), asked = tree.look(request), tree.asked(request)
        none = [dict[int, Page]() for _ in tree.groups]
        there = np.zeros((asked.count, len(tree.groups)), bool)
        there[: len(nodes)] = held >= 0
        known = tree.reach(there)[0]
        if known == asked.count:
            return 0, none
        found, whole = there.copy(), [group.reach is None for group in tree.groups]
        for start in range(0, asked.count, NAMED):
            part = found[start : start + NAMED]
            if not part.all():
                end = start + len(part)
                names = asked.names(end, (node.digest for node in nodes), self.root)
                part |= has(names[start:end])
            if not part[:, whole].all():
                break  # no hit is longer
        usable = tree.reach(found)[0]
        if usable <= known:
            return 0, none
        names, firsts = asked.digests, [group.first(usable * PAGE_SIZE) for group in tree.groups]
        lacking = [(first + np.flatnonzero(~there[first:usable, i])).tolist() for i, first in enumerate(firsts)]
        return usable, [{page: (names[page], i) for page in pages} for i, pages in enumerate(lacking)]

    def _install(self, tree: PrefixCache, request: Request, came: dict[Page, PageRows]) -> bool:
        """Put what came into the pools; False if a page turned out to be of no use, and is there no more."""
        usable, wanted = self._missing(tree, request, lambda names: _among(came, names, len(tree.groups)))
        held = [pages[pages >= 0] for pages in tree.look(request)[1].T]
        for group, pages in zip(tree.groups, held):
            group.pool.share(pages)
        fits = all(len(missing) <= group.pool.free for group, missing in zip(tree.groups, wanted))
        done = not usable or not fits or self._fill(tree, request, usable, wanted, came)
        for group, pages in zip(tree.groups, held):
            group.pool.give(pages)
        return done

    def _fill(
        self,
        tree: PrefixCache,
        request: Request,
        end: int,
        wanted: list[dict[int, Page]],
        came: dict[Page, PageRows],
    ) -> bool:
        """Fill the wanted pages of each group, of a hit of so many, which are idle afterwards, and note them. Where one
        is of no use, it is there no more, those from its number on are not taken, and this is False.

        All are taken before a node is made: to take one may prune nodes that no page or request keeps in the tree.
        """
        taken = [group.pool.take(len(pages)) for group, pages in zip(tree.groups, wanted)]
        places = [dict(zip(pages, each.tolist())) for pages, each in zip(wanted, taken)]
        bad = list[Page]()
        for i, pages in enumerate(wanted):
            count = self._rows.write_pages(i, list(places[i].values()), [came[page] for page in pages.values()])
            number = next(islice(pages, count, None), end)
            if number < end:
                end, bad = number, [pages[number]]
        path = self._grown(tree, request, end)
        settled = self._settled[request]
        if settled.read is None:
            settled.read = np.zeros((tree.asked(request).count, len(tree.groups)), dtype=bool)
        for i, pages in enumerate(wanted):
            there = [number for number in pages if number < end]
            for number in there:
                tree.own(path[number], i, places[i][number])
            new = np.count_nonzero(~settled.read[there, i])
            settled.size += int(new) * (came[pages[there[0]]].nbytes if there else 0)
            settled.read[there, i] = True
            self._restored += len(there)
        for group, each in zip(tree.groups, taken):
            group.pool.give(each)
        if path:
            tree.prune(path[-1])
            tree.trails.add(tree.asked(request).tokens, (), path)
        for page in bad:
            del came[page]
            self.work.discard(*page)
        return not bad

    def _grown(self, tree: PrefixCache, request: Request, count: int) -> list[Node]:
        """The nodes of a request's first pages, made where there are none."""
        path, asked = tree.walk(request)[:count], tree.asked(request)
        for page in range(len(path), count):
            path.append(tree.child(path[-1] if path else tree.root, asked.key(page), asked.digests[page]))
        return path


def _among(came: Container[Page], names: list[bytes], groups: int) -> NDArray[np.bool_]:
    """Which pages came: [names, groups]."""
    found = np.zeros((len(names), groups), dtype=bool)
    for i in range(groups):
        found[:, i] = [(name, i) in came for name in names]
    return found
