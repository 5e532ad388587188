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
from itertools import chain, islice, repeat, takewhile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.disk_reading import Page, Reading, Span, memory_of, together
from deepinfer_compile.runtime.page_rows import Form, PageRows, host_memory

QUEUED = 1 << 30
"""Bytes that may wait to be written; the page that crosses this is the last one taken."""
EXIT_SECONDS = 5.0
"""How long the interpreter's exit waits for what is queued."""
READERS = 8
"""Threads that read the pages of a request, most of whose time is the system's and the checksum's."""
PART, PAUSES, PAUSE = 64, 4, 0.0005
"""Pages of a loop that others wait for; and how often they get so many seconds before it goes on."""
LATE = 5.0
"""Seconds after which files get their times although there is more to do."""
HOUR = 3600.0
SILENCE = 30.0
"""Seconds without a page after which a disk that is read counts as failed."""

Job = Callable[[], None]


class DiskThread:
    """Jobs on the pages of a folder. most: bytes that may wait to be written. memory: gives so many bytes on the host,
    into which pages are read.

    dropped: pages that were not written because the queue was full, or not emptied in time. off: nothing is read or
    written any more. `flush`, `close`, `wake` and `end` are for any thread, the others for the one that runs the steps.
    """

    def __init__(self, disk: DiskPages, most: int = QUEUED, memory: Callable[[int], Tensor] = host_memory) -> None:
        self._disk, self.most, self._memory = disk, most, memory
        self.dropped = 0
        self.off = False
        self._lock = threading.Lock()
        self._waiting: dict[Page, PageRows] = {}
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

    def write(
        self, digests: Sequence[bytes], group: int, form: Form, content: Tensor, parent: bytes, until: float
    ) -> None:
        """Keep pages that nobody changes any more, see `DiskPages.write_run`; drop them where the queue is full."""
        if self.off:
            return
        if self.full:
            self.dropped += len(digests)
            return
        run = {(digest, group): PageRows(form, held) for digest, held in zip(digests, content)}
        with self._lock:
            self._waiting |= run
            self._bytes += content.nbytes
        self._post(lambda: self._write(run, content, parent, until))

    def touch(self, digests: Iterable[bytes], until: float) -> None:
        """Pages are used now, and kept until then if not longer. digests: read later, in the thread."""
        left = iter(digests)
        self._post(lambda: self._touch(left, until))

    def trim(self, digest: bytes) -> None:
        """Delete a page, and those above it, that no request can start after."""
        self._post(lambda: self._disk.trim(digest))

    def read(self, pages: Sequence[Page], until: float) -> Reading:
        """Begin to read pages, which are kept until then if not longer."""
        reading = Reading(pages, sum(self._disk.sizes(pages)), time.perf_counter())
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

    def _write(self, run: Mapping[Page, PageRows], content: Tensor, parent: bytes, until: float) -> None:
        """Write pages of a run, up to the first that nobody wants any more."""
        try:
            with self._lock:
                wanted = [] if self.off else list(takewhile(lambda page: self._waiting.get(page) is run[page], run))
            if wanted:
                digests, group, form = [digest for digest, _ in wanted], wanted[0][1], run[wanted[0]].form
                self._disk.write_run(digests, group, form, content[: len(wanted)], parent, until)
        finally:
            with self._lock:
                self._bytes -= content.nbytes
                for page, rows in run.items():
                    if self._waiting.get(page) is rows:
                        del self._waiting[page]

    def _read(self, reading: Reading, until: float) -> None:
        """Read pages with several threads. Raises what went wrong in the first of them."""
        fault = None
        try:
            with self._lock:
                waiting = {page: rows for page in reading.pages if (rows := self._waiting.get(page)) is not None}
                reading.rows |= waiting
            spans = self._disk.plan(page for page in reading.pages if page not in waiting)
            ahead = chain(spans[READERS:], repeat(None))
            left = iter(zip(spans, memory_of(spans, self._memory), ahead))
            others = min(READERS, len(spans)) - 1
            fault = together(lambda: self._read_next(reading, left), others, "reads for the prefix cache")
        finally:
            reading.seconds = time.perf_counter() - reading.began
            reading.done = True
            self._news.put(None)
        used = iter(dict.fromkeys(page[0] for page in reading.read))
        self._next(lambda: self._touch(used, until))
        if fault is not None:
            raise fault

    def _read_next(self, reading: Reading, left: Iterator[tuple[Span, Tensor, Span | None]]) -> bool:
        """Read the next span of what is left, which several threads share, while the disk begins with a later one;
        whether there was one to read."""
        span, into, later = next(left, (None, None, None))
        if span is None or into is None or reading.dropped or self.off or self._disk.failures:
            return False
        if later is not None:
            self._disk.expect(later)
        came = {(digest, span.file.group): rows for digest, rows in zip(span.digests, self._disk.read_span(span, into))}
        reading.read += came
        with self._lock:
            reading.rows |= {page: rows for page, rows in came.items() if page[0] not in self._gone}
        reading.heard = time.perf_counter()
        return True


_LIVE: weakref.WeakSet[DiskThread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    end = time.monotonic() + EXIT_SECONDS
    for one in list(_LIVE):
        one.close(max(0.0, end - time.monotonic()))
