"""A Hugging Face model folder as a table of named tensors, opened by headers only.

Every header of every weight file is checked before any tensor is handed out, and formats that cannot be read right are
refused here, from the config and from the tensors' names, rather than failing later or loading wrong numbers. Tensors
are made on mapped files, so opening a checkpoint larger than memory is cheap.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.mapped import MappedFile, Spec, torch_dtype
from deepinfer_compile.bundle.paths import check_path
from deepinfer_compile.bundle.safetensors_io import FILE_DTYPES, PAD, TensorEntry, read_header
from deepinfer_compile.errors import (
    BadWeightFile,
    BundlePath,
    MissingShard,
    MissingWeight,
    NotAModelFolder,
    UnsupportedWeightFormat,
)

INDEX = "model.safetensors.index.json"
MAX_JSON = 256 * 1024 * 1024
READABLE_QUANTIZATION = ("fp8", "mxfp4")

_FOREIGN = {
    ".qweight": "GPTQ or AWQ",
    ".qzeros": "GPTQ or AWQ",
    ".absmax": "bitsandbytes",
    ".SCB": "bitsandbytes",
    ".weight_scale_2": "NVFP4",
    ".weight_packed": "compressed-tensors",
}
"""Ends of tensor names that only formats we cannot read have."""


class TensorSource(Protocol):
    """Named tensors that recipes read. `shape` and dtype are known without reading data."""

    def __contains__(self, name: object) -> bool: ...

    def spec(self, name: str) -> Spec:
        """Raises MissingWeight."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Raises MissingWeight."""
        ...


