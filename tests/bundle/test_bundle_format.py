"""What a bundle holds comes back, and what it must not hold is refused (BND-1, BND-2, BND-3)."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import BundleWriter, Constant, Manifest, WeightItem, WeightSource, read_bundle
from deepinfer_compile.bundle import manifest as manifest_module
from deepinfer_compile.bundle.paths import MAX_ENTRIES, PathSet, check_path
from deepinfer_compile.errors import (
    BadOption,
    BundleCorrupt,
    BundlePath,
    BundleVersion,
    CompileError,
    NotABundle,
    WeightMismatch,
)
from tests.bundle.support import (
    FIRST,
    SECOND,
    edit_manifest,
    manifest_of,
    raw_safetensors,
    tree_bytes,
    write_manifest,
    write_small,
)

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


@pytest.mark.parametrize("check", ["lazy", "full"])
def test_round_trip(small: Path, check: str) -> None:
    files = read_bundle(small, check=check)
    assert files.json("programs/decode.json") == {"nodes": ["x"], "label": "one"}
    assert files.bytes("kernels/cpu/0a1b/k.so") == bytes(range(256))
    assert files.path("report.md").read_text() == "# one\n"
    weights = files.weights()
    assert list(weights) == ["a", "b"]
    assert torch.equal(weights["a"], FIRST)
    assert torch.equal(weights["b"].view(torch.int16), SECOND.view(torch.int16))
    assert files.manifest.model == {"hidden": 3}
    assert files.ledger().kept == ("a", "b")
    assert sorted(path.name for path in small.parent.iterdir()) == ["b"]


def test_bundle_moves_and_opens_through_a_link(small: Path, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    moved = small.rename(tmp_path / "deep" / "other")
    link = tmp_path / "link"
    link.symlink_to(moved)
    assert torch.equal(read_bundle(link, check="full").weights()["a"], FIRST)


def test_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    assert tree_bytes(write_small(tmp_path / "x")) == tree_bytes(write_small(tmp_path / "y"))


def test_writes_to_weights_stay_private(small: Path) -> None:
    files = read_bundle(small)
    one, two = files.weights(), files.weights()
    one["a"].fill_(-1.0)
    assert one["a"] is one["a"]
    assert torch.equal(two["a"], FIRST)
    read_bundle(small, check="full")


def test_unknown_file_and_name(small: Path) -> None:
    files = read_bundle(small)
    with pytest.raises(BundlePath):
        files.path("../b/report.md")
    with pytest.raises(KeyError):
        files.weights()["c"]
    with pytest.raises(BadOption):
        read_bundle(small, check="none")


def test_not_a_bundle(tmp_path: Path) -> None:
    for make in (lambda p: None, Path.mkdir, lambda p: p.write_text("x")):
        path = tmp_path / "p"
        make(path)
        with pytest.raises(NotABundle):
            read_bundle(path)
        shutil.rmtree(path, ignore_errors=True)
        path.unlink(missing_ok=True)


def test_every_dtype_and_odd_sizes(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        name: torch.arange(7 * torch_dtype.itemsize, dtype=torch.uint8).view(torch_dtype)
        for name, torch_dtype in ((n, getattr(torch, n)) for n in manifest_module.TORCH_DTYPES if n != "bool")
    }
    tensors |= {"bool": torch.tensor([True, False, True]), "scalar": torch.tensor(2.5), "none": torch.empty(0, 3)}
    tensors["strided"] = torch.arange(6.0).reshape(2, 3).t()
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("w", [WeightItem.of(name, tensor) for name, tensor in tensors.items()])
        dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in tensors.items()}
        constants = {name: Constant(dtypes[name], tuple(tensor.shape)) for name, tensor in tensors.items()}
        writer.finish(Manifest({}, {}, constants=constants))
    loaded = read_bundle(tmp_path / "b", check="full").weights()
    library = load_file(tmp_path / "b" / "weights" / "w.safetensors")
    assert list(loaded) == list(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        expected = tensor.contiguous().reshape(-1).view(torch.uint8)
        assert torch.equal(loaded[name].reshape(-1).view(torch.uint8), expected), name
        assert torch.equal(library[name].reshape(-1).view(torch.uint8), expected), name
        assert tensor.numel() == 0 or loaded[name].data_ptr() % 64 == 0
        assert loaded[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


# -- BND-1 ------------------------------------------------------------------------------------------------------------


def _shards(root: Path) -> list[Path]:
    return sorted((root / "weights").iterdir())


def _swap(root: Path) -> None:
    one, two = _shards(root)
    one.rename(root / "t")
    two.rename(one)
    (root / "t").rename(two)


def _replace_shard(header: dict, data: bytes, length: int | None = None):
    return lambda root: _shards(root)[0].write_bytes(raw_safetensors(header, data, length))


_A = {"dtype": "F32", "shape": [1000, 1000], "data_offsets": [0, 4]}
BND_1 = {
    "shard deleted": lambda root: _shards(root)[1].unlink(),
    "last 6 bytes cut": lambda root: os.truncate(_shards(root)[0], _shards(root)[0].stat().st_size - 6),
    "shape does not fit": _replace_shard({"a": _A}, bytes(4)),
    "header of 2**63": _replace_shard({"a": _A}, bytes(4), 1 << 63),
    "trailing bytes": lambda root: _shards(root)[0].open("ab").write(b"\0"),
    "swapped shards": _swap,
    "tensor added": lambda root: shutil.copy(_shards(root)[0], root / "weights" / "more.safetensors"),
}


@pytest.mark.parametrize("what", BND_1)
@pytest.mark.parametrize("refit", [False, True], ids=["as-is", "manifest-refitted"])
def test_BND_1_damaged_weights_are_refused(small: Path, what: str, refit: bool) -> None:
    """Also when the manifest's sizes and digests are made to fit, as a careless tool would."""
    BND_1[what](small)
    if refit:
        _refit(small)
    with pytest.raises((BundleCorrupt, BundlePath, WeightMismatch)) as caught:
        read_bundle(small, check="lazy").weights()
    assert "safetensors" in str(caught.value) or "tensor" in str(caught.value)


