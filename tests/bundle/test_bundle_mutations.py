"""Hundreds of damaged bundles: all refused with an error of ours (BND-1, BND-2)."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.bundle.safetensors_io import read_header
from deepinfer_compile.errors import CompileError
from tests.bundle.support import write_manifest

Mutation = Callable[[Path, random.Random], None]


def _files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def _flip_header(root: Path, chance: random.Random) -> None:
    path = chance.choice(_files(root / "weights"))
    start = min(entry.start for entry in read_header(path).entries.values())
    data = bytearray(path.read_bytes())
    data[chance.randrange(start)] ^= 1 << chance.randrange(8)
    path.write_bytes(bytes(data))


def _cut(root: Path, chance: random.Random) -> None:
    path = chance.choice(_files(root))
    os.truncate(path, chance.randrange(path.stat().st_size))


def _grow(root: Path, chance: random.Random) -> None:
    with chance.choice(_files(root)).open("ab") as file:
        file.write(chance.randbytes(chance.randrange(1, 9)))


def _remove(root: Path, chance: random.Random) -> None:
    chance.choice(_files(root)).unlink()


def _rename(root: Path, chance: random.Random) -> None:
    path = chance.choice(_files(root))
    path.rename(path.with_name(path.name + chance.choice(["x", " ", ".bak"])))


def _swap(root: Path, chance: random.Random) -> None:
    one, two = chance.sample([path for path in _files(root) if path.parent != root or path.suffix == ".md"], 2)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def _link(root: Path, chance: random.Random) -> None:
    path = chance.choice(_files(root))
    moved = root.parent / "elsewhere"
    path.rename(moved)
    chance.choice([lambda: path.symlink_to(moved), lambda: os.link(moved, path), lambda: os.mkfifo(path)])()


def _add(root: Path, chance: random.Random) -> None:
    folder = chance.choice([root, *(path for path in root.rglob("*") if path.is_dir())])
    name = folder / chance.choice(["x", "weights.safetensors", ".hidden", "a b", "M\u00e9"])
    chance.choice([name.touch, name.mkdir, lambda: name.symlink_to(root)])()


def _giant_header(root: Path, chance: random.Random) -> None:
    with chance.choice(_files(root / "weights")).open("r+b") as file:
        file.write(chance.choice([1 << 63, 1 << 40, 100_000_001, 99_999_999]).to_bytes(8, "little"))


def _escape(root: Path, chance: random.Random) -> None:
    """A manifest, with a digest that fits, which names a file outside."""
    value = json.loads((root / "manifest.json").read_text())
    name = chance.choice(["../x", "/etc/hostname", "a/../../x", "C:\\x", "..\\x", "x\0", "REPORT.md", "kernels"])
    old = chance.choice(sorted(value["files"]))
    value["files"][name] = value["files"][old] if chance.random() < 0.5 else value["files"].pop(old)
    write_manifest(root, json.dumps(value).encode())


def _edit(root: Path, chance: random.Random) -> None:
    """A manifest, with a digest that fits, in which one value anywhere in what integrity rests on is another."""
    value = json.loads((root / "manifest.json").read_text())
    parent, key = value, chance.choice(["files", "constants", "weights", "tied", "schema", "format"])
    while isinstance(parent[key], dict | list) and parent[key]:
        parent = parent[key]
        key = chance.choice(sorted(parent)) if isinstance(parent, dict) else chance.randrange(len(parent))
    odd = [None, -1, 1 << 70, 1.5, "x", "\u0000", [], {}, True, [["a"]]]
    parent[key] = chance.choice([item for item in odd if item != parent[key] or type(item) is not type(parent[key])])
    write_manifest(root, json.dumps(value).encode())


ALWAYS_REFUSED: list[Mutation] = [
    _flip_header,
    _cut,
    _grow,
    _remove,
    _rename,
    _swap,
    _link,
    _add,
    _giant_header,
    _escape,
    _edit,
]


def _open(root: Path, check: str) -> None:
    read_bundle(root, check=check).weights()


@pytest.mark.parametrize("mutate", ALWAYS_REFUSED, ids=lambda mutate: mutate.__name__.strip("_"))
@pytest.mark.parametrize("check", ["lazy", "full"])
def test_mutations_are_refused(small: Path, tmp_path: Path, mutate: Mutation, check: str) -> None:
    for seed in range(20):
        root = tmp_path / "m" / "b"
        shutil.copytree(small, root)
        mutate(root, random.Random(seed))
        with pytest.raises(CompileError) as caught:
            _open(root, check)
        assert str(caught.value).strip(), seed
        shutil.rmtree(root.parent)


def test_byte_flips_are_refused(small: Path) -> None:
    """One flipped bit in any file. A full check refuses all; a lazy one all but those in tensor data."""
    chance = random.Random(1)
    starts = {path: max(e.start for e in read_header(path).entries.values()) for path in _files(small / "weights")}
    accepted = 0
    for _ in range(300):
        path = chance.choice(_files(small))
        good = path.read_bytes()
        at = chance.randrange(len(good))
        path.write_bytes(good[:at] + bytes([good[at] ^ (1 << chance.randrange(8))]) + good[at + 1 :])
        with pytest.raises(CompileError):
            _open(small, "full")
        if path in starts and at >= starts[path]:
            _open(small, "lazy")
            accepted += 1
        else:
            with pytest.raises(CompileError):
                _open(small, "lazy")
        path.write_bytes(good)
    assert accepted > 5
    _open(small, "full")
