"""The safetensors file format, read strictly and written aligned.

A file is 8 bytes of header length (little endian), a JSON header, and the tensors' bytes. The reader is at least as
strict as the `safetensors` library (no overlap, no hole, no trailing byte, sizes agree) and also bounds what it reads
before it reads it. The writer starts every tensor on a 64-byte boundary, so that kernels may use it in place; where a
tensor's size is no multiple of 64 a padding tensor named `__pad__.N` fills the gap, since the format allows no holes.
This file knows names and bytes only; `mapped.py` turns them into tensors. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.paths import open_regular
from deepinfer_compile.errors import BadWeightFile

ALIGN = 64
MAX_HEADER = 100_000_000
"""Bytes of JSON header, the bound of the format's own library."""
PAD = "__pad__."
_MAX_SIZE = 1 << 50

BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Every dtype name of the format and its width in bits."""

TORCH_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""torch dtype name -> name in the file. The sub-byte formats have no torch tensor of their own."""
FILE_DTYPES = {file: torch for torch, file in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file. dtype: name in the file. start, end: byte range counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a file holds, in the order of its bytes. sha256: of the length field and the JSON. size: of the file."""

    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]
    sha256: str
    size: int


def read_header(path: Path, name: str = "") -> Header:
    """Read and check the header of one file; `name` stands for it in messages. Raises BadWeightFile."""
    shown = name or path.name
    try:
        fd = open_regular(Path(os.path.realpath(path)))
    except OSError as error:
        raise BadWeightFile(file=shown, reason=f"it cannot be read: {error.strerror or error}") from None
    with os.fdopen(fd, "rb") as file:
        size = os.fstat(fd).st_size
        head = file.read(8)
        if len(head) < 8:
            raise BadWeightFile(file=shown, reason="it is too short to hold a header")
        length = int.from_bytes(head, "little")
        if length > min(MAX_HEADER, size - 8):
            reason = f"its header claims {length} bytes; the file has {size} and the limit is {MAX_HEADER}"
            raise BadWeightFile(file=shown, reason=reason)
        body = file.read(length)
    return parse_header(head + body, size, shown)


def parse_header(head: bytes, size: int, shown: str) -> Header:
    """Check the length field and JSON of a file of so many bytes; `shown` stands for it. Raises BadWeightFile."""
    if not head[8:].startswith(b"{"):
        raise BadWeightFile(file=shown, reason="its header is not a JSON object")
    try:
        table = jsonio.loads(head[8:])
    except jsonio.JsonError as error:
        raise BadWeightFile(file=shown, reason=f"its header cannot be read: {error}") from None
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise BadWeightFile(file=shown, reason="its metadata is not an object of strings")
    entries = {name: _entry(name, value, len(head), shown) for name, value in table.items()}
    ordered = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)))
    _check_ranges(ordered, len(head), size, shown)
    return Header(ordered, metadata, hashlib.sha256(head).hexdigest(), size)


def _entry(name: str, value: Any, base: int, shown: str) -> TensorEntry:
    def bad(reason: str) -> BadWeightFile:
        return BadWeightFile(file=shown, reason=f"tensor {name!r}: {reason}")

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise bad("its header entry does not hold exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise bad(f"unknown dtype {dtype!r}")
    if not isinstance(shape, list) or len(shape) > 32 or not all(_is_size(item) for item in shape):
        raise bad("its shape is not a list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(item) for item in offsets):
        raise bad("its data_offsets are not two offsets")
    bits = math.prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise bad(f"dtype {dtype} and shape {shape} need {bits / 8:g} bytes; its range is {offsets}")
    return TensorEntry(dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SIZE


def _check_ranges(entries: Mapping[str, TensorEntry], base: int, size: int, shown: str) -> None:
    """The tensors' ranges cover the data exactly once. Raises BadWeightFile naming the tensor."""
    position, previous = base, "the header"
    for name, entry in entries.items():
        if entry.start < position:
            raise BadWeightFile(file=shown, reason=f"tensors {previous!r} and {name!r} share bytes")
        if entry.start > position:
            raise BadWeightFile(file=shown, reason=f"{entry.start - position} unused bytes lie before tensor {name!r}")
        if entry.end > size:
            raise BadWeightFile(
                file=shown, reason=f"tensor {name!r} ends at byte {entry.end}; the file has {size}: it is cut short"
            )
        position, previous = entry.end, name
    if position != size:
        raise BadWeightFile(file=shown, reason=f"{size - position} bytes follow the last tensor")


@dataclass(frozen=True)
class Layout:
    """Where a writer puts tensors. head: length field and JSON. pads: bytes of padding after each tensor, in order."""

    head: bytes
    pads: tuple[int, ...]


def plan_layout(tensors: Sequence[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
    """Lay out (name, file dtype, shape) in the given order. Raises ValueError for a repeated or reserved name."""
    table: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    pads: list[int] = []
    position = 0
    for index, (name, dtype, shape) in enumerate(tensors):
        if name in table or name == "__metadata__" or name.startswith(PAD):
            raise ValueError(f"the tensor name {name!r} is repeated or reserved")
        size = math.prod(shape) * BITS[dtype] // 8
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
        pad = -position % ALIGN if index + 1 < len(tensors) else 0
        if pad:
            table[f"{PAD}{index}"] = {"dtype": "U8", "shape": [pad], "data_offsets": [position, position + pad]}
        pads.append(pad)
        position += pad
    body = json.dumps(table, separators=(",", ":")).encode("ascii")
    body += b" " * (-(8 + len(body)) % ALIGN)
    return Layout(len(body).to_bytes(8, "little") + body, tuple(pads))
