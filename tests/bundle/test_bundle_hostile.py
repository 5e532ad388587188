"""Names, links and pickles that must not get in or out (BND-2)."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path

import pytest

from deepinfer_compile.bundle import BundleWriter, Checkpoint, Manifest, read_bundle
from deepinfer_compile.bundle.paths import MAX_ENTRIES, PathSet, check_path
from deepinfer_compile.errors import BundleCorrupt, BundlePath, CompileError, UnsupportedWeightFormat
from tests.bundle.support import edit_manifest, refit

BAD_NAMES = [
    "../x",
    "/x",
    "a/../../x",
    "C:\\x",
    "C:/x",
    "..\\x",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\x7fb",
    "",
    ".",
    "./a",
    "a//b",
    "a/",
    ".hidden",
    "end.",
    "end ",
    "x:stream",
    "é",
    "a" * 256,
    "a/" * 600 + "a",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_BND_2_bad_names_are_refused_on_save_and_load(small: Path, tmp_path: Path, name: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(BundlePath):
        check_path(name)
    with pytest.raises(BundlePath), BundleWriter(tmp_path / "new") as writer:
        writer.add_bytes(name, b"x")
    edit_manifest(small, lambda value: value["files"].update({name: value["files"]["report.md"]}))
    with pytest.raises((BundlePath, BundleCorrupt)):
        read_bundle(small)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "names", [("a", "A"), ("a/x", "A/y"), ("a", "a/b"), ("a/b", "a"), ("a/b/c", "a/B"), ("x", "x"), ("MANIFEST.json",)]
)
def test_BND_2_colliding_names(tmp_path: Path, names: tuple[str, ...]) -> None:
    def save() -> None:
        with BundleWriter(tmp_path / "b") as writer:
            for name in names:
                writer.add_bytes(name, b"x")

    with pytest.raises(BundlePath):
        save()
    assert list(tmp_path.iterdir()) == []


def _outside(root: Path) -> Path:
    path = root.parent / "outside"
    path.write_text("# one\n")
    return path


def _link(root: Path) -> None:
    (root / "report.md").unlink()
    (root / "report.md").symlink_to(_outside(root))


def _hard_link(root: Path) -> None:
    (root / "report.md").unlink()
    os.link(_outside(root), root / "report.md")


def _fifo(root: Path) -> None:
    (root / "report.md").unlink()
    os.mkfifo(root / "report.md")


def _folder_link(root: Path) -> None:
    shutil.move(root / "kernels", root.parent / "kernels")
    (root / "kernels").symlink_to(root.parent / "kernels")


def _manifest_link(root: Path) -> None:
    (root / "manifest.json").rename(root.parent / "m")
    (root / "manifest.json").symlink_to(root.parent / "m")


BND_2 = {
    "symbolic link": _link,
    "hard link": _hard_link,
    "fifo": _fifo,
    "folder link": _folder_link,
    "manifest link": _manifest_link,
    "folder for a file": lambda root: ((root / "report.md").unlink(), (root / "report.md").mkdir()),
    "extra file": lambda root: (root / "kernels" / "more").write_text("x"),
    "extra folder": lambda root: (root / "kernels" / "more").mkdir(),
    "extra link": lambda root: (root / "more").symlink_to("/etc"),
    "manifest fifo": lambda root: ((root / "manifest.json").unlink(), os.mkfifo(root / "manifest.json")),
}


@pytest.mark.parametrize("what", BND_2)
def test_BND_2_only_plain_listed_files(small: Path, what: str) -> None:
    BND_2[what](small)
    with pytest.raises((BundlePath, BundleCorrupt)):
        read_bundle(small)


def test_BND_2_too_many_entries(small: Path) -> None:
    paths = PathSet()
    for index in range(MAX_ENTRIES):
        paths.add(f"f{index}")
    with pytest.raises(BundlePath, match="at most"):
        paths.add("one-more")
    edit_manifest(small, lambda v: v["files"].update({f"f{i}": v["files"]["report.md"] for i in range(MAX_ENTRIES)}))
    with pytest.raises(BundleCorrupt, match="entries"):
        read_bundle(small)


def test_BND_2_giant_manifest_is_not_read(small: Path) -> None:
    with (small / "manifest.json").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleCorrupt, match="more than"):
        read_bundle(small)


class _Marker:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return (Path.touch, (self.path,))


def test_BND_2_pickles_are_never_loaded(small: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    bad = pickle.dumps(_Marker(marker))
    (small / "weights" / "model-00001-of-00002.safetensors").write_bytes(bad)
    refit(small)
    with pytest.raises(CompileError):
        read_bundle(small, check="full").weights()
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(bad)
    with pytest.raises(UnsupportedWeightFormat, match="pickle"):
        Checkpoint.open(folder)
    assert not marker.exists()


def test_BND_2_sources_are_plain_files(tmp_path: Path) -> None:
    real = tmp_path / "blob"
    real.write_text("x")
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "fifo")
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_file("tokenizer/t.json", tmp_path / "link")
        for source in ("fifo", "absent", "."):
            with pytest.raises(BundlePath):
                writer.add_file("x", tmp_path / source)
        writer.finish(Manifest({}, {}))
    assert read_bundle(tmp_path / "b").bytes("tokenizer/t.json") == b"x"