class DictSource:
    """Tensors in memory, such as a state dict, as a source; they have no config and no notes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.config: dict[str, Any] = {}
        self.notes: list[str] = []

    def names(self) -> set[str]:
        return set(self._tensors)

    def empty(self) -> list[str]:
        """Names of tensors on the meta device, which hold nothing."""
        return [name for name, tensor in self._tensors.items() if tensor.is_meta]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def spec(self, name: str) -> Spec:
        tensor = self.tensor(name)
        return tensor.dtype, tuple(tensor.shape)

    def tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise MissingWeight(tensor=name)
        return self._tensors[name].detach()


class Checkpoint:
    """The tensors of one model folder.

    config: config.json, or {} where there is none. notes: what was seen and ignored, one sentence each.
    """

    def __init__(self, folder: Path, config: dict[str, Any], shards: dict[str, dict[str, TensorEntry]]) -> None:
        """Use `Checkpoint.open`. shards: file name -> its checked entries, pads left out."""
        self.folder = folder
        self.config = config
        self.notes: list[str] = []
        self._place = {name: file for file, entries in shards.items() for name in entries}
        self._shards = shards
        self._maps: dict[str, MappedFile] = {}

    @classmethod
    def open(cls, folder: Path | str) -> Checkpoint:
        """Read config, index and headers.

        Raises NotAModelFolder, MissingShard, MissingWeight, BadWeightFile, UnsupportedWeightFormat.
        """
        folder = Path(folder)
        config = _read_json(folder, "config.json") if (folder / "config.json").exists() else {}
        _refuse_config(config)
        index = _read_index(folder)
        files = sorted(set(index.values())) if index is not None else _unindexed(folder)
        for file in files:
            if not (folder / file).is_file():
                raise MissingShard(file=file, index=INDEX)
        shards: dict[str, dict[str, TensorEntry]] = {}
        for file in files:
            header = read_header(folder / file, file)
            shards[file] = {name: entry for name, entry in header.entries.items() if not name.startswith(PAD)}
        _refuse_duplicates(shards)
        checkpoint = cls(folder, config, shards)
        _refuse_names(checkpoint._place)
        if index is not None:
            checkpoint._follow(index)
        return checkpoint

    def _follow(self, index: dict[str, str]) -> None:
        """Keep what the index names. Raises MissingWeight when a shard lacks a tensor the index puts there."""
        for name, file in index.items():
            if name not in self._shards[file]:
                raise MissingWeight(tensor=name, where=f"{INDEX} says it is in {file}, which does not hold it")
        extra = sorted(self._place.keys() - index.keys())
        if extra:
            self.notes.append(f"{INDEX} does not name {len(extra)} tensors of its files, ignored: {_few(extra)}")
            for name in extra:
                del self._place[name]

    def names(self) -> set[str]:
        return set(self._place)

    def __contains__(self, name: object) -> bool:
        return name in self._place

    def entry(self, name: str) -> TensorEntry:
        """The header's words on one tensor. Raises MissingWeight."""
        if name not in self._place:
            raise MissingWeight(tensor=name)
        return self._shards[self._place[name]][name]

    def file_of(self, name: str) -> str:
        """The weight file that holds a tensor. Raises MissingWeight."""
        self.entry(name)
        return self._place[name]

    def spec(self, name: str) -> Spec:
        """dtype and shape. Raises MissingWeight, UnsupportedWeightFormat for a sub-byte dtype."""
        entry = self.entry(name)
        return torch_dtype(FILE_DTYPES.get(entry.dtype, entry.dtype)), entry.shape

    def tensor(self, name: str) -> Tensor:
        """The tensor on its mapped file; do not write to it. Raises MissingWeight, BadWeightFile."""
        entry, file = self.entry(name), self._place[name]
        if file not in self._maps:
            self._maps[file] = MappedFile(self.folder / file, file)
        return self._maps[file].tensor(name, entry)


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None where the folder has no index."""
    if not (folder / INDEX).exists():
        return None
    table = _read_json(folder, INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(file, str) for file in table.values()):
        raise NotAModelFolder(path=folder, reason=f"{INDEX} has no weight_map of tensor names to file names")
    for file in sorted(set(table.values())):
        try:
            check_path(file)
        except BundlePath as error:
            raise NotAModelFolder(path=folder, reason=f"{INDEX} names {file!r}: {error.values['reason']}") from None
    return table


def _unindexed(folder: Path) -> list[str]:
    """The weight files of a folder without an index. Raises NotAModelFolder, UnsupportedWeightFormat."""
    if not folder.is_dir():
        raise NotAModelFolder(path=folder, reason="there is no such folder")
    names = sorted(os.listdir(folder))
    if "model.safetensors" in names:
        return ["model.safetensors"]
    found = [name for name in names if name.endswith(".safetensors")]
    if found:
        return found
    for end, form in ((".bin", "pickle"), (".pt", "pickle"), (".pth", "pickle"), (".gguf", "GGUF")):
        other = [name for name in names if name.endswith(end)]
        if other:
            reason = f"{other[0]} is not a safetensors file, and loading a pickle can run code"
            raise UnsupportedWeightFormat(format=form, reason=reason if form == "pickle" else f"{other[0]} is GGUF")
    raise NotAModelFolder(path=folder, reason="it holds no *.safetensors file")


def _refuse_config(config: dict[str, Any]) -> None:
    """Raises UnsupportedWeightFormat for a quantisation other than the readable ones."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return
    if not isinstance(quantization, dict):
        raise UnsupportedWeightFormat(format=quantization, reason="quantization_config in config.json is no object")
    method = quantization.get("quant_method")
    if method not in READABLE_QUANTIZATION:
        form = f"{method} {quantization.get('quant_algo', '')}".strip()
        raise UnsupportedWeightFormat(format=form, reason="config.json says so in quantization_config")


def _refuse_names(place: Mapping[str, str]) -> None:
    """Raises UnsupportedWeightFormat when a tensor's name belongs to a format that cannot be read."""
    for name, file in place.items():
        for end, form in _FOREIGN.items():
            if name.endswith(end) or ".quant_state." in name:
                raise UnsupportedWeightFormat(format=form, reason=f"{file} holds the tensor {name!r}")


def _refuse_duplicates(shards: Mapping[str, Mapping[str, TensorEntry]]) -> None:
    seen: dict[str, str] = {}
    for file, entries in shards.items():
        for name in entries:
            if name in seen:
                raise BadWeightFile(file=file, reason=f"tensor {name!r} is in {seen[name]} too")
            seen[name] = file


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    """A JSON object of the folder. Raises NotAModelFolder."""
    path = folder / name
    try:
        if path.stat().st_size > MAX_JSON:
            raise NotAModelFolder(path=folder, reason=f"{name} has more than {MAX_JSON} bytes")
        value = jsonio.loads(path.read_bytes())
    except OSError as error:
        raise NotAModelFolder(path=folder, reason=f"{name} cannot be read: {error.strerror}") from None
    except jsonio.JsonError as error:
        raise NotAModelFolder(path=folder, reason=f"{name}: {error}") from None
    if not isinstance(value, dict):
        raise NotAModelFolder(path=folder, reason=f"{name} is not a JSON object")
    return value


def _few(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (", ..." if len(names) > limit else "")
