"""A cache of built things, keyed by content: what a build depends on, as readable JSON.

The key is a dictionary; its SHA-256 names the entry and the dictionary itself is stored beside the result, so that one
can read why an entry exists, and so that an entry under a wrong name is a miss. Many processes may fill one folder:
each builds in a folder of its own and moves it into place, and the loser of a race uses the winner's result. An entry
is checked by digest at each hit; a damaged one counts as a miss and is replaced. Where the cache cannot be written, the
result is built in a private temporary folder, with a warning.

Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.files import FileEntry, hash_file, sync_folder, verify_files
from deepinfer_compile.bundle.paths import check_tree
from deepinfer_compile.bundle.replace import FolderLock, new_sibling, put_in_place
from deepinfer_compile.errors import CompileError

ENV = "DEEPINFER_COMPILE_CACHE"
DATA = "data"
_RECORD = "entry.json"
_STALE_S = 24 * 3600.0
_UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOTDIR)

Build = Callable[[Path], None]


def default_root() -> Path:
    """$DEEPINFER_COMPILE_CACHE, else deepinfer-compile in the user's cache folder."""
    named = os.environ.get(ENV)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer-compile"


def key_name(key: dict[str, Any]) -> str:
    """The name of a key's entry: the SHA-256 of its canonical JSON. Raises TypeError for what JSON cannot hold."""
    return hashlib.sha256(jsonio.dumps(key, sort=True)).hexdigest()


def cached(key: dict[str, Any], build: Build, root: Path | None = None) -> Path:
    """The folder of what `build` makes for `key`, from the cache if it is there; do not change it.

    key: everything the result depends on, as plain JSON. build: fills the empty folder it is given. root: the cache
    folder, `default_root()` if None. Whatever `build` raises passes through, and then nothing is kept.
    """
    entry = Path(os.path.abspath(root or default_root())) / key_name(key)
    if is_intact(entry, key):
        return entry / DATA
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(entry.parent)
        return _fill(entry, key, build)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        reason = f"the cache {entry.parent} cannot be written ({error.strerror}); building without it"
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return _without_cache(entry.name, build)


def _fill(entry: Path, key: dict[str, Any], build: Build) -> Path:
    """Build beside the entry and move it in, unless another process was faster."""
    work = new_sibling(entry, "tmp")
    try:
        (work / DATA).mkdir(parents=True)
        build(work / DATA)
        _record(work, key)
        lock = FolderLock(entry, wait=True)
        try:
            if not is_intact(entry, key):
                put_in_place(work, entry)
        finally:
            lock.release()
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return entry / DATA


def _record(work: Path, key: dict[str, Any]) -> None:
    """Write what an intact entry looks like, after all else is on the disk. Raises BundlePath for links."""
    files: dict[str, Any] = {}
    folders: list[str] = []
    for folder, _, names in os.walk(work / DATA):
        folders.append(Path(folder).relative_to(work).as_posix())
        for name in sorted(names):
            path = Path(folder, name)
            found = hash_file(path)
            _sync_file(path)
            files[path.relative_to(work).as_posix()] = {"size": found.size, "chunks": list(found.chunks)}
        sync_folder(Path(folder))
    check_tree(work, files, folders)
    record = work / _RECORD
    record.write_bytes(jsonio.dumps({"key": key, "files": files, "folders": folders}))
    _sync_file(record)
    sync_folder(work)


def _sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_intact(entry: Path, key: dict[str, Any]) -> bool:
    """Whether an entry is there, is of this key, and has exactly the bytes that were recorded."""
    try:
        record = jsonio.loads((entry / _RECORD).read_bytes())
        if record["key"] != jsonio.loads(jsonio.dumps(key)):
            return False
        files = {name: FileEntry(item["size"], "", tuple(item["chunks"])) for name, item in record["files"].items()}
        sizes = check_tree(entry, [_RECORD, *files], record["folders"])
        if any(sizes[name] != item.size for name, item in files.items()):
            return False
        verify_files(entry, files)
    except (OSError, CompileError, ValueError, KeyError, TypeError, AttributeError):
        # A missing or damaged entry, in whatever way: a miss.
        return False
    return True


def _without_cache(name: str, build: Build) -> Path:
    """Build into a private folder that goes away with this process; once a key."""
    if name not in _private:
        folder = Path(tempfile.mkdtemp(prefix="deepinfer-compile-"))
        atexit.register(_remove_private, folder, os.getpid())
        (folder / DATA).mkdir()
        build(folder / DATA)
        _private[name] = folder / DATA
    return _private[name]


_private: dict[str, Path] = {}


def _remove_private(folder: Path, owner: int) -> None:
    # A forked child inherits the exit hooks, but not the folder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(root: Path) -> None:
    """Remove what killed builds left more than a day ago."""
    for kind in ("tmp", "old"):
        for path in root.glob(f".*.{kind}-*"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - path.lstat().st_mtime > _STALE_S:
                    shutil.rmtree(path, ignore_errors=True)
