"""The threads that read and write the pages of a folder, so that no step waits for a disk.

Reads go before everything else, since a request waits for them; writes, touches and deletions keep their order. Only
one thread changes the folder and its index, but for others that help it with a long reading and end with that; all
others ask what is there. What waits to be written is bounded: a page that finds the queue full is not written, and
counted. A page that waits is there already for whoever looks for it.

A disk that fails is not tried again: from then on nothing is there and nothing is written, and `check` says so once, in
the thread that runs the steps. The thread ends with its owner, with `close`, or with the interpreter, which waits a
limited time for what is queued.

Python runs one thread at a time, and a loop over the thousands of pages of a long request would stop the thread that
runs the steps for as long as it takes. So such loops are cut, and others go on between the parts.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.disk import DiskPages, space
from deepinfer_compile.runtime.disk_reading import Page, Reading
from deepinfer_compile.runtime.page_rows import PageRows, pieces

QUEUED = 1 << 30
"""Bytes that may wait to be written; the page that crosses this is the last one taken."""
EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for what is queued."""
READERS = 8
"""Threads that read the pages of a request, most of whose time is the system's and the checksum's."""
FEW = 16
"""Pages for which another thread is not worth its start."""
PART, PAUSES, PAUSE = 64, 4, 0.0005
"""Pages of a loop that others wait for; and how often they get so many seconds before it goes on."""
LATE = 5.0
"""Seconds after which files get their times although there is more to do."""
HOUR = 3600.0
SILENCE = 30.0
"""Seconds without a page after which a disk that is read counts as failed."""

Job = Callable[[], None]


