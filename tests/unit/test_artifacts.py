"""The build cache: right after races, kills and damage (TUNE-1, TUNE-3)."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_compile import artifacts
from deepinfer_compile.artifacts import cached, default_root, is_intact, key_name
from deepinfer_compile.errors import BundlePath

KEY = {"kernel": "k", "dtype": "bfloat16", "stages": 3, "env": {"a": [1, 2.5, None, True]}}


class Builder:
    """Writes a file and a file in a folder; counts its runs."""

    def __init__(self, text: str = "x") -> None:
        self.runs = 0
        self.text = text

    def __call__(self, folder: Path) -> None:
        self.runs += 1
        assert list(folder.iterdir()) == []
        (folder / "kernel.so").write_text(self.text)
        (folder / "meta").mkdir()
        (folder / "meta" / "a.json").write_text("{}")
        (folder / "empty").mkdir()


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


def test_miss_then_hit(tmp_path: Path) -> None:
    build = Builder()
    first = cached(KEY, build, tmp_path)
    assert cached(dict(reversed(KEY.items())), build, tmp_path) == first
    assert build.runs == 1
    assert (first / "kernel.so").read_text() == "x"
    assert (first / "meta" / "a.json").read_text() == "{}"
    assert json.loads((first.parent / "entry.json").read_text())["key"] == KEY
    assert os.listdir(tmp_path) == [key_name(KEY)]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"stages": 4},
        {"more": None},
        {"env": {"a": [1, 2.5, None, 1]}},
        {"stages": "3"},
        {"stages": 3.0},
    ],
)
def test_TUNE_1_every_item_counts(tmp_path: Path, change: dict) -> None:
    build = Builder()
    cached(KEY, build, tmp_path)
    cached({**KEY, **change}, build, tmp_path)
    assert build.runs == 2


@pytest.mark.parametrize("key", [{"a": {1}}, {1: "a"}, {"a": float("nan")}, {"a": Path("x")}])
def test_keys_are_plain_json(tmp_path: Path, key: dict) -> None:
    with pytest.raises(TypeError):
        cached(key, Builder(), tmp_path)


def _wrong_key(entry: Path) -> None:
    other = cached({"other": 1}, Builder("other"), entry.parent).parent
    shutil.rmtree(entry)
    shutil.copytree(other, entry)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no record": lambda e: (e / "entry.json").unlink(),
    "empty record": lambda e: (e / "entry.json").write_text(""),
    "half record": lambda e: (e / "entry.json").write_text((e / "entry.json").read_text()[:40]),
    "record list": lambda e: (e / "entry.json").write_text("[]"),
    "record odd": lambda e: (e / "entry.json").write_text('{"key": 1, "files": [], "folders": 3}'),
    "no payload": lambda e: shutil.rmtree(e / "data"),
    "empty file": lambda e: (e / "data" / "kernel.so").write_text(""),
    "wrong bytes": lambda e: (e / "data" / "kernel.so").write_text("y"),
    "missing file": lambda e: (e / "data" / "meta" / "a.json").unlink(),
    "extra file": lambda e: (e / "data" / "more").write_text(""),
    "link": lambda e: ((e / "data" / "kernel.so").unlink(), (e / "data" / "kernel.so").symlink_to("/etc/hostname")),
    "file": lambda e: (shutil.rmtree(e), e.write_text("")),
    "wrong key": _wrong_key,
}


@pytest.mark.parametrize("what", DAMAGE)
def test_TUNE_3_damaged_entries_are_replaced(tmp_path: Path, what: str) -> None:
    build = Builder()
    entry = cached(KEY, build, tmp_path).parent
    neighbour = cached({"n": 1}, Builder("n"), tmp_path)
    (tmp_path / "mine.txt").write_text("mine")
    DAMAGE[what](entry)
    assert not is_intact(entry, KEY)
    again = cached(KEY, build, tmp_path)
    assert build.runs == 2
    assert (again / "kernel.so").read_text() == "x"
    assert is_intact(entry, KEY)
    assert (neighbour / "kernel.so").read_text() == "n"
    assert (tmp_path / "mine.txt").read_text() == "mine"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_failed_builds_leave_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        cached(KEY, fail, tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        cached(KEY, lambda folder: (folder / "absent").unlink(), tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(BundlePath):
        cached(KEY, lambda folder: (folder / "l").symlink_to(folder), tmp_path)
    assert os.listdir(tmp_path) == []
    assert (cached(KEY, Builder(), tmp_path) / "kernel.so").exists()


def test_the_loser_of_a_race_uses_the_winner(tmp_path: Path) -> None:
    def slow(folder: Path) -> None:
        winner = cached(KEY, Builder("winner"), tmp_path)
        assert (winner / "kernel.so").read_text() == "winner"
        Builder("loser")(folder)

    path = cached(KEY, slow, tmp_path)
    assert (path / "kernel.so").read_text() == "winner"
    assert os.listdir(tmp_path) == [key_name(KEY)]


@pytest.mark.parametrize("code", [errno.EROFS, errno.ENOSPC, errno.EACCES])
def test_TUNE_3_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Runs without the cache, says so, and builds once in a process."""
    build = Builder()
    key = {**KEY, "code": code}
    real = Path.mkdir

    def mkdir(self: Path, *args: object, **kwargs: object) -> None:
        if tmp_path in self.parents:
            raise OSError(code, os.strerror(code), str(self))
        real(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", mkdir)
    for _ in range(2):
        with pytest.warns(RuntimeWarning, match="cannot be written"):
            path = cached(key, build, tmp_path)
        assert (path / "kernel.so").read_text() == "x"
    assert build.runs == 1
    assert tmp_path not in path.parents
    assert os.listdir(tmp_path) == []


def test_cache_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot be written"):
        path = cached({**KEY, "below": 1}, Builder(), tmp_path / "f" / "cache")
    assert (path / "kernel.so").exists()


def test_private_folders_go_with_their_process(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.warns(RuntimeWarning):
        path = cached({**KEY, "private": 1}, Builder(), tmp_path / "f" / "cache")
    artifacts._remove_private(path.parent, os.getpid() + 1)
    assert path.exists()
    artifacts._remove_private(path.parent, os.getpid())
    assert not path.exists()


def test_disk_full_while_building(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        if tmp_path in folder.parents:
            raise OSError(errno.ENOSPC, "full")
        Builder()(folder)

    with pytest.warns(RuntimeWarning, match="full"):
        assert (cached({**KEY, "full": 1}, build, tmp_path) / "kernel.so").exists()


def test_old_leftovers_are_removed(tmp_path: Path) -> None:
    for name, age in ((".a.tmp-1", 2 * 86400), (".b.tmp-1", 10), ("keep", 2 * 86400), (".c.old-1", 2 * 86400)):
        (tmp_path / name).mkdir()
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    cached(KEY, Builder(), tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted([".b.tmp-1", "keep", key_name(KEY)])


def test_default_root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPINFER_COMPILE_CACHE", str(tmp_path / "x"))
    assert default_root() == tmp_path / "x"
    monkeypatch.delenv("DEEPINFER_COMPILE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_root() == tmp_path / "deepinfer-compile"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_root() == tmp_path / "home" / ".cache" / "deepinfer-compile"


def _worker(root: Path, seed: int) -> None:
    """One process of the race: all keys in its own order, results checked."""
    chance = random.Random(seed)
    for number in chance.sample(range(8), 8):
        path = cached({"n": number}, Builder(f"text {number}"), root)
        if (path / "kernel.so").read_text() != f"text {number}":
            os._exit(2)


def _fork(root: Path, seed: int) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _worker(root, seed)
            code = 0
        finally:
            os._exit(code)
    return pid


def test_TUNE_3_many_processes(tmp_path: Path) -> None:
    """Rounds of 16 processes on 8 keys in one empty folder; one is killed at a random time in each round."""
    chance = random.Random(0)
    for turn in range(8):
        root = tmp_path / f"r{turn}"
        children = [_fork(root, turn * 16 + index) for index in range(16)]
        victim = children.pop(chance.randrange(16))
        time.sleep(chance.random() * 0.05)
        os.kill(victim, signal.SIGKILL)
        os.waitpid(victim, 0)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0] * 15
        for number in range(8):
            key = {"n": number}
            assert is_intact(root / key_name(key), key)
        assert len([name for name in os.listdir(root) if not name.startswith(".")]) == 8
