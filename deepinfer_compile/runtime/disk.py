"""Cache pages in a folder, so that a new process finds what an earlier one computed.

Pages of a cache group that hang on one another lie in one file (`disk_files.py`), up to 16 of them and about a
megabyte, named by hashes of the model and of all tokens up to each page's end. It is written to a temporary name of its
own and renamed, so that no reader sees half of one; pages leave it from its end on. A page that is not what it says is
deleted and counted, a file that cannot be read, written or deleted is a failure of the disk: the page is then computed
again. So nothing that the disk does later stops a request.

Each page is kept until a time that its users set, the latest counts. That is its file's time of modification, since a
file's times change in place, and in one step; its time of access is when it was last used. Where pages of a file are
not kept equally long any more, since others go on with its first ones, it becomes two. No file is believed that claims
more than the longest time in use, so one that was copied without its times is gone at worst.

The files of all models in a folder share its capacity. Expired pages go first, then ends of what was not used for the
longest time. Files that are not named like ours are left alone. Several processes may use one folder; each sees what
was there when it began and what it wrote itself. Folders are made for their owner alone, since cache rows tell what was
said; checksums detect damage, not malice.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime import disk_files
from deepinfer_compile.runtime.disk_files import NAMES, key_of, name_of
from deepinfer_compile.runtime.disk_index import DiskIndex, Found, PageFile
from deepinfer_compile.runtime.disk_reading import Page, Span
from deepinfer_compile.runtime.page_rows import Form, PageRows

ABANDONED = 3600.0
"""Seconds after which a temporary file belongs to a process that was killed."""
APART = 3600.0
"""Seconds that pages of a file may be kept longer than others before it becomes two."""
WEEK = 7 * 86400.0


class DiskPages:
    """Pages of one model in a folder of at most `capacity` bytes.

    identity: of everything beside the tokens that decides a page's contents. longest: seconds that any page is kept
    after its last use. spans: per cache group, how many pages before the one that is computed next must be there, None
    for all of them. clock: seconds since 1970.
    undated: what `date` has to do. damaged: pages that could not be used. failures: files that could not be read,
    written or deleted; error: the last of them in words. evictions, expired: pages deleted for their place, and for
    their time.
    Raises BadOption for a folder that cannot be made or read.
    """

    def __init__(
        self,
        folder: Path,
        identity: str,
        capacity: int,
        *,
        longest: float = WEEK,
        spans: Sequence[int | None] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder, self._capacity, self._longest = folder, capacity, longest
        self._spans, self.clock = tuple(spans), clock
        self.damaged = self.failures = self.evictions = self.expired = 0
        self.error = ""
        self._index = DiskIndex()
        self._lock = threading.Lock()
        self.undated: dict[PageFile, None] = {}
        self.adopt(identity)
        try:
            self._scan()
            self._make_home()
        except OSError as err:
            fix = "give a folder that this process may write to"
            raise BadOption(name="prefix_cache_folder", value=str(folder), reason=str(err), fix=fix) from None

    def adopt(self, identity: str) -> None:
        """From now on pages are those of another model."""
        self.root = hashlib.sha256(identity.encode()).digest()
        self._own = self.root.hex()[:32]

    def __len__(self) -> int:
        return self._index.pages

    @property
    def size(self) -> int:
        """Bytes of all files known."""
        return self._index.size

    def has(self, digest: bytes, group: int) -> bool:
        """Whether a page is in a file, and is still kept."""
        return self.sizes([(digest, group)])[0] > 0

    def have(self, digests: Sequence[bytes], groups: int) -> NDArray[np.bool_]:
        """The same for each page and group, [digests, groups]."""
        now, none, there = self.clock(), dict[int, tuple[PageFile, int]](), list[dict[int, tuple[PageFile, int]]]()
        for digest in digests:
            entry = self._index.get(key_of(self._own, digest))
            there.append(entry.places if entry is not None and entry.until > now else none)
        found: NDArray[np.bool_] = np.zeros((len(digests), groups), dtype=bool)
        for group in range(groups):
            found[:, group] = [group in places for places in there]
        return found

    def sizes(self, pages: Sequence[Page]) -> list[int]:
        """Bytes of pages, 0 where there is none that is still kept."""
        now, found = self.clock(), list[int]()
        for digest, group in pages:
            entry = self._index.get(key_of(self._own, digest))
            place = entry.places.get(group) if entry is not None and entry.until > now else None
            found.append(place[0].stride if place is not None else 0)
        return found

    def plan(self, pages: Iterable[Page]) -> list[Span]:
        """In which files pages are, those that lie one behind the other together. Without those that are not there."""
        found = list[Span]()
        for digest, group in pages:
            entry = self._index.get(key_of(self._own, digest))
            file, number = entry.places.get(group, (None, 0)) if entry is not None else (None, 0)
            last = found[-1] if found else None
            if last is not None and last.file is file and last.first + len(last.digests) == number:
                last.digests.append(digest)
            elif file is not None:
                found.append(Span(file, number, [digest]))
        return found

    def expect(self, span: Span) -> None:
        """Pages are read soon: the disk may begin with them."""
        with suppress(OSError):  # for whoever reads them
            disk_files.expect(self.folder / span.file.name)

    def read_span(self, span: Span, into: Tensor) -> list[PageRows]:
        """Read pages that lie one behind the other, up to the first that is damaged or gone, which is there no more
        then, and with it those behind it. Several threads may read at once, while nothing else happens here; `touch`
        what was read.

        into: u8[pages, stride], contiguous, on the host, for their bytes. Those of `PageRows` are its rows.
        """
        file = span.file
        try:
            form, count = disk_files.read_pages(self.folder / file.name, file, span.first, span.digests, into)
        except FileNotFoundError:
            with self._lock:
                self._lose(span.digests[0], file.group)
            return []
        except OSError as error:
            with self._lock:
                self._fail(error)
            return []
        if count < len(span.digests):
            with self._lock:
                self.discard(span.digests[count], file.group)
        return [PageRows(form, rows) for rows in into[:count]] if form is not None else []

    def write_run(
        self,
        digests: Sequence[bytes],
        group: int,
        form: Form,
        content: Tensor,
        parent: bytes = b"",
        until: float | None = None,
    ) -> None:
        """Keep pages, each of which hangs on the one before, until then, by default as long as any is kept.

        content: u8[pages, bytes], contiguous and on the host; 1 to `disk_files.MOST` pages. parent: the page without
        which nobody finds the first, if there is such a page. Where that is gone, or there is no room but for pages
        that were used later, none is kept.
        """
        keys, above = [key_of(self._own, one) for one in digests], key_of(self._own, parent) if parent else ""
        until = self.clock() + self._longest if until is None else until
        self.expire()
        if above and above not in self._index:
            return
        for key in keys:
            self._settle(self._index.remove_page(key, group))
        line, view = disk_files.line_of(form), memoryview(content.numpy().reshape(-1).data)
        parts = [view[i * form.size : (i + 1) * form.size] for i in range(len(digests))]
        head = disk_files.head_of(line, digests, parts)
        name = name_of(self._own, group, len(head), form.size, above, keys)
        file = PageFile(name, group, above, len(head), form.size, keys)
        until = max([until, *(entry.until for key in keys if (entry := self._index.get(key)) is not None)])
        if self._make_room(file.size, keys, above) and self._put(file, (head, view), until):
            self._index.add(file, until)

    def _put(self, file: PageFile, content: Iterable[bytes | memoryview], until: float) -> bool:
        """Write a file; whether it is there."""
        draft = self.folder / self._own / f"{secrets.token_hex(16)}.pages.tmp"
        try:
            self._make_home()
            with draft.open("wb", buffering=0) as to:
                for part in content:
                    while part:  # a call may take less than all
                        part = memoryview(part)[to.write(part) :]
            self._date(draft, until)
            draft.replace(self.folder / file.name)
            return True
        except OSError as error:
            self._fail(error)
        with suppress(OSError):  # never made, perhaps
            draft.unlink()
        return False

    def touch(self, digests: Sequence[bytes], until: float) -> None:
        """Pages are used now, and kept until then if not longer. Those that are not there are left out. Other
        processes hear of it through the times of files, which they get with the next call of `date`."""
        for digest in digests:
            key = key_of(self._own, digest)
            with self._lock:
                if (entry := self._index.get(key)) is not None:
                    self._index.touch(key, until)
                    for file, _ in entry.places.values():
                        self.undated[file] = None

    def date(self, most: int | None = None) -> None:
        """Tell other processes what was used, so many files of it at most; where they do not hear of it, they delete it
        earlier."""
        for _ in range(len(self.undated) if most is None else min(most, len(self.undated))):
            file, _ = self.undated.popitem()
            if file.pages:
                untils = [self._until(key) for key in file.pages]
                cut = next((i for i, until in enumerate(untils) if until + APART < untils[0]), 0)
                with suppress(OSError):
                    if cut:
                        self._split(file, cut, max(untils[cut:]))
                    self._date(self.folder / file.name, max(untils[: cut or None]))

    def _split(self, file: PageFile, cut: int, until: float) -> None:
        """Have the pages of a file from a number on in one of their own, which is kept until then."""
        with (self.folder / file.name).open("rb") as source:
            head, size = source.read(file.head), file.stride
            source.seek(file.head + cut * size)
            content = memoryview(source.read(size * (len(file.pages) - cut)))
        line, keys = head[: head.find(b"\n") + 1], file.pages[cut:]
        names = [head[len(line) + 2 * disk_files.SUM * i :][: disk_files.SUM] for i in range(cut, len(file.pages))]
        pages = [content[i * size : (i + 1) * size] for i in range(len(keys))]
        head = disk_files.head_of(line, names, pages)
        right = len(content) == size * len(keys) and [key_of(file.name[:32], name) for name in names] == keys
        if not right or self._index.size + len(head) > self._capacity:
            return
        above = file.pages[cut - 1]
        name = name_of(file.name[:32], file.group, len(head), file.stride, above, keys)
        new = PageFile(name, file.group, above, len(head), file.stride, keys)
        if self._put(new, (head, content), until):
            self._index.move(file, cut, new)
            self._settle([file])

    def expire(self) -> float:
        """Delete what is kept no more; the seconds until there may be more of it."""
        while key := self._index.expired(self.clock()):
            self.expired += self._delete(key)
        return self._index.deadline() - self.clock()

    def trim(self, digest: bytes) -> None:
        """Delete a page, and those above it, that no request can start after."""
        self._trim(key_of(self._own, digest))

    def _trim(self, key: str) -> None:
        entry = self._index.get(key)
        while entry is not None and not entry.children and not self._leads(key):
            self.evictions += self._delete(key)
            key = entry.parent
            entry = self._index.get(key)

    def discard(self, digest: bytes, group: int) -> None:
        """Delete a page that could not be used, if it is there."""
        self.damaged += self._lose(digest, group)

    def remove(self, digest: bytes) -> None:
        """Delete a page in all groups, if it is there, and all that hang on it."""
        self._delete(key_of(self._own, digest))

    def clear(self) -> None:
        """Delete all pages of this model, those of other processes too."""
        for key in [key for key in self._index if key.startswith(self._own)]:
            self._delete(key)
        for path in (self.folder / self._own).glob("*"):
            if NAMES.fullmatch(f"{self._own}/{path.name}"):
                self._unlink(path)

    def _until(self, key: str) -> float:
        entry = self._index.get(key)
        return entry.until if entry is not None else 0.0

    def _leads(self, key: str) -> bool:
        """Whether a request may start after a node; of other models any may."""
        linked = None in self._spans and key.startswith(self._own)
        return not linked or self._index.leads(key, self._spans)

    def _make_home(self) -> None:
        (self.folder / self._own).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _date(self, path: Path, until: float) -> None:
        os.utime(path, ns=(int(self.clock() * 1e9), int(until * 1e9)))

    def _scan(self) -> None:
        """Take up what is there, and delete what nobody can use."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found, odd, latest = list[Found](), list[PageFile](), self.clock() + self._longest
        for file, held in disk_files.listed(self.folder, time.time() - ABANDONED):
            del file.pages[max(0, held.st_size - file.head) // file.stride :]
            found.append(Found(file, held.st_atime_ns, min(latest, held.st_mtime)))
            odd += [file] if file.size != held.st_size or not file.pages else []  # nobody cut it there
        self._settle({*odd, *self._index.load(found)})
        self.expire()
        for key in [key for key in self._index if key.startswith(self._own)]:
            self._trim(key)
        self._make_room(0, (), "")

    def _make_room(self, size: int, keys: Collection[str], above: str) -> bool:
        """Have room for so many bytes more of nodes that hang on another; False where they should not be kept."""
        if size > self._capacity:
            return False
        while self._index.size + size > self._capacity:
            victim = self._index.oldest()
            if victim == above or victim in keys:
                self._trim(victim)
                return False
            entry = self._index.get(victim)
            self.evictions += self._delete(victim)
            if entry is not None and entry.parent.startswith(self._own):
                self._trim(entry.parent)
        return not above or above in self._index

    def _lose(self, digest: bytes, group: int) -> bool:
        """A page is of no use: delete it, and what nobody finds without it. Whether it was there."""
        key = key_of(self._own, digest)
        entry = self._index.get(key)
        there = entry is not None and group in entry.places
        if group >= len(self._spans) or self._spans[group] is None:
            self._delete(key)
        elif entry is not None:
            self._settle(self._index.remove_page(key, group))
        return there

    def _delete(self, key: str) -> int:
        """Delete a node and all that hang on it; how many pages. What stays is not used by this process."""
        before = self._index.pages
        self._settle(self._index.remove(key))
        return before - self._index.pages

    def _settle(self, files: Iterable[PageFile]) -> None:
        """Have files hold what they should."""
        for file in files:
            path = self.folder / file.name
            if not file.pages:
                self._unlink(path)
                continue
            try:
                if path.stat().st_size > file.size:  # else another process has cut it
                    os.truncate(path, file.size)
                self._date(path, max(map(self._until, file.pages)))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._fail(error)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.error = str(error)
