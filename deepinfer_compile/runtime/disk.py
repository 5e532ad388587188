"""Cache pages in a folder, so that a new process finds what an earlier one computed.

A page is a safetensors file of its own for each cache group, named by a hash of the model and of all tokens up to the
page's end, and by the page it hangs on, beside a checksum of its contents. It is written to a temporary name of its own
and renamed, so that no reader sees half of one. A file that is not what it says is deleted and counted, one that cannot
be read, written or deleted is a failure of the disk: the page is then computed again. So nothing that the disk does
later stops a request.

Each page is kept until a time that its users set, the latest counts. That is its file's time of modification, since a
file's times change in place, and in one step; its time of access is when it was last used. No file is believed that
claims more than the longest time in use, so one that was copied without its times is gone at worst.

The files of all models in a folder share its capacity. Expired ones go first, then ends of what was not used for the
longest time. Files that are not named like pages are left alone. Several processes may use one folder; each sees what
was there when it began and what it wrote itself. Folders are made for their owner alone, since cache rows tell what was
said; checksums detect damage, not malice.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime.disk_index import DiskIndex, Entry, Found
from deepinfer_compile.runtime.disk_reading import Page
from deepinfer_compile.runtime.page_rows import PageRows, pack, rounded, unpack

NAMES = re.compile(
    r"(?P<key>[0-9a-f]{32}/[0-9a-f]{64})\.(?P<group>[0-9]{1,4})(\.(?P<parent>[0-9a-f]{16}))?\.safetensors"
    r"(?P<draft>\.[0-9a-f]{16}\.tmp)?"
)
"""What files of ours are called, from the folder on. parent: the beginning of its digest."""
ABANDONED = 3600.0
"""Seconds after which a temporary file belongs to a process that was killed."""
WEEK = 7 * 86400.0


class DiskPages:
    """Pages of one model in a folder of at most `capacity` bytes.

    identity: of everything beside the tokens that decides a page's contents. longest: seconds that any page is kept
    after its last use. spans: per cache group, how many pages before the one that is computed next must be there, None
    for all of them. clock: seconds since 1970.
    undated: what `date` has to do. damaged: files that could not be used. failures: pages that could not be read,
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
        self.undated: dict[str, float] = {}
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
        return self._index.files

    @property
    def size(self) -> int:
        """Bytes of all files known."""
        return self._index.size

    def has(self, digest: bytes, group: int) -> bool:
        """Whether there is a file for a page, and it is still kept."""
        return self.sizes([(digest, group)])[0] > 0

    def have(self, digests: Sequence[bytes], groups: int) -> NDArray[np.bool_]:
        """The same for each page and group, [digests, groups]."""
        now, none, there = self.clock(), dict[int, int](), list[dict[int, int]]()
        for digest in digests:
            entry = self._index.get(f"{self._own}/{digest.hex()}")
            there.append(entry.sizes if entry is not None and entry.until > now else none)
        found: NDArray[np.bool_] = np.zeros((len(digests), groups), dtype=bool)
        for group in range(groups):
            found[:, group] = [group in sizes for sizes in there]
        return found

    def sizes(self, pages: Sequence[Page]) -> list[int]:
        """Bytes of the files of pages, 0 where there is none that is still kept."""
        now, found = self.clock(), list[int]()
        for digest, group in pages:
            entry = self._index.get(f"{self._own}/{digest.hex()}")
            found.append(entry.sizes.get(group, 0) if entry is not None and entry.until > now else 0)
        return found

    def read(self, digest: bytes, group: int, into: Tensor | None = None) -> PageRows | None:
        """The tensors of a page by name, on the host; None, and no file any more, where it is damaged or gone. Several
        threads may read at once, while nothing else happens here; `touch` what was read.

        into: u8, where the page is to lie, if it has as many bytes as `space` says.
        """
        key = self._key(digest)
        entry = self._index.get(key)
        size = entry.sizes.get(group) if entry is not None else None
        if entry is None or size is None:
            return None
        try:
            content, found = _content(f"{self.folder}/{_name(key, group, entry.parent)}", size, into)
        except FileNotFoundError:
            with self._lock:
                self._lose(key, group)
            return None
        except OSError as error:
            with self._lock:
                self._fail(error)
            return None
        rows = unpack(content, found, digest)
        if rows is None:
            with self._lock:
                self.discard(digest, group)
        return rows

    def write(
        self, digest: bytes, group: int, rows: Mapping[str, Tensor], parent: bytes = b"", until: float | None = None
    ) -> None:
        """Keep a page, whose tensors are contiguous and on the host, until then, by default as long as any is kept.

        parent: the page without which nobody finds this one, if there is such a page. Where that is gone, or there is
        no room but for pages that were used later, it is not kept.
        """
        key, above = self._key(digest), self._key(parent) if parent else ""
        path = self.folder / _name(key, group, above)
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        until = self.clock() + self._longest if until is None else until
        self.expire()
        if above and above not in self._index:
            return
        try:
            self._make_home()
            content = pack(rows, digest)
            draft.write_bytes(content)
            size = len(content)
            if self._make_room(size - self._size(key, group), key, above):
                entry = self._index.get(key)
                self._date(draft, max(until, entry.until if entry is not None else 0.0))
                draft.replace(path)
                self._index.add(key, above, group, size, until)
        except (OSError, SafetensorError) as error:
            self._fail(error)
        with suppress(OSError):  # renamed, or never made
            draft.unlink()

    def touch(self, digests: Sequence[bytes], until: float) -> None:
        """Pages are used now, and kept until then if not longer. Those that are not there are left out. Other
        processes hear of it through the times of files, which they get with the next call of `date`."""
        for digest in digests:
            key = self._key(digest)
            with self._lock:
                if key in self._index:
                    self.undated[key] = self._index.touch(key, until)

    def date(self, most: int | None = None) -> None:
        """Tell other processes what was used, so many nodes of it at most; where they do not hear of it, they delete it
        earlier."""
        for _ in range(len(self.undated) if most is None else min(most, len(self.undated))):
            key, kept = self.undated.popitem()
            entry = self._index.get(key)
            for group in list(entry.sizes) if entry is not None else ():
                with suppress(OSError):
                    self._date(self.folder / _name(key, group, entry.parent if entry else ""), kept)

    def expire(self) -> float:
        """Delete what is kept no more; the seconds until there may be more of it."""
        while key := self._index.expired(self.clock()):
            self.expired += self._delete(key)
        return self._index.deadline() - self.clock()

    def trim(self, digest: bytes) -> None:
        """Delete a page, and those above it, that no request can start after."""
        key = self._key(digest)
        entry = self._index.get(key)
        while entry is not None and not entry.children and not self._leads(key):
            self.evictions += self._delete(key)
            key = entry.parent
            entry = self._index.get(key)

    def discard(self, digest: bytes, group: int) -> None:
        """Delete a page that could not be used."""
        self.damaged += 1
        self._lose(self._key(digest), group)

    def remove(self, digest: bytes) -> None:
        """Delete a page in all groups, if it is there, and all that hang on it."""
        self._delete(self._key(digest))

    def clear(self) -> None:
        """Delete all pages of this model, those of other processes too."""
        for key in [key for key in self._index if key.startswith(self._own)]:
            self._delete(key)
        for path in (self.folder / self._own).glob("*"):
            if NAMES.fullmatch(f"{self._own}/{path.name}"):
                self._unlink(path)

    def _key(self, digest: bytes) -> str:
        return f"{self._own}/{digest.hex()}"

    def _size(self, key: str, group: int) -> int:
        entry = self._index.get(key)
        return entry.sizes.get(group, 0) if entry is not None else 0

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
        found: dict[tuple[str, str], list[tuple[int, os.stat_result]]] = {}
        now = time.time()
        for path in self.folder.glob("*/*"):
            ours = NAMES.fullmatch(f"{path.parent.name}/{path.name}")
            if ours is None:
                continue
            try:
                held = path.stat()
            except FileNotFoundError:  # another process deleted it meanwhile
                continue
            if ours["draft"] is None:
                found.setdefault((ours["key"], ours["parent"] or ""), []).append((int(ours["group"]), held))
            elif held.st_mtime < now - ABANDONED:
                path.unlink(missing_ok=True)
        self._take_up(found)
        self.expire()
        for key in [key for key in self._index if key.startswith(self._own)]:
            self.trim(bytes.fromhex(key[-64:]))
        self._make_room(0, "", "")

    def _take_up(self, found: dict[tuple[str, str], list[tuple[int, os.stat_result]]]) -> None:
        """Index the files found by key and beginning of the parent's digest; delete those that nothing leads to."""
        whole = {key[:49]: key for key, _ in found}
        nodes, latest = dict[str, Found](), self.clock() + self._longest
        for (key, short), files in found.items():
            parent = whole.get(f"{key[:33]}{short}", "?") if short else ""
            times = [held for _, held in files]
            until = min(latest, min(held.st_mtime for held in times))
            used = max(held.st_atime_ns for held in times)
            sizes = {group: held.st_size for group, held in files}
            nodes.setdefault(key, Found(key, parent, used, until, sizes))
        lost = set(self._index.load(list(nodes.values())))
        for (key, short), files in found.items():
            entry = self._index.get(key)
            if key in lost or entry is None or entry.parent[33:49] != short:
                for group, _ in files:
                    self._unlink(self.folder / f"{key}.{group}{'.' if short else ''}{short}.safetensors")

    def _make_room(self, size: int, key: str, above: str) -> bool:
        """Have room for so many bytes more of a node; False where it should not be kept."""
        if size > self._capacity:
            return False
        while self._index.size + size > self._capacity:
            victim = self._index.oldest()
            if victim in (key, above):
                self.trim(bytes.fromhex(victim[-64:]))
                return False
            parent = self._index.get(victim)
            self.evictions += self._delete(victim)
            if parent is not None and parent.parent.startswith(self._own):
                self.trim(bytes.fromhex(parent.parent[-64:]))
        return not above or above in self._index

    def _lose(self, key: str, group: int) -> None:
        """A file is of no use: delete it, and what nobody finds without it."""
        entry = self._index.get(key)
        if entry is None or group >= len(self._spans) or self._spans[group] is None:
            self._delete(key)
            return
        if group in entry.sizes:
            self._unlink(self.folder / _name(key, group, entry.parent))
            self._index.remove_file(key, group)

    def _delete(self, key: str) -> int:
        """Delete a node and all that hang on it; how many files. One that stays is not used by this process."""
        gone: list[tuple[str, Entry]] = self._index.remove(key)
        for one, entry in gone:
            for group in entry.sizes:
                self._unlink(self.folder / _name(one, group, entry.parent))
        return sum(len(entry.sizes) for _, entry in gone)

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.error = str(error)


def _name(key: str, group: int, parent: str) -> str:
    """A node's file of one group, from the folder on."""
    return f"{key}.{group}{'.' if parent else ''}{parent[33:49]}.safetensors"


def space(size: int) -> int:
    """Bytes of memory into which a file of so many bytes is read. One more, to see that there are no more."""
    return rounded(size + 1)


def _content(path: str, size: int, into: Tensor | None) -> tuple[Tensor, int]:
    """A buffer that begins with the bytes of a file, u8, and how many, one more than `size` at most. Not mapped: a disk
    that fails would end the process."""
    fits = into is not None and into.nbytes == space(size)
    content = into if into is not None and fits else torch.empty(space(size), dtype=torch.uint8)
    count, view = 0, memoryview(content.numpy().data)[: size + 1]
    file = os.open(path, os.O_RDONLY)
    try:
        # a file as long as it should be is whole: what it holds is checked, and each call costs other threads time
        while count != size and count <= size and (more := os.readv(file, [view[count:]])):
            count += more
    finally:
        os.close(file)
    return content, count
