"""Which names and files a bundle may hold.

A bundle must mean the same folder on every file system and must never reach outside itself, so names are a small ASCII
set, relative, and unique without regard to case; and what lies under them is a regular file with one name. The same
rules hold when a bundle is written and when it is read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from deepinfer_compile.errors import BundleCorrupt, BundlePath

MAX_ENTRIES = 100_000
MAX_PATH = 1024
_COMPONENT = re.compile(r"[A-Za-z0-9_+=@,~()\[\] .-]{1,255}\Z")


def check_path(entry: str) -> str:
    """Return `entry` if it is a safe relative POSIX path. Raises BundlePath with the reason."""
    reason = _reason(entry)
    if reason:
        raise BundlePath(entry=entry[:MAX_PATH], reason=reason)
    return entry


def _reason(entry: str) -> str:
    if not entry or len(entry) > MAX_PATH:
        return f"a path has 1 to {MAX_PATH} characters"
    if "\0" in entry or any(ord(c) < 32 or ord(c) == 127 for c in entry):
        return "it holds a NUL or control character"
    if "\\" in entry:
        return "it holds a backslash"
    if entry.startswith("/"):
        return "it is absolute"
    if re.match(r"[A-Za-z]:", entry):
        return "it begins with a drive letter"
    parts = entry.split("/")
    if ".." in parts:
        return "it steps out of the folder"
    for part in parts:
        if not _COMPONENT.match(part):
            return f"the part {part!r} is empty, too long, or has a character outside A-Z a-z 0-9 _+=@,~()[] .-"
        if part[0] in ". " or part[-1] in ". ":
            return f"the part {part!r} begins or ends with a dot or a space"
    return ""


class PathSet:
    """Safe paths that do not collide: no two equal without regard to case, none a folder of another."""

    def __init__(self) -> None:
        self._files: set[str] = set()
        self._folders: dict[str, str] = {}

    def add(self, entry: str) -> None:
        """Check and add one path. Raises BundlePath."""
        if len(self._files) == MAX_ENTRIES:
            raise BundlePath(entry=entry, reason=f"a bundle has at most {MAX_ENTRIES} files")
        folded = check_path(entry).casefold()
        above = sorted(parents([entry]))
        clash = folded in self._folders or any(name.casefold() in self._files for name in (entry, *above))
        if clash or any(self._folders.setdefault(name.casefold(), name) != name for name in above):
            raise BundlePath(entry=entry, reason="another entry has the same name, or differs only in case or kind")
        self._files.add(folded)


def parents(entries: Iterable[str]) -> set[str]:
    """Every folder, relative, that holds one of the files."""
    found: set[str] = set()
    for entry in entries:
        parts = entry.split("/")[:-1]
        found.update("/".join(parts[: depth + 1]) for depth in range(len(parts)))
    return found


def check_tree(root: Path, files: Iterable[str], folders: Iterable[str] = ()) -> dict[str, int]:
    """Sizes in bytes of the files under `root`, which must be exactly `files`: regular, unlinked elsewhere, none extra.

    folders: folders that may be there without a file in them.

    Raises BundlePath for links, special files and extra entries, BundleCorrupt for a missing file.
    """
    wanted = set(files)
    known = parents(wanted) | set(folders)
    sizes: dict[str, int] = {}
    for entry, info in _walk(root, ""):
        if stat.S_ISDIR(info.st_mode):
            if entry not in known:
                raise BundlePath(entry=entry, reason="the manifest names no file in this folder")
            continue
        if not stat.S_ISREG(info.st_mode):
            raise BundlePath(entry=entry, reason=f"it is a {_kind(info.st_mode)}, not a plain file")
        if info.st_nlink > 1:
            raise BundlePath(entry=entry, reason="it is a hard link, so it can change from outside the bundle")
        if entry not in wanted:
            raise BundlePath(entry=entry, reason="the manifest does not name it")
        sizes[entry] = info.st_size
    missing = sorted(wanted - sizes.keys())
    if missing:
        raise BundleCorrupt(file=missing[0], reason="it is missing")
    return sizes


def _walk(root: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (relative path, lstat) depth first, without following links; the caller bounds it by refusing extras."""
    with os.scandir(root / prefix) as entries:
        for item in entries:
            relative = f"{prefix}/{item.name}" if prefix else item.name
            info = item.stat(follow_symlinks=False)
            yield relative, info
            if stat.S_ISDIR(info.st_mode):
                yield from _walk(root, relative)


def _kind(mode: int) -> str:
    kinds = {stat.S_IFLNK: "symbolic link", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}
    return kinds.get(stat.S_IFMT(mode), "device")


def open_regular(path: Path) -> int:
    """A read-only descriptor of a regular file; never follows a link and never waits on a FIFO.

    Raises OSError, also (with a plain message) when `path` is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError("it is not a plain file")
    return fd