def _refit(root: Path) -> None:
    """Record the sizes and chunk digests of what is there now, but not the digests of weight headers."""
    from deepinfer_compile.bundle.files import hash_file

    def change(value: dict) -> None:
        for name in list(value["files"]):
            if not (root / name).exists():
                continue
            entry = hash_file(root / name)
            value["files"][name] |= {"size": entry.size, "sha256": entry.sha256, "chunks": list(entry.chunks)}

    edit_manifest(root, change)


def test_BND_1_same_shapes_swapped_are_caught_by_checksums(tmp_path: Path) -> None:
    """Two files whose headers are equal: only the data's digest can tell, so only a full check does."""
    for name in ("x", "y"):
        write_small(tmp_path / name, shift=0.0 if name == "x" else 1.0)
    name = "weights/model-00001-of-00002.safetensors"
    shutil.copyfile(tmp_path / "y" / name, tmp_path / "x" / name)
    with pytest.raises(BundleCorrupt, match="00001"):
        read_bundle(tmp_path / "x", check="full")


@pytest.mark.parametrize(
    ("constants", "found"),
    [
        ({"a": Constant("float32", (3, 2)), "b": Constant("bfloat16", (2, 2))}, "a"),
        ({"a": Constant("float64", (2, 3)), "b": Constant("bfloat16", (2, 2))}, "a"),
        ({"a": Constant("float32", (2, 3))}, "b"),
        ({**manifest_of().constants, "c": Constant("float32", (1,))}, "c"),
    ],
    ids=["shape", "dtype", "unnamed", "missing"],
)
def test_BND_1_weights_must_be_the_constants(small: Path, tmp_path: Path, constants: dict, found: str) -> None:
    def change(value: dict) -> None:
        value["constants"] = {
            name: {"dtype": c.dtype, "shape": list(c.shape), "of": "", "offset": 0, "stride": []}
            for name, c in constants.items()
        }

    edit_manifest(small, change)
    with pytest.raises(WeightMismatch, match=repr(found)):
        read_bundle(small).weights()
    with pytest.raises(WeightMismatch, match=repr(found)), BundleWriter(tmp_path / "new") as writer:
        writer.add_weights("w", [WeightItem.of("a", FIRST), WeightItem.of("b", SECOND)])
        writer.finish(manifest_of(constants=constants))
    assert not (tmp_path / "new").exists()


def test_produced_tensor_must_be_the_announced_one(tmp_path: Path) -> None:
    item = WeightItem("a", "float32", (2, 3), lambda: FIRST.t())
    with pytest.raises(WeightMismatch, match="'a'"), BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("w", [item])
    with pytest.raises(WeightMismatch, match="second"), BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("w", [WeightItem.of("a", FIRST)])
        writer.add_weights("v", [WeightItem.of("a", FIRST)])
    assert list(tmp_path.iterdir()) == []


def test_weights_elsewhere_need_a_checkpoint(tmp_path: Path) -> None:
    from deepinfer_compile.errors import MissingWeight

    with BundleWriter(tmp_path / "b") as writer:
        writer.add_json("ledger.json", {"recipes": {}, "tied": [], "kept": [], "ignored": [], "notes": []})
        writer.finish(manifest_of(weights=WeightSource("none")))
    with pytest.raises(MissingWeight, match="no checkpoint"):
        read_bundle(tmp_path / "b").weights()


# -- BND-2 ------------------------------------------------------------------------------------------------------------


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
    with pytest.raises(BundlePath), BundleWriter(tmp_path / "b") as writer:
        for name in names:
            writer.add_bytes(name, b"x")
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
    from deepinfer_compile.bundle import Checkpoint
    from deepinfer_compile.errors import UnsupportedWeightFormat

    marker = tmp_path / "marker"
    bad = pickle.dumps(_Marker(marker))
    (small / "weights" / "model-00001-of-00002.safetensors").write_bytes(bad)
    _refit(small)
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


