"""Saving over a bundle: at every moment the old or the new one, whole (BND-6)."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from deepinfer_compile.bundle import BundleWriter, Manifest, read_bundle, reader, replace
from deepinfer_compile.bundle.files import FileEntry
from deepinfer_compile.errors import BundleCorrupt, NotABundle, OutputBusy, OutputExists, OutputFailed
from tests.bundle.killing import count_calls, in_child, killed_after, killed_at
from tests.bundle.support import tree_bytes, write_small


def _label(path: Path) -> str:
    return read_bundle(path, check="full").manifest.build["label"]


@pytest.fixture(params=["exchange", "two renames"])
def _both_ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "two renames":
        monkeypatch.setattr(replace, "exchange", lambda first, second: False)


def test_exchange_works_here(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert replace.exchange(tmp_path / "x", tmp_path / "y")
    assert (tmp_path / "x" / "y").exists()
    with pytest.raises(FileNotFoundError):
        replace.exchange(tmp_path / "x", tmp_path / "absent")


@pytest.mark.usefixtures("_both_ways")
def test_BND_6_save_over_a_bundle(small: Path) -> None:
    write_small(small, "two")
    assert _label(small) == "two"
    assert os.listdir(small.parent) == ["b"]


def test_a_link_to_a_bundle_is_written_through(small: Path) -> None:
    link = small.parent / "current"
    link.symlink_to("b")
    write_small(link, "two")
    assert link.is_symlink()
    assert _label(small) == "two"


@pytest.mark.parametrize("kind", ["file", "folder", "half", "fake"])
def test_what_is_no_bundle_is_not_replaced(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    else:
        out.mkdir()
        (out / "mine").write_text("mine")
    if kind in ("half", "fake"):
        (out / "manifest.json").write_text("{}")
    if kind == "fake":
        (out / "manifest.sha256").write_text("hello\n")
    before = tree_bytes(tmp_path)
    with pytest.raises(OutputExists):
        write_small(out)
    assert tree_bytes(tmp_path) == before


def test_an_empty_folder_and_a_damaged_bundle_are_replaced(small: Path) -> None:
    (small.parent / "empty").mkdir()
    assert _label(write_small(small.parent / "empty")) == "one"
    (small / "report.md").unlink()
    (small / "manifest.json").write_text("{")
    assert _label(write_small(small, "two")) == "two"


def test_BND_6_second_writer_is_refused(small: Path) -> None:
    with BundleWriter(small) as writer:
        with pytest.raises(OutputBusy):
            write_small(small, "two")
        writer.finish(Manifest({}, {}, build={"label": "three"}))
    assert _label(small) == "three"
    assert os.listdir(small.parent) == ["b"]


@pytest.mark.parametrize("old", [True, False])
def test_errors_leave_what_was_there(tmp_path: Path, old: bool) -> None:
    out = tmp_path / "b"
    if old:
        write_small(out)
    before = tree_bytes(tmp_path)
    with pytest.raises(TypeError, match="JSON"), BundleWriter(out) as writer:
        writer.add_json("report.json", {"x": object()})
    with pytest.raises(RuntimeError, match="without finish"), BundleWriter(out) as writer:
        writer.add_bytes("report.md", b"x")
    assert tree_bytes(tmp_path) == before
    assert os.listdir(tmp_path) == (["b"] if old else [])


def test_BND_6_disk_full(small: Path) -> None:
    """A limit on file size stands for a full disk: the write fails in the middle of a file."""
    before = tree_bytes(small.parent)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3_000_000, limit[1]))
    try:
        with pytest.raises(OutputFailed, match="large"), BundleWriter(small) as writer:
            writer.add_bytes("large", bytes(4_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert tree_bytes(small.parent) == before
    assert os.listdir(small.parent) == ["b"]


def test_failing_rename_leaves_the_old_bundle(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replace, "exchange", lambda first, second: False)
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".tmp-" in str(source):
            raise OSError(errno.EIO, "no")
        real(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OutputFailed, match="no"):
        write_small(small, "two")
    monkeypatch.undo()
    assert _label(small) == "one"
    assert os.listdir(small.parent) == ["b"]


# -- kills ------------------------------------------------------------------------------------------------------------


def _check_after_kill(out: Path, seen: set[str]) -> None:
    seen.add(_label(out))
    write_small(out, "after")
    assert _label(out) == "after"
    assert os.listdir(out.parent) == [out.name]


@pytest.mark.parametrize("two_renames", [False, True])
def test_BND_6_killed_at_every_step(tmp_path: Path, two_renames: bool) -> None:
    """Old or new after a kill before each of the save's file system calls (every fourth one, and the last 30)."""
    out = write_small(tmp_path / "b", "old")
    calls = count_calls(lambda: write_small(out, "old"), lambda: write_small(out, "new"), two_renames)
    assert calls > 60
    seen: set[str] = set()
    for point in sorted({*range(1, calls, 4), *range(calls - 30, calls + 1)}):
        shutil.rmtree(out)
        write_small(out, "old")
        assert killed_at(point, lambda: write_small(out, "new"), two_renames), point
        _check_after_kill(out, seen)
    assert seen == {"old", "new"}


