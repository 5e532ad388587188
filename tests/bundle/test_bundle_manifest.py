"""The manifest is read strictly, and every section survives (BND-3)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import BundleWriter, Constant, Manifest, WeightItem, read_bundle
from deepinfer_compile.bundle.manifest import SECTIONS
from deepinfer_compile.errors import BundleCorrupt, BundleVersion, WeightMismatch
from tests.bundle.support import FIRST, edit_manifest, write_manifest


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
    sections = {name: {"k": [1, 2.5, None, True, {"x": "é"}]} for name in SECTIONS}
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
