"""Writing a bundle: into a temporary folder beside the target, then put in its place in one step.

The manifest's own digest is written last and marks the bundle complete. Every file is hashed while it is written and
flushed before the folder is moved, so a crash, a kill or a full disk leaves what was at the target before. A target
that is no bundle is never replaced, except an empty folder, which holds nothing to lose.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.files import FileEntry, HashingFile, copy_into, sync_folder
from deepinfer_compile.bundle.manifest import (
    DIGEST,
    MANIFEST,
    Manifest,
    check_constants,
    dump_manifest,
    parse_manifest,
)
from deepinfer_compile.bundle.paths import PathSet, open_regular, parents
from deepinfer_compile.bundle.replace import FolderLock, new_sibling, put_in_place, recover, remove_leftovers
from deepinfer_compile.bundle.safetensors_io import TORCH_DTYPES, plan_layout
from deepinfer_compile.errors import BundlePath, OutputExists, OutputFailed, WeightMismatch

if TYPE_CHECKING:
    from deepinfer_compile.bundle.mapped import WeightItem

_MARKER = re.compile(rb"[0-9a-f]{64}\n")


class BundleWriter:
    """Writes one bundle; use as a context manager and call `finish` last.

    Leaving the block without `finish`, by an exception or otherwise, removes the temporary folder and changes nothing.
    """

    def __init__(self, out: Path | str) -> None:
        self._out = Path(os.path.realpath(out))
        self._entries: dict[str, FileEntry] = {}
        self._paths = PathSet()
        self._paths.add(MANIFEST)
        self._paths.add(DIGEST)
        self._stored: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._finished = False

    def __enter__(self) -> BundleWriter:
        """Claim the target. Raises OutputBusy, OutputExists, OutputFailed."""
        with self._reporting():
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._out)
            try:
                recover(self._out)
                _check_replaceable(self._out)
                remove_leftovers(self._out)
                self._root = new_sibling(self._out, "tmp")
                self._root.mkdir()
            except BaseException:
                self._lock.release()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._root, ignore_errors=self._finished)
        self._lock.release()
        if kind is None and not self._finished:
            raise RuntimeError(f"the bundle {self._out} was left without finish(), so it was not written")

    def add_bytes(self, path: str, data: bytes) -> None:
        """Write one file. Raises BundlePath, OutputFailed."""
        with self._reporting(), self._create(path) as file:
            file.write(data)

    def add_json(self, path: str, value: Any) -> None:
        """Write one file of plain JSON. Raises BundlePath, OutputFailed, TypeError for what JSON cannot hold."""
        self.add_bytes(path, jsonio.dumps(value))

    def add_file(self, path: str, source: Path) -> None:
        """Copy a regular file (links to it are followed). Raises BundlePath, OutputFailed."""
        real = Path(os.path.realpath(source))
        if not real.is_file():
            raise BundlePath(entry=path, reason=f"its source {source} is not a plain file")
        with self._reporting(), self._create(path) as file:
            copy_into(file, real)

    def add_weights(self, shard_name: str, tensors: Iterable[WeightItem]) -> None:
        """Write weights/<shard_name>.safetensors; each tensor is produced, written and dropped before the next.

        Raises WeightMismatch if a produced tensor is not what its item says, BundlePath, OutputFailed.
        """
        from deepinfer_compile.bundle.mapped import tensor_bytes

        items = list(tensors)
        twice = next((item.name for item in items if item.name in self._stored), None)
        if twice is not None:
            raise WeightMismatch(tensor=twice, expected="one stored copy", found="a second one")
        layout = plan_layout([(item.name, TORCH_DTYPES[item.dtype], item.shape) for item in items], {"format": "pt"})
        path = f"weights/{shard_name}.safetensors"
        with self._reporting(), self._create(path) as file:
            file.write(layout.head)
            for item, pad in zip(items, layout.pads, strict=True):
                file.write(tensor_bytes(item))
                file.write(bytes(pad))
                self._stored[item.name] = (item.dtype, item.shape)
        header = hashlib.sha256(layout.head).hexdigest()
        self._entries[path] = dataclasses.replace(self._entries[path], header_sha256=header)

    def finish(self, manifest: Manifest) -> Path:
        """Write the manifest and put the bundle in place; returns its path.

        Raises WeightMismatch if the constants and the stored tensors differ, BundleCorrupt for a manifest that could
        not be read back, OutputFailed.
        """
        complete = dataclasses.replace(manifest, files=dict(sorted(self._entries.items())))
        data = dump_manifest(complete)
        check_constants(parse_manifest(data), self._stored)
        with self._reporting():
            self._write_plain(MANIFEST, data)
            for folder in sorted(parents(self._entries)):
                sync_folder(self._root / folder)
            self._write_plain(DIGEST, f"{hashlib.sha256(data).hexdigest()}\n".encode("ascii"))
            sync_folder(self._root)
            put_in_place(self._root, self._out)
        self._finished = True
        return self._out

    def _write_plain(self, name: str, data: bytes) -> None:
        file = HashingFile(self._root / name)
        try:
            file.write(data)
            file.finish()
        finally:
            file.close()

    @contextmanager
    def _create(self, path: str) -> Iterator[HashingFile]:
        """A new file at a checked path; its entry is recorded when the block ends well."""
        self._paths.add(path)
        target = self._root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        file = HashingFile(target)
        try:
            yield file
            self._entries[path] = file.finish()
        finally:
            file.close()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Turn a failing disk or a missing permission into an error that says what to do."""
        try:
            yield
        except OSError as error:
            reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
            raise OutputFailed(path=self._out, reason=reason) from error


def _check_replaceable(out: Path) -> None:
    """Raises OutputExists unless `out` is absent, a bundle (also a damaged one), or an empty folder."""
    if not os.path.lexists(out):
        return
    if out.is_dir() and (not any(out.iterdir()) or _has_marker(out)):
        return
    raise OutputExists(path=out)


def _has_marker(folder: Path) -> bool:
    """Whether the folder has a manifest and the digest that a finished bundle ends with."""
    try:
        fd = open_regular(folder / DIGEST)
        with os.fdopen(fd, "rb") as file:
            marker = file.read(66)
        return bool(_MARKER.fullmatch(marker)) and stat.S_ISREG(os.lstat(folder / MANIFEST).st_mode)
    except OSError:
        return False
