"""Tensors that share memory are stored once and come back sharing (BND-4)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import BundleWriter, Manifest, WeightFiles, pack, read_bundle
from deepinfer_compile.errors import TiedWeightConflict


def save(path: Path, tensors: dict[str, torch.Tensor], tied: list[tuple[str, ...]] | None = None) -> WeightFiles:
    packed = pack(tensors, tied or [])
    with BundleWriter(path) as writer:
        writer.add_weights("w", packed.items)
        writer.finish(Manifest({}, {}, constants=packed.constants, tied=packed.tied))
    return read_bundle(path, check="full").weights()


def data_bytes(path: Path) -> int:
    """Bytes of tensor data in the weight file, without the header."""
    file = path / "weights" / "w.safetensors"
    return file.stat().st_size - 8 - int.from_bytes(file.read_bytes()[:8], "little")


def same(loaded: WeightFiles, tensors: dict[str, torch.Tensor], strides: bool = True) -> None:
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype, name
        assert loaded[name].shape == tensor.shape, name
        assert not strides or tensor.numel() == 0 or loaded[name].stride() == tensor.stride(), name
        assert torch.equal(loaded[name], tensor), name


def recipe_tensors() -> dict[str, torch.Tensor]:
    base = torch.arange(6.0)
    return {
        "low": base[:2],
        "high": base[2:5],
        "turned": base.view(2, 3).t(),
        "none": base[3:3],
        "base": base,
        "tie": torch.arange(4.0) + 100,
        "tie_copy": torch.arange(4.0) + 100,
    }


def test_BND_4_views_slices_and_ties(tmp_path: Path) -> None:
    tensors = recipe_tensors()
    loaded = save(tmp_path / "b", tensors, [("tie", "tie_copy")])
    same(loaded, tensors)
    assert loaded["tie"] is loaded["tie_copy"]
    loaded["base"].fill_(-1.0)
    for name in ("low", "high", "turned"):
        assert (loaded[name] == -1).all(), name
    loaded["turned"][0, 1] = 9
    assert loaded["base"][3] == 9
    assert torch.equal(tensors["base"], torch.arange(6.0))
    assert data_bytes(tmp_path / "b") == 64 + 16
    names = {item.name for item in pack(tensors, [("tie", "tie_copy")]).items}
    assert names == {"base", "tie", "none"}


def test_BND_4_size_is_the_unique_bytes(tmp_path: Path) -> None:
    base = torch.randn(1 << 16)
    tensors = {f"v{i}": base[i * 4096 :] for i in range(8)} | {"t": base.view(256, 256).t(), "base": base}
    same(save(tmp_path / "b", tensors), tensors)
    assert data_bytes(tmp_path / "b") == base.nbytes


def test_the_cover_is_chosen_not_the_first(tmp_path: Path) -> None:
    base = torch.arange(100.0)
    assert [item.name for item in pack({"first": base[:10], "whole": base, "last": base[50:]}).items] == ["whole"]


def test_overlap_without_a_cover(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tensors = {"x": base[1:6], "y": base[4:9]}
    loaded = save(tmp_path / "b", tensors)
    same(loaded, tensors)
    loaded["x"][4] = -5
    assert loaded["y"][1] == -5
    assert data_bytes(tmp_path / "b") == 8 * 4
    assert set(loaded) == {"x", "y", "x.storage"}


def test_disjoint_slices_are_stored_apart(tmp_path: Path) -> None:
    base = torch.arange(1000.0)
    tensors = {"x": base[:3], "y": base[900:902]}
    same(save(tmp_path / "b", tensors), tensors)
    assert data_bytes(tmp_path / "b") == 64 + 8


def test_alone_but_not_contiguous(tmp_path: Path) -> None:
    """Dense in another order: kept as it is. With gaps: a contiguous copy, and nothing from the gaps."""
    secret = torch.full((4, 100), 7.0)
    secret[:, 0] = torch.arange(4.0)
    dense = torch.arange(6.0).view(2, 3).t()
    loaded = save(tmp_path / "b", {"dense": dense, "column": secret[:, 0], "wide": torch.ones(1).expand(5)})
    same(loaded, {"dense": dense})
    same(loaded, {"column": secret[:, 0], "wide": torch.ones(5)}, strides=False)
    raw = (tmp_path / "b" / "weights" / "w.safetensors").read_bytes()
    assert torch.tensor(7.0).numpy().tobytes() not in raw


def test_views_of_other_dtypes(tmp_path: Path) -> None:
    base = torch.arange(8, dtype=torch.int32)
    tensors = {"bytes": base.view(torch.uint8)[4:20], "half": base.view(torch.int16)[6:14]}
    loaded = save(tmp_path / "b", tensors)
    same(loaded, tensors)
    tensors["base"] = base
    loaded = save(tmp_path / "b", tensors)
    same(loaded, tensors)
    loaded["base"].zero_()
    assert not loaded["half"].any()


def test_ties_to_views_and_conflicts(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"base": base, "part": base[2:4], "copy": base[2:4].clone()}
    loaded = save(tmp_path / "b", tensors, [("part", "copy")])
    same(loaded, tensors)
    loaded["base"].zero_()
    assert not loaded["copy"].any()
    with pytest.raises(TiedWeightConflict, match="part and base"):
        pack({"part": base[:2], "base": base}, [("base", "part")])


def test_same_tensor_twice_without_a_declared_tie(tmp_path: Path) -> None:
    one = torch.arange(3.0)
    loaded = save(tmp_path / "b", {"x": one, "y": one})
    loaded["x"].fill_(5)
    assert loaded["y"].tolist() == [5, 5, 5]
    assert data_bytes(tmp_path / "b") == 12


def test_loaded_tensors_can_be_saved_again(tmp_path: Path) -> None:
    first = dict(save(tmp_path / "b", recipe_tensors(), [("tie", "tie_copy")]))
    again = save(tmp_path / "c", first)
    same(again, recipe_tensors())
    assert data_bytes(tmp_path / "c") == data_bytes(tmp_path / "b")
