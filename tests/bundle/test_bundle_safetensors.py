"""Weight files: at least as strict as the library, mapped at any size (BND-1 for checkpoints, BND-5)."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from deepinfer_compile.bundle import Checkpoint, DictSource
from deepinfer_compile.bundle.safetensors_io import PAD, plan_layout, read_header
from deepinfer_compile.errors import (
    BadWeightFile,
    MissingShard,
    MissingWeight,
    NotAModelFolder,
    UnsupportedWeightFormat,
)
from tests.bundle.support import raw_safetensors

ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
TWO = {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}

BAD_FILES = {
    "empty": b"",
    "seven bytes": bytes(7),
    "length 2**63": raw_safetensors({"a": ONE}, bytes(4), 1 << 63),
    "length past end": raw_safetensors({"a": ONE}, bytes(4), 1000),
    "not json": raw_safetensors(b"{nope", b""),
    "list": raw_safetensors(b"[]", b""),
    "leading space": raw_safetensors(b' {"a": 1}', b""),
    "twice": raw_safetensors(b'{"a": {}, "a": {}}', b""),
    "missing key": raw_safetensors({"a": {"dtype": "F32", "shape": [1]}}, bytes(4)),
    "extra key": raw_safetensors({"a": {**ONE, "x": 1}}, bytes(4)),
    "unknown dtype": raw_safetensors({"a": {**ONE, "dtype": "Q4"}}, bytes(4)),
    "dtype type": raw_safetensors({"a": {**ONE, "dtype": ["F32"]}}, bytes(4)),
    "negative size": raw_safetensors({"a": {**ONE, "shape": [-1, -1]}}, bytes(4)),
    "bool size": raw_safetensors({"a": {**ONE, "shape": [True]}}, bytes(4)),
    "shape too big": raw_safetensors({"a": {**ONE, "shape": [1000, 1000]}}, bytes(4)),
    "overflowing shape": raw_safetensors({"a": {**ONE, "shape": [1 << 40, 1 << 40]}}, bytes(4)),
    "many dimensions": raw_safetensors({"a": {**ONE, "shape": [1] * 40}}, bytes(4)),
    "offsets reversed": raw_safetensors({"a": {**ONE, "data_offsets": [4, 0]}}, bytes(4)),
    "one range twice": raw_safetensors({"a": ONE, "b": ONE}, bytes(4)),
    "overlap": raw_safetensors({"a": ONE, "b": {**ONE, "data_offsets": [2, 6]}}, bytes(6)),
    "hole": raw_safetensors({"a": ONE, "b": {**ONE, "data_offsets": [8, 12]}}, bytes(12)),
    "hole at start": raw_safetensors({"b": TWO}, bytes(8)),
    "cut by 6": raw_safetensors({"a": ONE, "b": TWO}, bytes(2)),
    "trailing": raw_safetensors({"a": ONE}, bytes(5)),
    "half a byte": raw_safetensors({"a": {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}}, bytes(2)),
    "metadata": raw_safetensors({"__metadata__": {"a": 1}}, b""),
    "nested": raw_safetensors(b'{"a":' * 50_000, b""),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_BND_1_bad_files_are_refused(tmp_path: Path, what: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD_FILES[what])
    with pytest.raises(BadWeightFile, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_BND_1_the_tensor_is_named(tmp_path: Path) -> None:
    for what in ("shape too big", "overlap", "cut by 6", "unknown dtype"):
        (tmp_path / "model.safetensors").write_bytes(BAD_FILES[what])
        with pytest.raises(BadWeightFile, match=r"tensors? '[ab]'"):
            Checkpoint.open(tmp_path)


def test_BND_1_giant_header_costs_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((90_000_001).to_bytes(8, "little") + b"{")
        file.truncate(1 << 40)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for length in (1 << 63, (1 << 64) - 1, 200_000_000):
        with path.open("r+b") as file:
            file.write(length.to_bytes(8, "little"))
        with pytest.raises(BadWeightFile, match="header claims"):
            read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_accepted_by_us_means_accepted_by_the_library(tmp_path: Path, data: st.DataObject) -> None:
    """Random mutations of a good file: whatever we accept, the library reads to the same tensors."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(3.0), "b": torch.arange(4, dtype=torch.int16)}, path)
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        raw[at] = data.draw(st.sampled_from([*b'0123456789abF{}[]",: ', 0, 255]))
    path.write_bytes(bytes(raw[: data.draw(st.sampled_from([len(raw), len(raw) - 1]))]))
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except (BadWeightFile, UnsupportedWeightFormat):
        return
    expected = load_file(path)
    for name in checkpoint.names():
        got = checkpoint.tensor(name)
        assert got.dtype == expected[name].dtype
        assert got.shape == expected[name].shape
        assert torch.equal(got.reshape(-1).view(torch.uint8), expected[name].reshape(-1).view(torch.uint8))


