"""Putting a finished folder in the place of an old one, so that every moment shows the old or the new one, whole.

Linux can exchange two names in one step (renameat2 with RENAME_EXCHANGE). Where the system or file system cannot, the
old folder is moved aside, the new one moved in, and `recover` undoes the first half if the process died in between.
Everything happens beside the target under names that begin with `.NAME.`, and under a lock that its holder removes, so
that nothing is left behind. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from deepinfer_compile.bundle.files import sync_folder
from deepinfer_compile.errors import OutputBusy

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SUFFIX = re.compile(r"[0-9a-f]{8}\Z")


class FolderLock:
    """An exclusive claim to write `target`; held from the constructor until `release`."""

    def __init__(self, target: Path, wait: bool = False) -> None:
        """Take the lock file beside `target`. Raises OutputBusy if another writer holds it (or waits), OSError."""
        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        self._path = target.parent / f".{target.name}.lock"
        while True:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            try:
                fcntl.flock(self._fd, how)
            except OSError as error:
                os.close(self._fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise OutputBusy(path=target) from None
                raise
            if self._is_current():
                return
            os.close(self._fd)

    def _is_current(self) -> bool:
        """The last holder may have removed the file between our open and our lock; then the lock is on nothing."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        os.close(self._fd)


def new_sibling(target: Path, kind: str) -> Path:
    """An unused path beside `target`, on the same file system. kind: "tmp" (being written) or "old" (moved aside)."""
    return target.parent / f".{target.name}.{kind}-{secrets.token_hex(4)}"


def siblings(target: Path, kind: str) -> list[Path]:
    """Existing folders that `new_sibling` named, sorted."""
    prefix = f".{target.name}.{kind}-"
    found = (name for name in os.listdir(target.parent) if name.startswith(prefix))
    return sorted(target.parent / name for name in found if _SUFFIX.match(name[len(prefix) :]))


def recover(target: Path) -> None:
    """With the lock held: bring back a target that was moved aside and never replaced."""
    aside = siblings(target, "old")
    if aside and not os.path.lexists(target):
        os.rename(aside[0], target)
        sync_folder(target.parent)


def remove_leftovers(target: Path) -> None:
    """With the lock held and after `recover`: remove what killed writers left."""
    for path in siblings(target, "tmp") + siblings(target, "old"):
        shutil.rmtree(path)


def put_in_place(new: Path, target: Path) -> None:
    """With the lock held: `target` becomes the folder `new`, which ceases to exist; what was there before is removed.

    Raises OSError; then `target` is what it was.
    """
    if not os.path.lexists(target):
        os.rename(new, target)
        sync_folder(target.parent)
        return
    old = new
    if not exchange(new, target):
        old = new_sibling(target, "old")
        os.rename(target, old)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(old, target)
            raise
    sync_folder(target.parent)
    # The new folder is in place; what cannot be removed now is a leftover for the next writer.
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def exchange(first: Path, second: Path) -> bool:
    """Swap two names in one step; False where that is not possible. Raises OSError for any other failure."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))
