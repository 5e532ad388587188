"""The rows of a page as the bytes of its file, so that many pages go to the caches in a few copies.

A page has a tensor for every cache of its group, often dozens. Views of each, for each page, would take longer than the
disk does; so what is read stays one run of bytes, with a form that says where the tensors are, and pages of one form
are copied together. Views are made only for who asks for them. Nearly all pages have the same form, so headers are
parsed once: they differ only in the checksum.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from safetensors.torch import save
from torch import Tensor

from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES, parse_header
from deepinfer_compile.errors import BadWeightFile

ALIGN = 64
_SUM = re.compile(rb'"sha256":"([0-9a-f]{64})"')
_BLANK = b"0" * 64


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


def pieces(sizes: Iterable[int]) -> Sequence[Tensor]:
    """Memory for pages of so many bytes, u8 each, one behind the other, so that those of one size go on in few
    copies."""
    each = list(sizes)
    memory = mmap.mmap(-1, sum(each), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without: then memory comes in small pages, which takes longer
            memory.madvise(mmap.MADV_HUGEPAGE)
    found: Sequence[Tensor] = torch.frombuffer(memory, dtype=torch.uint8).split(each)
    return found


def rounded(size: int) -> int:
    """The next multiple of ALIGN."""
    return -(-size // ALIGN) * ALIGN


def pack(rows: Mapping[str, Tensor], digest: bytes) -> bytearray:
    """The file of a page: safetensors, and in its metadata a checksum of the page's name and of the file itself, in
    which the checksum is blank."""
    content = bytearray(save(dict(rows), {"sha256": _BLANK.decode()}))
    found = _SUM.search(content, 0, _head(content))
    assert found is not None
    content[slice(*found.span(1))] = _checksum(digest, content)
    return content


def unpack(content: Tensor, size: int, digest: bytes) -> PageRows | None:
    """What the first `size` bytes of a buffer hold, the file of a page; None where it is damaged, or another page's.

    The checksum in the buffer is blank afterwards.
    """
    view = memoryview(content.numpy().data)[:size]
    length = _head(view)
    found = _SUM.search(bytes(view[:length]))
    if found is None:
        return None
    start, end = found.span(1)
    view[start:end] = _BLANK
    form = _form(bytes(view[:length]), size)
    return PageRows(form, content) if form and _checksum(digest, view) == found[1] else None


def _head(content: Sequence[int]) -> int:
    """Where the tensors of a file begin."""
    return min(len(content), 8 + int.from_bytes(bytes(content[:8]), "little"))


def _checksum(digest: bytes, content: bytearray | memoryview) -> bytes:
    """In one call, since other threads take their turn in each."""
    sum_ = hashlib.sha256(digest)
    sum_.update(content)
    return sum_.hexdigest().encode()


@lru_cache(maxsize=64)
def _form(head: bytes, size: int) -> Form | None:
    """What the header of a file of so many bytes says, in which the checksum is blank; None where it is damaged."""
    try:
        header = parse_header(head, size, "")
    except BadWeightFile:
        return None
    if header.metadata.get("sha256") != _BLANK.decode():
        return None
    places = []
    for name, one in sorted(header.entries.items()):
        dtype = getattr(torch, FILE_DTYPES.get(one.dtype, ""), None)
        if dtype is None or one.start % dtype.itemsize:
            return None
        places.append(Place(name, dtype, one.shape, one.start, one.end))
    return Form(tuple(places))
