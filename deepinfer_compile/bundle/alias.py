"""Saving tensors that share memory: each byte once, and the sharing kept.

Tensors whose byte ranges meet form a group. If one of them is contiguous and covers the group it is stored, else the
range itself is, under a name of its own; the others become views of it (offset, shape, stride). A lone tensor that is
not contiguous and leaves gaps is stored as a contiguous copy, so that what lies in the gaps is not written out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.bundle.execute import same_bits
from deepinfer_compile.bundle.manifest import Constant
from deepinfer_compile.bundle.mapped import WeightItem, dtype_name
from deepinfer_compile.errors import TiedWeightConflict

RANGE = ".storage"


@dataclass(frozen=True)
class Packed:
    """What to store, and what the manifest says of it. tied: groups, the stored name first."""

    items: list[WeightItem]
    constants: dict[str, Constant]
    tied: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Span:
    """Where a tensor lies: which storage, and its first and end byte there."""

    name: str
    tensor: Tensor
    storage: int
    start: int
    end: int


def pack(tensors: Mapping[str, Tensor], tied: Iterable[Iterable[str]] = ()) -> Packed:
    """Plan the storage of CPU or device tensors. Declared ties are stored once and must be equal.

    Raises TiedWeightConflict.
    """
    groups = _tied_groups(tensors, tied)
    dropped = {name for group in groups for name in group[1:]}
    items: list[WeightItem] = []
    constants: dict[str, Constant] = {}
    for spans in _meeting([_span(name, tensor) for name, tensor in tensors.items() if name not in dropped]):
        _store(spans, items, constants)
    for group in groups:
        constants.update(dict.fromkeys(group[1:], constants[group[0]]))
    # A tie to a view needs no group: the same view again is the same memory.
    kept = tuple(group for group in groups if not constants[group[0]].of)
    order = [*tensors, *(name for name in constants if name not in tensors)]
    return Packed(items, {name: constants[name] for name in order}, kept)


def _tied_groups(tensors: Mapping[str, Tensor], tied: Iterable[Iterable[str]]) -> list[tuple[str, ...]]:
    groups = [tuple(name for name in tensors if name in set(group)) for group in tied]
    groups = [group for group in groups if len(group) > 1]
    for group in groups:
        first = tensors[group[0]]
        if not all(same_bits(first, tensors[name]) for name in group[1:]):
            raise TiedWeightConflict(names=" and ".join(group))
    return groups


def _span(name: str, tensor: Tensor) -> _Span:
    size = tensor.element_size()
    start = int(tensor.storage_offset()) * size
    reach = sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    end = start + (reach + 1) * size if tensor.numel() else start
    return _Span(name, tensor.detach(), tensor.untyped_storage().data_ptr(), start, end)


def _meeting(spans: list[_Span]) -> list[list[_Span]]:
    """Groups of spans that overlap, directly or through others, in the order given. Empty tensors stand alone."""
    groups: list[list[_Span]] = [[span] for span in spans if span.start == span.end]
    ordered = sorted((span for span in spans if span.start < span.end), key=lambda s: (s.storage, s.start, -s.end))
    reach = 0
    for index, span in enumerate(ordered):
        if index and ordered[index - 1].storage == span.storage and span.start < reach:
            groups[-1].append(span)
            reach = max(reach, span.end)
        else:
            groups.append([span])
            reach = span.end
    # Addresses order the search, names the result: the same tensors give the same file.
    order = {span.name: index for index, span in enumerate(spans)}
    for group in groups:
        group.sort(key=lambda span: order[span.name])
    return sorted(groups, key=lambda group: order[group[0].name])


def _store(spans: list[_Span], items: list[WeightItem], constants: dict[str, Constant]) -> None:
    """Add one group's stored tensor and views."""
    start, end = min(span.start for span in spans), max(span.end for span in spans)
    cover = next((s for s in spans if s.tensor.is_contiguous() and (s.start, s.end) == (start, end)), None)
    lone = spans[0].tensor
    if cover is None and len(spans) == 1 and lone.numel() * lone.element_size() != end - start:
        items.append(WeightItem.of(spans[0].name, lone.contiguous()))
        constants[spans[0].name] = _plain(lone)
        return
    if cover is not None:
        name = cover.name
        items.append(WeightItem.of(name, cover.tensor))
        constants[name] = _plain(cover.tensor)
    else:
        name = spans[0].name + RANGE
        whole = _range(spans, start, end)
        items.append(WeightItem.of(name, whole))
        constants[name] = _plain(whole)
    for span in spans:
        if span is not cover:
            tensor = span.tensor
            constants[span.name] = Constant(
                dtype_name(tensor.dtype), tuple(tensor.shape), name, span.start - start, tuple(tensor.stride())
            )


def _range(spans: list[_Span], start: int, end: int) -> Tensor:
    """The bytes of a storage from start to end, as one flat tensor: of the members' dtype, or bytes if they differ."""
    dtypes = {span.tensor.dtype for span in spans}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    flat = torch.empty(0, dtype=dtype, device=spans[0].tensor.device)
    storage = spans[0].tensor.untyped_storage()
    return flat.set_(storage, start // dtype.itemsize, ((end - start) // dtype.itemsize,), (1,))


def _plain(tensor: Tensor) -> Constant:
    return Constant(dtype_name(tensor.dtype), tuple(tensor.shape))
