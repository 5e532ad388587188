"""Small bundles, safetensors files made by hand, and the files of a folder as bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from deepinfer_compile.bundle import (
    BundleWriter,
    Checkpoint,
    Constant,
    Ledger,
    Manifest,
    TensorSource,
    WeightItem,
    WeightSource,
    constants_table,
    split_shards,
    weight_items,
)
from deepinfer_compile.bundle.files import hash_file

FIRST = torch.arange(6, dtype=torch.float32).reshape(2, 3)
SECOND = torch.tensor([[1.5, -0.0], [float("nan"), 3.0]], dtype=torch.bfloat16)


def manifest_of(**changes: object) -> Manifest:
    fields: dict[str, object] = {
        "model": {"hidden": 3},
        "programs": {"decode": {"file": "programs/decode.json"}},
        "constants": {"a": Constant("float32", (2, 3)), "b": Constant("bfloat16", (2, 2))},
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def write_small(path: Path, label: str = "one", shift: float = 0.0) -> Path:
    """A bundle with two weight files of one tensor each, a program, a kernel and a report."""
    with BundleWriter(path) as writer:
        writer.add_json("programs/decode.json", {"nodes": ["x"], "label": label})
        writer.add_bytes("kernels/cpu/0a1b/k.so", bytes(range(256)))
        writer.add_bytes("report.md", f"# {label}\n".encode())
        writer.add_weights("model-00001-of-00002", [WeightItem.of("a", FIRST + shift)])
        writer.add_weights("model-00002-of-00002", [WeightItem.of("b", SECOND)])
        writer.add_json("ledger.json", {"recipes": {}, "tied": [], "kept": ["a", "b"], "ignored": [], "notes": []})
        writer.finish(manifest_of(build={"label": label}))
    return path


def edit_manifest(root: Path, change: Callable[[dict], object]) -> None:
    """Change manifest.json through a function on its JSON value, and make its digest fit again."""
    value = json.loads((root / "manifest.json").read_text())
    change(value)
    write_manifest(root, json.dumps(value).encode())


def write_manifest(root: Path, data: bytes) -> None:
    (root / "manifest.json").write_bytes(data)
    (root / "manifest.sha256").write_text(hashlib.sha256(data).hexdigest() + "\n")


def raw_safetensors(header: dict | bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file exactly as told, right or wrong."""
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(body) if length is None else length).to_bytes(8, "little") + body + data


def tree_bytes(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def refit(root: Path) -> None:
    """Record the sizes and chunk digests of what is there now, but not the digests of weight headers."""

    def change(value: dict) -> None:
        for name in list(value["files"]):
            if not (root / name).exists():
                continue
            entry = hash_file(root / name)
            value["files"][name] |= {"size": entry.size, "sha256": entry.sha256, "chunks": list(entry.chunks)}

    edit_manifest(root, change)


def checkpoint(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return Checkpoint.open(folder)


def write_bundle(path: Path, wanted: dict, ledger: Ledger, source: TensorSource, weights: WeightSource) -> None:
    with BundleWriter(path) as writer:
        if weights.mode == "copy":
            for shard, items in split_shards(weight_items(ledger, source), 100):
                writer.add_weights(shard, items)
        writer.add_json("ledger.json", ledger.to_json())
        writer.finish(Manifest({}, {}, constants=constants_table(wanted), tied=ledger.tied, weights=weights))