def test_layout_is_aligned_and_padded() -> None:
    layout = plan_layout([("a", "F32", (3,)), ("b", "U8", (64,)), ("c", "I64", (1,))], {"format": "pt"})
    assert layout.pads == (52, 0, 0)
    assert len(layout.head) % 64 == 0
    table = json.loads(layout.head[8:])
    assert table[f"{PAD}0"] == {"dtype": "U8", "shape": [52], "data_offsets": [12, 64]}
    for name in (PAD + "1", "__metadata__"):
        with pytest.raises(ValueError, match="reserved"):
            plan_layout([(name, "U8", (1,))], {})
    with pytest.raises(ValueError, match="repeated"):
        plan_layout([("a", "U8", (1,)), ("a", "U8", (1,))], {})


def test_empty_file_of_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(plan_layout([], {}).head)
    assert Checkpoint.open(tmp_path).names() == set()


def test_unaligned_files_are_read_right(tmp_path: Path) -> None:
    header = {
        "x": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "y": {"dtype": "F64", "shape": [2], "data_offsets": [1, 17]},
    }
    data = b"\x07" + torch.tensor([1.5, -2.0], dtype=torch.float64).numpy().tobytes()
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, data))
    tensor = Checkpoint.open(tmp_path).tensor("y")
    assert tensor.tolist() == [1.5, -2.0]
    assert tensor.data_ptr() % 8 == 0


def test_sub_byte_formats_have_no_tensor(tmp_path: Path) -> None:
    header = {"x": {"dtype": "F4", "shape": [2, 4], "data_offsets": [0, 4]}}
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, bytes(4)))
    checkpoint = Checkpoint.open(tmp_path)
    for read in (checkpoint.spec, checkpoint.tensor):
        with pytest.raises(UnsupportedWeightFormat, match="F4"):
            read("x")


# -- sharded checkpoints ----------------------------------------------------------------------------------------------


def _sharded(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {"a": torch.arange(4.0), "b": torch.arange(4.0) + 10, "c": torch.tensor(3)}
    save_file({"a": tensors["a"], "c": tensors["c"]}, folder / "m-1.safetensors")
    save_file({"b": tensors["b"]}, folder / "m-2.safetensors")
    _index(folder, {"a": "m-1.safetensors", "b": "m-2.safetensors", "c": "m-1.safetensors"})
    return tensors


def _index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    tensors = _sharded(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names() == set(tensors)
    assert checkpoint.file_of("b") == "m-2.safetensors"
    assert checkpoint.notes == []
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor)
        assert checkpoint.spec(name) == (tensor.dtype, tuple(tensor.shape))
    with pytest.raises(MissingWeight, match="'zz'"):
        checkpoint.tensor("zz")


def test_BND_1_missing_shard(tmp_path: Path) -> None:
    _sharded(tmp_path)
    (tmp_path / "m-2.safetensors").unlink()
    with pytest.raises(MissingShard, match=r"m-2\.safetensors"):
        Checkpoint.open(tmp_path)


def test_BND_1_swapped_shards(tmp_path: Path) -> None:
    _sharded(tmp_path)
    _index(tmp_path, {"a": "m-2.safetensors", "b": "m-1.safetensors", "c": "m-1.safetensors"})
    with pytest.raises(MissingWeight, match=r"'a'[\s\S]*m-2\.safetensors"):
        Checkpoint.open(tmp_path)


def test_BND_1_tensor_absent_from_the_index_is_ignored_with_a_note(tmp_path: Path) -> None:
    _sharded(tmp_path)
    _index(tmp_path, {"a": "m-1.safetensors", "b": "m-2.safetensors"})
    checkpoint = Checkpoint.open(tmp_path)
    assert "c" not in checkpoint
    assert checkpoint.notes == ["model.safetensors.index.json does not name 1 tensors of its files, ignored: c"]


def test_BND_1_duplicate_tensor_in_two_shards(tmp_path: Path) -> None:
    _sharded(tmp_path)
    save_file({"b": torch.zeros(4), "a": torch.zeros(4)}, tmp_path / "m-2.safetensors")
    with pytest.raises(BadWeightFile, match=r"'a' is in m-1\.safetensors too"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("file", ["../m-1.safetensors", "/etc/passwd", "x\\y", ""])
def test_BND_2_index_must_stay_in_the_folder(tmp_path: Path, file: str) -> None:
    _sharded(tmp_path)
    _index(tmp_path, {"a": file})
    with pytest.raises(NotAModelFolder):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}, {"a": 1}])
def test_bad_index(tmp_path: Path, weight_map: object) -> None:
    _sharded(tmp_path)
    _index(tmp_path, weight_map)
    with pytest.raises(NotAModelFolder, match="weight_map"):
        Checkpoint.open(tmp_path)


def test_folders_without_weights(tmp_path: Path) -> None:
    with pytest.raises(NotAModelFolder):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(NotAModelFolder):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(NotAModelFolder, match=r"config\.json"):
        Checkpoint.open(tmp_path)


def test_shards_behind_links_are_followed(tmp_path: Path) -> None:
    """A download cache keeps files elsewhere and links to them."""
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.arange(3.0)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snap").mkdir()
    (tmp_path / "snap" / "model.safetensors").symlink_to("../blobs/0123")
    assert Checkpoint.open(tmp_path / "snap").tensor("a").tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("x.qweight", "GPTQ"),
        ("x.qzeros", "AWQ"),
        ("x.absmax", "bitsandbytes"),
        ("x.weight.quant_state.bitsandbytes__nf4", "bitsandbytes"),
        ("x.weight_scale_2", "NVFP4"),
        ("x.weight_packed", "compressed-tensors"),
    ],
)
def test_formats_known_by_their_tensors_are_refused(tmp_path: Path, name: str, form: str) -> None:
    save_file({"ok": torch.zeros(1), name: torch.zeros(4, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedWeightFormat, match=form):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("quantization", "form"),
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4"),
        ({"quant_method": "compressed-tensors"}, "compressed-tensors"),
        ({}, "None"),
        ("x", "x"),
    ],
)
def test_formats_known_by_their_config_are_refused(tmp_path: Path, quantization: object, form: str) -> None:
    save_file({"ok": torch.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    with pytest.raises(UnsupportedWeightFormat, match=form):
        Checkpoint.open(tmp_path)


def test_gguf_and_pickles_are_refused(tmp_path: Path) -> None:
    for name, form in (("m.gguf", "GGUF"), ("pytorch_model.bin", "pickle")):
        (tmp_path / name).write_bytes(b"x")
        with pytest.raises(UnsupportedWeightFormat, match=form):
            Checkpoint.open(tmp_path)


def test_dict_source() -> None:
    source = DictSource({"a": torch.zeros(2, requires_grad=True)})
    assert source.spec("a") == (torch.float32, (2,))
    assert not source.tensor("a").requires_grad
    with pytest.raises(MissingWeight):
        source.tensor("b")


# -- BND-5 ------------------------------------------------------------------------------------------------------------

PATTERN = torch.arange(1000, dtype=torch.int32) * 7 - 3


def _sparse(path: Path, size: int) -> None:
    """A file of one tensor of `size` bytes of zeros that takes no disk, and then a pattern."""
    pad = -size % 4
    header = {
        "big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
        "pad": {"dtype": "U8", "shape": [pad], "data_offsets": [size, size + pad]},
        "last": {"dtype": "I32", "shape": [1000], "data_offsets": [size + pad, size + pad + 4000]},
    }
    head = raw_safetensors(json.dumps(header).encode().ljust(504), b"")
    with path.open("wb") as file:
        file.write(head)
        file.seek(len(head) + size + pad)
        file.write(PATTERN.numpy().tobytes())


def _private_mb() -> float:
    """Anonymous memory of this process in MB: what mapping must not cost."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no RssAnon")


@pytest.mark.parametrize("size", [(2 << 30) - 1, (2 << 30) + 1, (4 << 30) + 1])
def test_BND_5_large_weights_are_mapped(tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.safetensors"
    _sparse(path, size)
    before = _private_mb()
    checkpoint = Checkpoint.open(tmp_path)
    big, last = checkpoint.tensor("big"), checkpoint.tensor("last")
    assert torch.equal(last, PATTERN)
    assert big.shape == (size,)
    assert big[-1] == 0
    assert _private_mb() - before < 50
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(BadWeightFile, match="'last'"):
        Checkpoint.open(tmp_path)


def test_BND_5_large_weights_in_a_bundle(tmp_path: Path) -> None:
    """The lazy check of a 4 GiB weight file reads its header only."""
    from deepinfer_compile.bundle import BundleWriter, Constant, Manifest, WeightItem, read_bundle
    from deepinfer_compile.bundle.files import chunk_count, combined
    from tests.bundle.support import edit_manifest

    size = (4 << 30) + 1
    constants = {"big": Constant("uint8", (size,)), "pad": Constant("uint8", (3,)), "last": Constant("int32", (1000,))}
    with BundleWriter(tmp_path / "b") as writer:
        writer.add_weights("w", [WeightItem.of("last", PATTERN)])
        writer.finish(Manifest({}, {}, constants={"last": constants["last"]}))
    path = tmp_path / "b" / "weights" / "w.safetensors"
    _sparse(path, size)
    total = path.stat().st_size
    chunks = ["0" * 64] * chunk_count(total)

    def change(value: dict) -> None:
        value["files"]["weights/w.safetensors"] = {
            "size": total,
            "chunks": chunks,
            "sha256": combined(chunks),
            "header_sha256": read_header(path).sha256,
        }
        extra = {
            n: {"dtype": c.dtype, "shape": list(c.shape), "of": "", "offset": 0, "stride": []}
            for n, c in constants.items()
        }
        value["constants"] = extra

    edit_manifest(tmp_path / "b", change)
    before = _private_mb()
    weights = read_bundle(tmp_path / "b").weights()
    assert torch.equal(weights["last"], PATTERN)
    assert weights["big"].shape == (size,)
    assert _private_mb() - before < 50
    with safe_open(path, "pt") as library:
        assert torch.equal(library.get_tensor("last"), PATTERN)
