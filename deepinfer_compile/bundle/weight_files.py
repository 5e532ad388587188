"""A bundle's runtime tensors by name: mapped from its weight files, or derived from a checkpoint.

Everything is checked against the manifest's constants before the first tensor is handed out: headers by digest, then
every name, dtype and shape, and that every view stays inside its tensor. Tied names give the same tensor object.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from deepinfer_compile.bundle.checkpoint import TensorSource
from deepinfer_compile.bundle.execute import execute
from deepinfer_compile.bundle.ledger import Ledger
from deepinfer_compile.bundle.manifest import Constant, Manifest, canonical_names, check_constants, describe
from deepinfer_compile.bundle.mapped import MappedFile, describe_spec, torch_dtype
from deepinfer_compile.bundle.recipes import infer
from deepinfer_compile.bundle.rows import derived_rows, stored_rows
from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES, PAD, Header, TensorEntry, read_header
from deepinfer_compile.errors import BadWeightFile, BundleCorrupt, MissingWeight, WeightMismatch

WEIGHTS = "weights/"


class WeightFiles(Mapping[str, Tensor]):
    """Runtime tensors by name, in the order of the constants, tied names included.

    Stored tensors are private maps of their file: writing to one changes this object's copy only. Two WeightFiles share
    nothing. Derived tensors are made when asked for and dropped when the caller drops them.
    """

    def __init__(
        self, root: Path, manifest: Manifest, ledger: Ledger | None = None, checkpoint: TensorSource | None = None
    ) -> None:
        """Check all headers and map all files. ledger and checkpoint: for what the bundle does not store itself.

        Raises BundleCorrupt, WeightMismatch, MissingWeight.
        """
        self._constants = manifest.constants
        self._ledger, self._checkpoint = ledger, checkpoint
        self._place: dict[str, tuple[MappedFile, TensorEntry]] = {}
        for file in sorted(manifest.files):
            if file.startswith(WEIGHTS):
                self._add_file(root, file, manifest)
        stored = {name: (FILE_DTYPES[entry.dtype], entry.shape) for name, (_, entry) in self._place.items()}
        check_constants(manifest, stored)
        self._canonical = canonical_names(manifest, stored)
        self._names = list(dict.fromkeys((*self._constants, *self._canonical)))
        self._alive: WeakValueDictionary[str, Tensor] = WeakValueDictionary()
        for name, item in self._constants.items():
            if item.of:
                self._check_view(name, item)
            elif self.main(name) not in self._place:
                self._check_derived(name, item)

    def _add_file(self, root: Path, file: str, manifest: Manifest) -> None:
        header = verified_header(root, file, manifest)
        mapped = MappedFile(root / file, file)
        for name, entry in header.entries.items():
            if name.startswith(PAD):
                continue
            if name in self._place or entry.dtype not in FILE_DTYPES:
                raise BundleCorrupt(file=file, reason=f"tensor {name!r} is stored twice or has no torch dtype")
            self._place[name] = (mapped, entry)

    def _check_view(self, name: str, item: Constant) -> None:
        """A view's last byte lies inside its tensor. Raises WeightMismatch."""
        size = torch_dtype(item.dtype).itemsize
        reach = sum((length - 1) * step for length, step in zip(item.shape, item.stride, strict=True))
        end = item.offset + (reach + 1) * size if 0 not in item.shape else item.offset
        entry = self._place[item.of][1] if item.of in self._place else None
        if entry is None or end > entry.end - entry.start or item.offset % size:
            raise WeightMismatch(
                tensor=name, expected=f"a view inside {item.of!r}", found=f"bytes {item.offset} to {end}"
            )

    def _check_derived(self, name: str, item: Constant) -> None:
        """A tensor that is not stored follows from the checkpoint, with the right dtype and shape."""
        if self._ledger is None or self._checkpoint is None:
            raise MissingWeight(tensor=name, where="the bundle does not store it and no checkpoint was given")
        found = infer(self._ledger.recipe(self.main(name)), self._checkpoint)
        if found != (torch_dtype(item.dtype), item.shape):
            raise WeightMismatch(tensor=name, expected=describe(item), found=describe_spec(found))

    def main(self, name: str) -> str:
        """The name that stands for all names of one tensor."""
        return self._canonical.get(name, name)

    def __getitem__(self, name: str) -> Tensor:
        """Raises KeyError for an unknown name."""
        main = self.main(name)
        if main not in self._constants:
            raise KeyError(name)
        tensor = self._alive.get(main)
        if tensor is None:
            tensor = self._make(main)
            self._alive[main] = tensor
        return tensor

    def rows(self, name: str, rows: Sequence[int]) -> Tensor:
        """Those rows [len(rows), ...] of a tensor, in this order, zeros for -1. Raises KeyError for an unknown name."""
        main = self.main(name)
        if main in self._place and not self._constants[main].of:
            mapped, entry = self._place[main]
            return stored_rows(mapped, main, entry, rows)
        if self._constants[main].of or self._ledger is None or self._checkpoint is None:
            whole = self[main]
            return torch.stack([torch.zeros_like(whole[0]) if row < 0 else whole[row] for row in rows])
        return derived_rows(self._ledger.recipe(main), self._checkpoint, rows)

    def _make(self, name: str) -> Tensor:
        item = self._constants[name]
        if item.of:
            base = self[item.of]
            dtype = torch_dtype(item.dtype)
            view = torch.empty(0, dtype=dtype)
            return view.set_(base.untyped_storage(), item.offset // dtype.itemsize, item.shape, item.stride)
        if name in self._place:
            mapped, entry = self._place[name]
            return mapped.tensor(name, entry)
        assert self._ledger is not None
        assert self._checkpoint is not None
        return execute(self._ledger.recipe(name), self._checkpoint)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def verified_header(root: Path, file: str, manifest: Manifest) -> Header:
    """The checked header of one weight file, which must be the one the manifest recorded. Raises BundleCorrupt."""
    try:
        header = read_header(root / file, file)
    except BadWeightFile as error:
        raise BundleCorrupt(file=file, reason=str(error.values["reason"])) from None
    entry = manifest.files[file]
    if header.size != entry.size or header.sha256 != entry.header_sha256:
        raise BundleCorrupt(file=file, reason="its size or its header is not the recorded one")
    return header
