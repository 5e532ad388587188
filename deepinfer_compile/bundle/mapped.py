"""Tensors on mapped files, and tensors as the bytes of a file.

Files are mapped privately: a tensor costs no memory until it is read, its pages can be dropped and read again, and a
write to it changes this process's copy only, never the file. Each tensor has a storage of its own (not one for the
whole file), so that its storage says what it is.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_compile.bundle.paths import open_regular
from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES, TORCH_DTYPES, TensorEntry
from deepinfer_compile.errors import BadWeightFile, UnsupportedWeightFormat, WeightMismatch

Spec = tuple[torch.dtype, tuple[int, ...]]
"""What a tensor is: dtype and shape."""

# Without it Linux refuses a private writable mapping larger than memory plus swap (Python 3.11 does not name it).
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


@dataclass(frozen=True)
class WeightItem:
    """A tensor to be written: name, torch dtype name, shape, and how to make it when its turn comes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    produce: Callable[[], Tensor]

    def nbytes(self) -> int:
        return math.prod(self.shape) * torch_dtype(self.dtype).itemsize

    @staticmethod
    def of(name: str, tensor: Tensor) -> WeightItem:
        """An item for a tensor that exists already."""
        return WeightItem(name, dtype_name(tensor.dtype), tuple(tensor.shape), lambda: tensor)


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """ "bfloat16" -> `torch.bfloat16`; `name` must be in TORCH_DTYPES."""
    if name not in TORCH_DTYPES:
        raise UnsupportedWeightFormat(format=name, reason="torch has no such dtype for whole tensors")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def describe_spec(spec: Spec) -> str:
    """A dtype and shape in words, for messages."""
    return f"{dtype_name(spec[0])}{list(spec[1])}"


def tensor_bytes(item: WeightItem) -> memoryview:
    """Produce an item's tensor and give its bytes in row-major order. Raises WeightMismatch."""
    tensor = item.produce().detach()
    if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (item.dtype, item.shape):
        found = describe_spec((tensor.dtype, tuple(tensor.shape)))
        raise WeightMismatch(tensor=item.name, expected=f"{item.dtype}{list(item.shape)}", found=found)
    flat = tensor.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


class MappedFile:
    """A mapped safetensors file, from which tensors are made."""

    def __init__(self, path: Path, name: str = "") -> None:
        """Map the whole file; `name` stands for it in messages. Raises BadWeightFile."""
        self._shown = name or path.name
        try:
            fd = open_regular(Path(os.path.realpath(path)))
        except OSError as error:
            raise BadWeightFile(file=self._shown, reason=f"it cannot be read: {error.strerror or error}") from None
        try:
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            self._map = mmap.mmap(fd, 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE, prot=protection)
        except (OSError, ValueError) as error:
            raise BadWeightFile(file=self._shown, reason=f"it cannot be mapped: {error}") from None
        finally:
            os.close(fd)

    def tensor(self, name: str, entry: TensorEntry) -> Tensor:
        """The tensor of one header entry, on the mapped bytes. Raises UnsupportedWeightFormat, BadWeightFile."""
        if entry.dtype not in FILE_DTYPES:
            raise UnsupportedWeightFormat(format=entry.dtype, reason=f"tensor {name!r} has less than a byte a value")
        if entry.end > len(self._map):
            raise BadWeightFile(file=self._shown, reason=f"tensor {name!r} ends behind the end of the file")
        dtype = torch_dtype(FILE_DTYPES[entry.dtype])
        count = entry.end - entry.start
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=count, offset=entry.start)
        if entry.start % dtype.itemsize:
            # Other writers do not align; torch needs it, and a copy of this one tensor is the price.
            flat = flat.clone()
        return flat.view(dtype).reshape(entry.shape)