def test_BND_6_killed_at_random_times(tmp_path: Path) -> None:
    out = write_small(tmp_path / "b", "old")
    start = time.monotonic()
    write_small(out, "old")
    span = time.monotonic() - start
    chance = random.Random(0)
    for _ in range(10):
        write_small(out, "old")
        killed_after(chance.random() * 1.5 * span, lambda: [write_small(out, "new") for _ in range(2)])
        assert _label(out) in ("old", "new")


def test_everything_is_flushed_before_it_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file, each folder and then the digest are flushed before the rename, the parent after it."""
    events: list[str] = []
    real = os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append("-> " + Path(b).name), real(a, b)))
    out = write_small(tmp_path / "b")
    moved = events.index("-> b")
    names = {path.name for path in out.rglob("*")}
    assert names <= set(events[:moved])
    assert events.index("manifest.sha256") > max(events.index(name) for name in names - {"manifest.sha256"})
    assert events[moved - 1].startswith(".b.tmp-")
    assert events[moved + 1 :] == [tmp_path.name]


@pytest.mark.usefixtures("_both_ways")
def test_BND_6_reader_during_saves(small: Path) -> None:
    """A reader sees one bundle or the other, never a mixture, while another process keeps replacing it."""

    def keep_saving() -> None:
        for index in range(1000):
            write_small(small, f"w{index}")
            time.sleep(0.02)

    child = in_child(keep_saving)
    labels = set()
    try:
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            files = read_bundle(small, check="full")
            label = files.manifest.build["label"]
            labels.add(label)
            with _replaced_meanwhile():
                assert files.json("programs/decode.json")["label"] == label
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert len(labels) > 3


def test_BND_6_reader_that_never_gets_a_turn(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is always quicker: the error says that, and not that a file is damaged."""
    real = reader.verify_files

    def replaced(root: Path, entries: Mapping[str, FileEntry]) -> None:
        write_small(small, "next")
        real(root, entries)

    monkeypatch.setattr(reader, "verify_files", replaced)
    monkeypatch.setattr(reader, "_PATIENCE_S", 0.3)
    with pytest.raises(BundleCorrupt, match="replaced each time while it was read"):
        read_bundle(small)
    monkeypatch.undo()
    assert _label(small) == "next"


@contextlib.contextmanager
def _replaced_meanwhile() -> Iterator[None]:
    """What an open bundle may say once its folder is gone: that, and nothing else."""
    try:
        yield
    except BundleCorrupt as error:
        if "open it again" not in str(error):
            raise


def test_moved_aside_bundle_comes_back_on_the_next_open(small: Path) -> None:
    small.rename(small.parent / ".b.old-0123abcd")
    assert _label(small) == "one"
    assert os.listdir(small.parent) == ["b"]


def test_moved_aside_bundle_that_cannot_be_brought_back(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    small.rename(small.parent / ".b.old-0123abcd")
    monkeypatch.setattr(reader, "FolderLock", refuse)
    with pytest.raises(NotABundle, match=r"\.b\.old-0123abcd.*Permission denied"):
        read_bundle(small)


def test_moved_aside_bundle_waits_for_its_writer(small: Path) -> None:
    """While a writer holds the lock the reader does not interfere, and sees what the writer leaves."""
    lock = replace.FolderLock(small)
    aside = small.rename(small.parent / ".b.old-0123abcd")
    threading.Timer(0.2, lambda: (aside.rename(small), lock.release())).start()
    assert _label(small) == "one"
    with pytest.raises(NotABundle):
        read_bundle(small.parent / "absent")


def test_only_own_leftovers_are_removed(small: Path) -> None:
    parent = small.parent
    for name in (".b.tmp-0123abcd", ".b.old-0123abcd", ".b.tmp-other", ".bb.tmp-0123abcd", "b.tmp-0123abcd"):
        (parent / name).mkdir()
    write_small(small, "two")
    assert sorted(os.listdir(parent)) == [".b.tmp-other", ".bb.tmp-0123abcd", "b", "b.tmp-0123abcd"]


def test_replaced_bundle_says_so(small: Path) -> None:
    files = read_bundle(small)
    weights = files.weights()
    write_small(small, "two", shift=5.0)
    assert weights["a"][0, 1] == 1.0
    for use in (lambda: files.path("report.md"), lambda: files.json("programs/decode.json"), files.weights):
        with pytest.raises(BundleCorrupt, match="open it again"):
            use()
