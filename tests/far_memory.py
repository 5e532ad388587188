"""Tensors that tell when too much of them is read, and tensors larger than memory."""

from __future__ import annotations

import ctypes
import mmap
from math import prod

import torch
from torch import Tensor

PROT_NONE = 0
MAP_NORESERVE = 0x4000


def _area(size: int) -> mmap.mmap:
    """Zeroed memory of which only pages that are touched exist."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)


def sparse(*shape: int, dtype: torch.dtype) -> Tensor:
    """A contiguous tensor of zeros, of any size."""
    found: Tensor = torch.frombuffer(_area(prod(shape) * dtype.itemsize), dtype=dtype).view(shape)
    return found


def fenced(values: Tensor) -> Tensor:
    """A contiguous copy whose last element ends a page, with a page behind it that ends the process when read."""
    size = values.numel() * values.element_size()
    pages = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    area = _area(pages + mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(area))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address + pages), ctypes.c_size_t(mmap.PAGESIZE), PROT_NONE):
        raise OSError(ctypes.get_errno(), "mprotect")
    found = torch.frombuffer(area, dtype=values.dtype, count=values.numel(), offset=pages - size)
    return found.view(values.shape).copy_(values)
