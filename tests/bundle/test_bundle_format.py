"""What a bundle holds comes back, and what it must not hold is refused (BND-1)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import BundleWriter, Constant, Manifest, WeightItem, WeightSource, read_bundle
from deepinfer_compile.bundle import manifest as manifest_module
from deepinfer_compile.errors import (
    BadOption,
    BundleCorrupt,
    BundlePath,
    NotABundle,
    WeightMismatch,
)
from tests.bundle.support import (
    FIRST,
    SECOND,
    edit_manifest,
    manifest_of,
    raw_safetensors,
    refit,
    tree_bytes,
    write_small,
)


def write(path: Path, shards: dict[str, list[WeightItem]], constants: dict[str, Constant]) -> None:
    with BundleWriter(path) as writer:
        for shard, items in shards.items():
            writer.add_weights(shard, items)
        writer.finish(manifest_of(constants=constants))


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
@pytest.mark.parametrize("fitted", [False, True], ids=["as-is", "manifest-refitted"])
def test_BND_1_damaged_weights_are_refused(small: Path, what: str, fitted: bool) -> None:
    """Also when the manifest's sizes and digests are made to fit, as a careless tool would."""
    BND_1[what](small)
    if fitted:
        refit(small)
    with pytest.raises((BundleCorrupt, BundlePath, WeightMismatch)) as caught:
        read_bundle(small, check="lazy").weights()
    assert "safetensors" in str(caught.value) or "tensor" in str(caught.value)


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
    with pytest.raises(WeightMismatch, match=repr(found)):
        write(tmp_path / "new", {"w": [WeightItem.of("a", FIRST), WeightItem.of("b", SECOND)]}, constants)
    assert not (tmp_path / "new").exists()


def test_produced_tensor_must_be_the_announced_one(tmp_path: Path) -> None:
    item = WeightItem("a", "float32", (2, 3), lambda: FIRST.t())
    with pytest.raises(WeightMismatch, match="'a'"):
        write(tmp_path / "b", {"w": [item]}, {})
    with pytest.raises(WeightMismatch, match="second"):
        write(tmp_path / "b", {"w": [WeightItem.of("a", FIRST)], "v": [WeightItem.of("a", FIRST)]}, {})
    assert list(tmp_path.iterdir()) == []


def test_weights_elsewhere_need_a_checkpoint(tmp_path: Path) -> None:
    from deepinfer_compile.errors import MissingWeight

    with BundleWriter(tmp_path / "b") as writer:
        writer.add_json("ledger.json", {"recipes": {}, "tied": [], "kept": [], "ignored": [], "notes": []})
        writer.finish(manifest_of(weights=WeightSource("none")))
    with pytest.raises(MissingWeight, match="no checkpoint"):
        read_bundle(tmp_path / "b").weights()