# -- BND-3 and the manifest -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("found", "age"), [(0, "older"), (2, "newer")])
def test_BND_3_other_format_versions(small: Path, found: int, age: str) -> None:
    edit_manifest(small, lambda value: value.update(schema=found, something_new=1))
    with pytest.raises(BundleVersion, match=age):
        read_bundle(small)


def _deep(value: dict) -> None:
    value["files"]["report.md"]["chunks"].append("0" * 64)


EDITS = {
    "unknown key": lambda v: v.update(extra=1),
    "missing key": lambda v: v.pop("caches"),
    "section type": lambda v: v.update(model=[]),
    "format": lambda v: v.update(format="x"),
    "schema type": lambda v: v.update(schema=True),
    "waivers": lambda v: v.update(waivers="x"),
    "tied single": lambda v: v.update(tied=[["a"]]),
    "tied twice": lambda v: v.update(tied=[["a", "b"], ["b", "c"]]),
    "mode": lambda v: v["weights"].update(mode="pickle"),
    "size negative": lambda v: v["files"]["report.md"].update(size=-1),
    "size float": lambda v: v["files"]["report.md"].update(size=6.0),
    "size huge": lambda v: v["files"]["report.md"].update(size=1 << 60),
    "chunk count": _deep,
    "digest case": lambda v: v["files"]["report.md"].update(sha256="A" * 64),
    "file key": lambda v: v["files"]["report.md"].update(mode=7),
    "header digest lost": lambda v: v["files"]["weights/model-00001-of-00002.safetensors"].update(header_sha256=""),
    "header digest gained": lambda v: v["files"]["report.md"].update(header_sha256="0" * 64),
    "dtype": lambda v: v["constants"]["a"].update(dtype="object"),
    "shape": lambda v: v["constants"]["a"].update(shape=[True, 3]),
    "view of nothing": lambda v: v["constants"]["a"].update(of="z"),
    "stride without view": lambda v: v["constants"]["a"].update(stride=[1, 1]),
    "control character": lambda v: v["waivers"].append("a\u0007"),
}


@pytest.mark.parametrize("what", EDITS)
def test_manifest_is_read_strictly(small: Path, what: str) -> None:
    edit_manifest(small, EDITS[what])
    with pytest.raises(BundleCorrupt):
        read_bundle(small)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"format": "deepinfer-bundle", "schema": 1, "schema": 1}',
        b'{"format": "deepinfer-bundle", "schema": NaN}',
        b"\xff",
        b"[" * 100_000,
        b'{"schema": ' + b"9" * 10_000 + b"}",
    ],
)
def test_manifest_that_is_not_json(small: Path, data: bytes) -> None:
    write_manifest(small, data)
    with pytest.raises(BundleCorrupt):
        read_bundle(small)


def test_incomplete_bundle(small: Path) -> None:
    (small / "manifest.sha256").unlink()
    with pytest.raises(BundleCorrupt, match="never completed"):
        read_bundle(small)


@pytest.mark.parametrize("section", [{1: 2}, {"x": float("nan")}, {"x": {1, 2}}, {"x": torch.float32}])
def test_sections_must_be_plain_json(tmp_path: Path, section: dict) -> None:
    with pytest.raises(TypeError), BundleWriter(tmp_path / "b") as writer:
        writer.finish(Manifest(section, {}))
    assert list(tmp_path.iterdir()) == []


def test_every_section_survives(tmp_path: Path) -> None:
    sections = {name: {"k": [1, 2.5, None, True, {"x": "é"}]} for name in manifest_module.SECTIONS}
    constants = {"a": Constant("float32", (2, 3)), "v": Constant("float32", (3,), "a", 12, (1,))}
    wanted = Manifest(**sections, constants=constants, waivers=("w",), tied=(("a", "t"),))
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("w", [WeightItem.of("a", FIRST)])
        writer.finish(wanted)
    files = read_bundle(tmp_path / "b", check="full")
    for name in (*sections, "constants", "waivers", "tied", "weights", "schema"):
        assert getattr(files.manifest, name) == getattr(wanted, name)
    assert json.loads((tmp_path / "b" / "manifest.json").read_text())["model"] == sections["model"]
    weights = files.weights()
    assert list(weights) == ["a", "v", "t"]
    assert weights["t"] is weights["a"]
    assert torch.equal(weights["v"], FIRST[1])


@pytest.mark.parametrize(
    "view",
    [
        Constant("float32", (4,), "a", 12, (1,)),
        Constant("float32", (2, 3), "a", 0, (4, 1)),
        Constant("float32", (1,), "a", 2, (1,)),
        Constant("int64", (1,), "a", 4, (1,)),
        Constant("float32", (2,), "a", 0, (1 << 49,)),
    ],
)
def test_views_stay_inside_their_tensor(small: Path, view: Constant) -> None:
    def change(value: dict) -> None:
        value["constants"]["v"] = {**view.__dict__, "shape": list(view.shape), "stride": list(view.stride)}

    edit_manifest(small, change)
    with pytest.raises(WeightMismatch, match="'v'"):
        read_bundle(small).weights()
