"""The rows of a page as a run of bytes, so that many pages go to the caches, to files and from there in a few copies.

A page has a tensor for every cache of its group, often dozens. Views of each, for each page, would take longer than a
disk does; so it stays one run of bytes, with a form that says where the tensors are, and pages of one form are copied
together. Views are made only for who asks for them.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

ALIGN = 64


@dataclass(frozen=True)
class Place:
    """A tensor of a page: bytes start..end."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Form:
    """Where the tensors of a page are, by name."""

    places: tuple[Place, ...]

    @classmethod
    def of(cls, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> Form:
        """Tensors one behind the other, by name, each from a multiple of ALIGN on."""
        places, end = [], 0
        for name, (dtype, shape) in sorted(kinds.items()):
            start = rounded(end)
            end = start + math.prod(shape) * dtype.itemsize
            places.append(Place(name, dtype, shape, start, end))
        return cls(tuple(places))

    @cached_property
    def size(self) -> int:
        """Bytes of a run that holds the tensors."""
        return rounded(self.places[-1].end) if self.places else 0

    @cached_property
    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of each tensor."""
        return {one.name: (one.dtype, one.shape) for one in self.places}

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(one.end - one.start for one in self.places)


@dataclass(frozen=True)
class PageRows(Mapping[str, Tensor]):
    """The tensors of a page on the host. content: u8, longer than they are, in multiples of ALIGN."""

    form: Form
    content: Tensor

    def __getitem__(self, name: str) -> Tensor:
        for one in self.form.places:
            if one.name == name:
                return self.content[one.start : one.end].view(one.dtype).reshape(one.shape)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter([one.name for one in self.form.places])

    def __len__(self) -> int:
        return len(self.form.places)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return self.form.nbytes

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> PageRows:
        """A copy of tensors on the host."""
        form = Form.of({name: (held.dtype, tuple(held.shape)) for name, held in rows.items()})
        made = cls(form, torch.empty(form.size, dtype=torch.uint8))
        for name, held in rows.items():
            made[name].copy_(held)
        return made


def in_one(contents: Sequence[Tensor]) -> Tensor:
    """Contents of one size as the rows of a tensor, which is a view where they lie one behind the other."""
    first, size = contents[0], contents[0].nbytes
    memory, start = first.untyped_storage().data_ptr(), first.data_ptr()
    lies = all(
        (one.nbytes, one.untyped_storage().data_ptr(), one.data_ptr()) == (size, memory, start + i * size)
        for i, one in enumerate(contents)
    )
    return first.as_strided((len(contents), size), (size, 1)) if lies else torch.stack(list(contents))


def host_memory(size: int) -> Tensor:
    """So many bytes, u8, in large pages where there are any, since memory comes faster so."""
    memory = mmap.mmap(-1, max(1, size), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size]


def rounded(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN
