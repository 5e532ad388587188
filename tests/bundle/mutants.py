"""Seeded damage to a bundle, and what an intact reader must say about each kind of it."""

from __future__ import annotations

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_compile.bundle.files import hash_file
from deepinfer_compile.errors import (
    BadWeightFile,
    BundleCorrupt,
    BundlePath,
    BundleVersion,
    CompileError,
    NotABundle,
    UnsupportedWeightFormat,
    WeightMismatch,
)
from tests.bundle.support import write_manifest

Chance = random.Random
Entry = tuple[str, int, bytes]
"""Kind of a directory entry (its mode), number of names, content or link target."""


def snapshot(root: Path) -> dict[str, Entry]:
    """Everything under a folder, links not followed."""
    found: dict[str, Entry] = {}
    for path in sorted(root.rglob("*")):
        info = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(info.st_mode) else b""
        data = os.fsencode(os.readlink(path)) if stat.S_ISLNK(info.st_mode) else data
        links = 1 if stat.S_ISDIR(info.st_mode) else info.st_nlink
        found[str(path.relative_to(root))] = (f"{stat.S_IFMT(info.st_mode):o}", links, data)
    return found


def restore(root: Path, entries: dict[str, Entry]) -> None:
    """Make a folder what it was."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    for name, (kind, _, data) in entries.items():
        if kind == f"{stat.S_IFDIR:o}":
            (root / name).mkdir()
        else:
            (root / name).write_bytes(data)


def files_of(root: Path, under: str = "") -> list[Path]:
    return sorted(path for path in (root / under).rglob("*") if path.is_file())


def refit(root: Path, *names: str) -> None:
    """Record the size, the digests and (of weight files) the header's digest of files as they are now."""
    value = json.loads((root / "manifest.json").read_text())
    for name in names:
        entry = hash_file(root / name)
        new = {"size": entry.size, "sha256": entry.sha256, "chunks": list(entry.chunks)}
        value["files"][name] |= new
    write_manifest(root, json.dumps(value).encode())


# -- plain damage -----------------------------------------------------------------------------------------------------


def flip(root: Path, chance: Chance) -> str:
    """One to three bits of one file."""
    path = chance.choice(files_of(root))
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 3])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))
    return path.relative_to(root).as_posix()


def overwrite(root: Path, chance: Chance) -> str:
    """A run of random bytes, as of a lost disk block."""
    path = chance.choice(files_of(root))
    data = bytearray(path.read_bytes())
    start = chance.randrange(len(data))
    count = min(len(data) - start, chance.choice([1, 16, 512, 4096]))
    data[start : start + count] = chance.choice([bytes(count), chance.randbytes(count)])
    path.write_bytes(bytes(data))
    return path.relative_to(root).as_posix()


def truncate(root: Path, chance: Chance) -> str:
    path = chance.choice(files_of(root))
    os.truncate(path, chance.choice([0, chance.randrange(path.stat().st_size), path.stat().st_size - 1]))
    return path.relative_to(root).as_posix()


def grow(root: Path, chance: Chance) -> str:
    path = chance.choice(files_of(root))
    with path.open("ab") as file:
        file.write(chance.choice([b"\0", b"\n", chance.randbytes(64)]))
    return path.relative_to(root).as_posix()


def remove(root: Path, chance: Chance) -> str:
    path = chance.choice(files_of(root))
    path.unlink()
    return path.relative_to(root).as_posix()


def rename(root: Path, chance: Chance) -> str:
    """A file or a folder under another name, in another folder, or in another case."""
    path = chance.choice(sorted(root.rglob("*")))
    names = [path.name + "x", "." + path.name, path.name.swapcase(), path.name[1:], f"{path.stem}(1){path.suffix}"]
    path.rename(chance.choice([path.with_name(chance.choice(names)), root / f"moved-{path.name}"]))
    return path.relative_to(root).as_posix()


def swap(root: Path, chance: Chance) -> str:
    """The contents of two files exchanged."""
    one, two = chance.sample(files_of(root), 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return ""


def odd_entry(root: Path, chance: Chance) -> str:
    """A file that is a link, a hard link, a FIFO or a folder; or an entry that nobody named."""
    path = chance.choice(files_of(root))
    moved = root.parent / "elsewhere"
    moved.unlink(missing_ok=True)
    kinds: dict[str, Callable[[], object]] = {
        "link": lambda: (path.rename(moved), path.symlink_to(moved)),
        "hard link": lambda: (path.rename(moved), os.link(moved, path)),
        "fifo": lambda: (path.unlink(), os.mkfifo(path)),
        "folder": lambda: (path.unlink(), path.mkdir()),
        "loop": lambda: (path.unlink(), path.symlink_to(path.name)),
        "more": lambda: path.with_name(path.name + ".orig").write_bytes(b"x"),
        "more folders": lambda: (root / "a" / "b").mkdir(parents=True),
        "link out": lambda: (root / "out").symlink_to("/"),
    }
    kinds[chance.choice(sorted(kinds))]()
    return ""


# -- damage whose digests fit, as someone who means it would make it -------------------------------------------------


def escape(root: Path, chance: Chance) -> str:
    """A manifest that names a file outside, or under a name that is no plain relative path."""
    value = json.loads((root / "manifest.json").read_text())
    names = ["../x", "/etc/passwd", "a/../../x", "a/./b", "C:\\x", "..\\x", "x\0", "REPORT.MD", "weights", "", "~/x "]
    name = chance.choice([*names, "../" * chance.randrange(1, 40) + "etc/passwd", "%2e%2e/x/.", "a" * 2000])
    old = chance.choice(sorted(value["files"]))
    value["files"][name] = chance.choice([value["files"].get, value["files"].pop])(old)
    write_manifest(root, json.dumps(value).encode())
    return ""


def giant_header(root: Path, chance: Chance) -> str:
    """A weight file that says that its header is larger than anything, with digests that fit or not."""
    path = chance.choice(files_of(root, "weights"))
    with path.open("r+b") as file:
        file.write(chance.choice([1 << 63, (1 << 64) - 1, 1 << 40, 100_000_001, 99_999_999, 0]).to_bytes(8, "little"))
    if chance.random() < 0.7:
        refit(root, path.relative_to(root).as_posix())
    return path.relative_to(root).as_posix()


def swap_fitted(root: Path, chance: Chance) -> str:
    """Two files exchanged, with digests that fit: a program that is a kernel, weights under another's name."""
    # reports are for people: whatever they say is a report
    one, two = chance.sample([p for p in files_of(root) if not p.name.startswith(("manifest.", "report."))], 2)
    names = [p.relative_to(root).as_posix() for p in (one, two)]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    refit(root, *names)
    return ""


def header_fitted(root: Path, chance: Chance) -> str:
    """A weight header that lies about a tensor, with digests of data (not of the header) that fit."""
    path = chance.choice(files_of(root, "weights"))
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8 : 8 + size])
    name = chance.choice(sorted(k for k in header if k != "__metadata__"))
    entry = header[name]
    lies: list[Callable[[], object]] = [
        lambda: entry.update(dtype=chance.choice(["F64", "F8", "I8", "", None, "BOOL"])),
        lambda: entry.update(shape=chance.choice([[1 << 60], [-1], [], [0], "x", [1.5]])),
        lambda: entry.update(data_offsets=chance.choice([[0, 1], [0, 1 << 60], [-4, 0], [4, 0], [], "x"])),
        lambda: header.pop(name),
        lambda: header.update({name + "x": header.pop(name)}),
        lambda: header.update(extra={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}),
    ]
    chance.choice(lies)()
    body = json.dumps(header).encode()
    body += b" " * (-len(body) % 8)
    path.write_bytes(len(body).to_bytes(8, "little") + body + data[8 + size :])
    refit(root, path.relative_to(root).as_posix())
    return path.relative_to(root).as_posix()


def manifest_fitted(root: Path, chance: Chance) -> str:
    """A manifest in which one value that integrity rests on is another, or a key is gone or new."""
    value = json.loads((root / "manifest.json").read_text())
    parent, key = value, chance.choice(["files", "constants", "weights", "schema", "format", "programs", "model"])
    while isinstance(parent[key], dict | list) and parent[key] and chance.random() < 0.8:
        if key == "info":
            return ""
        parent = parent[key]
        key = chance.choice(sorted(parent)) if isinstance(parent, dict) else chance.randrange(len(parent))
    odd = [None, -1, "\u0000" * 5000, [], {}, [["a"]]]
    parent[key] = chance.choice([item for item in odd if type(item) is not type(parent[key])])
    write_manifest(root, json.dumps(value).encode())
    return ""


DAMAGE = (BundleCorrupt,)
GONE = (BundleCorrupt, BundlePath, NotABundle)
WEIGHTS = (BundleCorrupt, BadWeightFile, WeightMismatch, UnsupportedWeightFormat)


@dataclass(frozen=True)
class Kind:
    """A kind of damage and the errors that say so."""

    apply: Callable[[Path, Chance], str]
    errors: tuple[type[CompileError], ...]


KINDS: dict[str, Kind] = {
    "flip": Kind(flip, DAMAGE),
    "overwrite": Kind(overwrite, DAMAGE),
    "truncate": Kind(truncate, DAMAGE),
    "grow": Kind(grow, DAMAGE),
    "remove": Kind(remove, GONE),
    "rename": Kind(rename, GONE),
    "swap": Kind(swap, DAMAGE),
    "odd entry": Kind(odd_entry, GONE),
    "escape": Kind(escape, (BundlePath, BundleCorrupt)),
    "giant header": Kind(giant_header, WEIGHTS),
    "swap, fitted": Kind(swap_fitted, (*WEIGHTS, BundlePath)),
    "header, fitted": Kind(header_fitted, WEIGHTS),
    "manifest, fitted": Kind(manifest_fitted, (BundleCorrupt, BundlePath, BundleVersion, WeightMismatch)),
}
