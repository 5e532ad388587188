"""File contents and their digests, in 16 MiB chunks.

A file's digest is the SHA-256 of its chunks' SHA-256 digests (raw bytes, in order), so that large files are hashed by
several threads and a reader can say which part is damaged. The empty file has no chunks. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.bundle.paths import open_regular
from deepinfer_compile.errors import BundleCorrupt

CHUNK = 16 * 1024 * 1024
"""Bytes hashed as one."""
THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class FileEntry:
    """What the manifest says of one file: size in bytes, hex digests, and for weight files the header's digest."""

    size: int
    sha256: str
    chunks: tuple[str, ...]
    header_sha256: str = ""


def combined(chunks: Iterable[str]) -> str:
    """The file digest that belongs to these hex chunk digests."""
    return hashlib.sha256(b"".join(bytes.fromhex(chunk) for chunk in chunks)).hexdigest()


def chunk_count(size: int) -> int:
    """How many chunks hash a file of `size` bytes."""
    return -(-size // CHUNK)


class HashingFile:
    """A new file that is hashed while it is written; `finish` makes it durable and returns its entry."""

    def __init__(self, path: Path) -> None:
        """Create `path`, which must not exist. Raises OSError."""
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        self._chunks: list[str] = []
        self._hash = hashlib.sha256()
        self._room = CHUNK
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        while view:
            part = view[: min(self._room, len(view))]
            written = os.write(self._fd, part)
            self._hash.update(part[:written])
            self._room -= written
            self.size += written
            view = view[written:]
            if self._room == 0:
                self._close_chunk()

    def finish(self) -> FileEntry:
        """Flush to the disk, close, and return the entry."""
        if self._room < CHUNK:
            self._close_chunk()
        os.fsync(self._fd)
        self.close()
        return FileEntry(self.size, combined(self._chunks), tuple(self._chunks))

    def close(self) -> None:
        """Close without flushing; safe to call again."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _close_chunk(self) -> None:
        self._chunks.append(self._hash.hexdigest())
        self._hash = hashlib.sha256()
        self._room = CHUNK


def copy_into(target: HashingFile, source: Path) -> None:
    """Append the bytes of the regular file `source`, following links to it. Raises OSError."""
    fd = open_regular(Path(os.path.realpath(source)))
    try:
        while data := os.read(fd, CHUNK):
            target.write(data)
    finally:
        os.close(fd)


def hash_file(path: Path) -> FileEntry:
    """The entry of an existing regular file. Raises OSError."""
    fd = open_regular(path)
    try:
        chunks: list[str] = []
        size = 0
        while data := os.pread(fd, CHUNK, size):
            chunks.append(hashlib.sha256(data).hexdigest())
            size += len(data)
    finally:
        os.close(fd)
    return FileEntry(size, combined(chunks), tuple(chunks))


def read_verified(path: Path, name: str, entry: FileEntry, limit: int) -> bytes:
    """The whole file, whose digests are checked. Raises BundleCorrupt, also when it is larger than `limit` bytes."""
    if entry.size > limit:
        raise BundleCorrupt(file=name, reason=f"it has {entry.size} bytes, more than the limit of {limit}")
    data = read_bytes(path, name, entry.size)
    for index, expected in enumerate(entry.chunks):
        _compare(name, index, data[index * CHUNK : (index + 1) * CHUNK], expected)
    return data


def read_bytes(path: Path, name: str, size: int) -> bytes:
    """Exactly `size` bytes, the whole of a regular file. Raises BundleCorrupt."""
    try:
        fd = open_regular(path)
    except OSError as error:
        raise BundleCorrupt(file=name, reason=f"it cannot be read: {error.strerror or error}") from None
    with os.fdopen(fd, "rb") as file:
        data = file.read(size + 1)
    if len(data) != size:
        raise BundleCorrupt(file=name, reason=f"it does not have the {size} bytes it should have")
    return data


def verify_files(root: Path, entries: Mapping[str, FileEntry]) -> None:
    """Hash every chunk of every file, in threads. Raises BundleCorrupt naming the first bad file and chunk."""
    tasks = [(name, index, digest) for name, entry in entries.items() for index, digest in enumerate(entry.chunks)]
    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(_verify_chunk, root, *task) for task in tasks]
        try:
            for future in futures:
                future.result()
        finally:
            for future in futures:
                future.cancel()


def _verify_chunk(root: Path, name: str, index: int, expected: str) -> None:
    try:
        fd = open_regular(root / name)
    except OSError as error:
        raise BundleCorrupt(file=name, reason=f"it cannot be read: {error.strerror or error}") from None
    try:
        data = os.pread(fd, CHUNK, index * CHUNK)
    finally:
        os.close(fd)
    _compare(name, index, data, expected)


def _compare(name: str, index: int, data: bytes, expected: str) -> None:
    if hashlib.sha256(data).hexdigest() != expected:
        raise BundleCorrupt(file=name, reason=f"the bytes from {index * CHUNK} on do not have the recorded SHA-256")


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