class DiskThread:
    """Jobs on the pages of a folder. most: bytes that may wait to be written.

    dropped: pages that were not written because the queue was full, or not emptied in time. off: nothing is read or
    written any more. `flush`, `close`, `wake` and `end` are for any thread, the others for the one that runs the steps.
    """

    def __init__(self, disk: DiskPages, most: int = QUEUED) -> None:
        self._disk, self.most = disk, most
        self.dropped = 0
        self.off = False
        self._lock = threading.Lock()
        self._waiting: dict[Page, Mapping[str, Tensor]] = {}
        self._bytes = 0
        self._gone: dict[bytes, int] = {}
        self._live: set[Reading] = set()
        self._reads: deque[Job] = deque()
        self._jobs: deque[Job | None] = deque()
        self._tokens: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None
        self._silent = self._told = self._closed = self._hurry = False
        self._dated = time.monotonic()

    @property
    def full(self) -> bool:
        """Whether a page would not be taken now."""
        return self._bytes >= self.most

    @property
    def queued(self) -> int:
        """Bytes that wait to be written."""
        return self._bytes

    def has(self, digest: bytes, group: int) -> bool:
        """Whether a page is on disk, or about to be."""
        with self._lock:
            if self.off:
                return False
            page = digest, group
            return page in self._waiting or (digest not in self._gone and self._disk.has(digest, group))

    def have(self, digests: Sequence[bytes], groups: int) -> NDArray[np.bool_]:
        """Which pages are on disk, or about to be: [digests, groups]."""
        with self._lock:
            if self.off:
                return np.zeros((len(digests), groups), dtype=bool)
            found: NDArray[np.bool_] = self._disk.have(digests, groups)
            if self._gone:
                found[[digest in self._gone for digest in digests]] = False
            if self._waiting:
                for group in range(groups):
                    found[:, group] |= [(digest, group) in self._waiting for digest in digests]
            return found

    def write(self, digest: bytes, group: int, rows: Mapping[str, Tensor], parent: bytes, until: float) -> None:
        """Keep a page, whose tensors nobody changes any more, see `DiskPages`; drop it where the queue is full."""
        if self.off:
            return
        if self.full:
            self.dropped += 1
            return
        page, size = (digest, group), sum(held.nbytes for held in rows.values())
        with self._lock:
            self._waiting[page] = rows
            self._bytes += size
        self._post(lambda: self._write(page, rows, size, parent, until))

    def touch(self, digests: Iterable[bytes], until: float) -> None:
        """Pages are used now, and kept until then if not longer. digests: read later, in the thread."""
        left = iter(digests)
        self._post(lambda: self._touch(left, until))

    def trim(self, digest: bytes) -> None:
        """Delete a page, and those above it, that no request can start after."""
        self._post(lambda: self._disk.trim(digest))

    def read(self, pages: Sequence[Page], until: float) -> Reading:
        """Begin to read pages, which are kept until then if not longer."""
        reading = Reading(pages, self._disk.sizes(pages), time.perf_counter())
        if self.off or not pages:
            reading.done = True
            return reading
        self._live.add(reading)
        self._reads.append(lambda: self._read(reading, until))
        self._start()
        return reading

    def remove(self, digest: bytes) -> None:
        """Delete a page in all groups, and all that hang on it."""
        self._leave(digest, lambda: self._disk.remove(digest))

    def discard(self, digest: bytes, group: int) -> None:
        """Delete a page that could not be used."""
        self._leave(digest, lambda: self._disk.discard(digest, group))

    def empty(self) -> None:
        """Write nothing of what waits, and finish no reading."""
        with self._lock:
            self._waiting.clear()
        for reading in list(self._live):
            self.drop(reading)

    def drop(self, reading: Reading) -> None:
        """Nobody waits for a reading any more."""
        reading.dropped = True
        self._live.discard(reading)

    def flush(self, seconds: float) -> bool:
        """Wait until everything asked for so far has been done, at most so many seconds; whether it has."""
        if self._thread is None:
            return True
        return self.call(lambda: None, seconds)

    def call(self, action: Job, seconds: float) -> bool:
        """Do something in the thread after all that was asked for, and wait for it; whether it was done in time."""
        if self._closed:
            action()
            return True
        done = threading.Event()

        def act() -> None:
            try:
                self._disk.date()
                action()
            finally:
                done.set()

        self._hurry = True
        self._post(act)
        try:
            return done.wait(seconds)
        finally:
            self._hurry = False

    def close(self, seconds: float) -> bool:
        """Write what waits, at most so many seconds, then stop. Whether all was written; once more does nothing."""
        begin = time.monotonic()
        whole = self.flush(seconds)
        with self._lock:
            self.off = self._closed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()
        self.end()
        if self._thread is not None:
            self._thread.join(max(0.0, seconds - (time.monotonic() - begin)))
        return whole

    def end(self) -> None:
        """Stop when everything asked for has been done. Takes no lock, so it may run inside the garbage collector."""
        self._jobs.append(None)
        self._tokens.put(None)

    def check(self, now: float | None = None) -> None:
        """Warn once that the disk failed; fail it where it is silent. Raises, once, what else went wrong here."""
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault
        now = time.perf_counter() if now is None else now
        if any(not reading.done and now - reading.heard > SILENCE for reading in self._live):
            self.give_up()
        if self._told or not (self._silent or self._disk.failures):
            return
        self._told = True
        reason = self._disk.error or "it does not answer"
        text = f"the prefix cache goes on without its folder {self._disk.folder}, which fails ({reason}); "
        warnings.warn(text + "free or replace the disk, then load again", RuntimeWarning, stacklevel=2)

    def give_up(self) -> None:
        """Treat the disk as one that fails, since it does not answer."""
        self._silent = self.off = True

    def wait(self, seconds: float) -> None:
        """Wait until a reading has ended or `wake` is called, at most so many seconds."""
        try:
            self._news.get(timeout=seconds)
        except queue.Empty:
            return

    def wake(self) -> None:
        """End a `wait`. From any thread, also inside the garbage collector."""
        self._news.put(None)

    def _leave(self, digest: bytes, job: Job) -> None:
        """Do a job after which a page is not there. Nor is it from now on, for readings under way either."""
        with self._lock:
            for page in [page for page in self._waiting if page[0] == digest]:
                del self._waiting[page]
            self._gone[digest] = self._gone.get(digest, 0) + 1
            for reading in self._live:
                for page in [page for page in reading.pages if page[0] == digest]:
                    reading.rows.pop(page, None)

        def leave() -> None:
            try:
                job()
            finally:
                with self._lock:
                    self._gone[digest] -= 1
                    if not self._gone[digest]:
                        del self._gone[digest]

        self._post(leave)

    def _post(self, job: Job) -> None:
        if not self._closed:
            self._jobs.append(job)
            self._start()

    def _start(self) -> None:
        """Tell the thread of a job; start it with the first one."""
        self._tokens.put(None)
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="prefix cache on disk", daemon=True)
                self._thread.start()
                _LIVE.add(self)

    def _run(self) -> None:
        """Do jobs until there is an end among them."""
        while True:
            try:
                self._tokens.get(timeout=self._pause())
            except queue.Empty:
                self._date()
                continue
            job = self._reads.popleft() if self._reads else self._jobs.popleft()
            if not self._disk.undated:
                self._dated = time.monotonic()
            if job is None:
                self._disk.date()
                return
            try:
                job()
            except BaseException as error:  # for the thread that runs the steps, see `check`
                self._fault, self.off = error, True
            if self._disk.failures:
                self.off = True
            if time.monotonic() - self._dated > LATE:
                self._disk.date(PART)

    def _touch(self, left: Iterator[bytes], until: float) -> None:
        """Note that some pages are used; the others next, but after what is to be read."""
        some = list(islice(left, PART))
        self._disk.touch(some, until)
        if len(some) == PART:
            self._next(lambda: self._touch(left, until))
            self._let_others()

    def _next(self, job: Job) -> None:
        """Do a job before all others but readings. Only for this thread."""
        self._jobs.appendleft(job)
        self._tokens.put(None)

    def _date(self) -> None:
        """Give files their times until there is something else to do."""
        while self._disk.undated and self._tokens.empty():
            self._disk.date(PART)
            self._let_others()

    def _let_others(self) -> None:
        """Let other threads run, unless they wait for this one."""
        for _ in range(PAUSES):
            if not (self._reads or self._hurry):
                time.sleep(PAUSE)

    def _pause(self) -> float:
        """Delete what is kept no more; how long to wait for a job before there may be more of it."""
        left = self._disk.expire() if not self.off else HOUR
        return min(max(left, 1.0), HOUR if not self._disk.undated else 1.0)

    def _write(self, page: Page, rows: Mapping[str, Tensor], size: int, parent: bytes, until: float) -> None:
        try:
            with self._lock:
                wanted = self._waiting.get(page) is rows and not self.off
            if wanted:
                self._disk.write(*page, rows, parent, until)
        finally:
            with self._lock:
                self._bytes -= size
                if self._waiting.get(page) is rows:
                    del self._waiting[page]

    def _read(self, reading: Reading, until: float) -> None:
        """Read pages with several threads, which end before this does. Raises what went wrong in the first of them."""
        left, faults = iter(zip(reading.pages, pieces(map(space, reading.sizes)), strict=True)), list[BaseException]()
        given = reading, left, faults
        helpers = [
            threading.Thread(target=self._read_pages, args=given, name="reads for the prefix cache", daemon=True)
            for _ in range(min(READERS - 1, len(reading.pages) // FEW))
        ]
        try:
            for one in helpers:
                one.start()
            self._read_pages(*given)
            for one in helpers:
                one.join()
        finally:
            reading.seconds = time.perf_counter() - reading.began
            reading.done = True
            self._news.put(None)
        used = iter(dict.fromkeys(page[0] for page in reading.read))
        self._next(lambda: self._touch(used, until))
        if faults:
            raise faults[0]

    def _read_pages(self, reading: Reading, left: Iterator[tuple[Page, Tensor]], faults: list[BaseException]) -> None:
        """Read what is left, which several threads share, until one of them fails."""
        try:
            for page, place in left:
                if reading.dropped or self.off or faults or self._disk.failures:
                    return
                self._read_page(reading, page, place)
                reading.heard = time.perf_counter()
        except BaseException as error:
            faults.append(error)

    def _read_page(self, reading: Reading, page: Page, place: Tensor) -> None:
        waiting, gone = self._waiting.get(page), page[0] in self._gone
        if waiting is not None:
            rows: PageRows | None = PageRows.of(waiting)
        else:
            rows = None if gone else self._disk.read(*page, place)
            if rows is not None:
                reading.read.append(page)
        with self._lock:
            if rows is not None and page[0] not in self._gone:
                reading.rows[page] = rows


_LIVE: weakref.WeakSet[DiskThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for one in list(_LIVE):
        one.close(max(0.0, end - time.monotonic()))
