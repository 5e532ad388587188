"""The manifest: everything a bundle says about itself, and the digest of every file in it.

The sections that other parts of the package own (model, programs, variants, ...) are JSON objects here: this file
checks that they are objects and leaves their meaning to their owners. What integrity rests on (files, constants, tied
names, weight source) is typed and checked to the last field, because a bundle comes from somewhere else: unknown keys,
wrong types and impossible sizes are refused, never skipped. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.files import FileEntry, chunk_count, combined
from deepinfer_compile.bundle.paths import MAX_ENTRIES, PathSet
from deepinfer_compile.bundle.safetensors_io import TORCH_DTYPES
from deepinfer_compile.errors import BundleCorrupt, BundleVersion, WeightMismatch

FORMAT = "deepinfer-bundle"
SCHEMA = 1
"""Raised when a reader of the old schema could misread a new bundle; readers accept exactly their own."""
MANIFEST = "manifest.json"
DIGEST = "manifest.sha256"
MAX_MANIFEST = 64 * 1024 * 1024
MAX_BYTES = 1 << 50
WEIGHT_MODES = ("copy", "link", "none")
SECTIONS = (
    "model",
    "programs",
    "variants",
    "caches",
    "arena",
    "experts",
    "tuning",
    "tokenizer",
    "kernels",
    "build",
)
_HEX = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True)
class Constant:
    """One runtime tensor. dtype: torch name without `torch.`, such as "bfloat16".

    A stored or derived tensor is contiguous and has only dtype and shape. A view names the stored tensor it lies in
    (`of`), its first byte there (`offset`) and its stride in elements.
    """

    dtype: str
    shape: tuple[int, ...]
    of: str = ""
    offset: int = 0
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class WeightSource:
    """Where weights come from: "copy" (in the bundle), "link" (checkpoint in `folder`), "none" (the loader is told)."""

    mode: str = "copy"
    folder: str = ""


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json.

    model: config facts. programs: name -> program record. variants: target -> what was built for it. caches: cache
    groups. arena: peak bytes. experts: expert placement. tuning: chosen kernel configurations. tokenizer, kernels,
    build: records of their owners. tied: groups of names that share one stored tensor. constants: name -> runtime
    tensor. waivers: passes whose miss was accepted. files: filled in by the writer.
    """

    model: dict[str, Any]
    programs: dict[str, Any]
    variants: dict[str, Any] = field(default_factory=dict)
    caches: dict[str, Any] = field(default_factory=dict)
    arena: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    tokenizer: dict[str, Any] = field(default_factory=dict)
    kernels: dict[str, Any] = field(default_factory=dict)
    build: dict[str, Any] = field(default_factory=dict)
    tied: tuple[tuple[str, ...], ...] = ()
    constants: dict[str, Constant] = field(default_factory=dict)
    waivers: tuple[str, ...] = ()
    weights: WeightSource = WeightSource()
    files: dict[str, FileEntry] = field(default_factory=dict)
    schema: int = SCHEMA


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json. Raises TypeError for a section that is not plain JSON."""
    value = dataclasses.asdict(manifest)
    value["format"] = FORMAT
    return jsonio.dumps(value)


def parse_manifest(data: bytes) -> Manifest:
    """Read manifest.json strictly. Raises BundleCorrupt, BundlePath or BundleVersion."""
    if len(data) > MAX_MANIFEST:
        raise _bad(f"it has more than {MAX_MANIFEST} bytes")
    try:
        value = jsonio.loads(data)
    except jsonio.JsonError as error:
        raise _bad(str(error)) from None
    _check_version(value)
    names = {item.name for item in dataclasses.fields(Manifest)} | {"format"}
    _exact_keys(value, names, "the manifest")
    for section in SECTIONS:
        _object(value[section], section)
    manifest = Manifest(
        **{section: value[section] for section in SECTIONS},
        tied=tuple(_strings(group, "tied") for group in _list(value["tied"], "tied")),
        constants=_entries(value["constants"], "constants", _constant),
        waivers=_strings(value["waivers"], "waivers"),
        weights=_weight_source(value["weights"]),
        files=_entries(value["files"], "files", _file_entry),
    )
    paths = PathSet()
    for name in (MANIFEST, DIGEST, *manifest.files):
        paths.add(name)
    _check_tied(manifest)
    _check_views(manifest.constants)
    return manifest


def canonical_names(manifest: Manifest, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, str]:
    """Tied name -> the name of its group that is stored, or the first where none is. Raises WeightMismatch."""
    result: dict[str, str] = {}
    for group in manifest.tied:
        kept = [name for name in group if name in stored]
        if len(kept) > 1:
            raise WeightMismatch(tensor=kept[1], expected=f"one stored copy, {kept[0]!r}", found="a second one")
        result.update(dict.fromkeys(group, (kept or group)[0]))
    return result


def check_constants(manifest: Manifest, stored: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compare the constants with the stored tensors, name -> (torch dtype name, shape). Raises WeightMismatch.

    Every stored tensor is a constant of that dtype and shape; in "copy" mode every constant is stored, a view, or tied
    to a stored one.
    """
    constants = manifest.constants
    for name, (dtype, shape) in stored.items():
        item = constants.get(name)
        if item is None or item.of or (item.dtype, item.shape) != (dtype, shape):
            raise WeightMismatch(tensor=name, expected=describe(item), found=f"stored {dtype}{list(shape)}")
    canonical = canonical_names(manifest, stored)
    for name, item in constants.items():
        main = canonical.get(name, name)
        if item.of and (main != name or name in stored):
            raise WeightMismatch(tensor=name, expected="a view", found="a stored or tied tensor")
        if main not in constants or (item.dtype, item.shape) != (constants[main].dtype, constants[main].shape):
            raise WeightMismatch(tensor=name, expected=describe(constants.get(main)), found=describe(item))
        if manifest.weights.mode == "copy" and not item.of and main not in stored:
            raise WeightMismatch(tensor=name, expected=describe(item), found="no stored tensor")


def describe(item: Constant | None) -> str:
    """A constant in words, for messages."""
    if item is None:
        return "nothing (the constants do not name it)"
    return f"{item.dtype}{list(item.shape)}" + (f" in {item.of!r}" if item.of else "")


def _check_version(value: Any) -> None:
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _bad(f'it does not say "format": "{FORMAT}"')
    found = _integer(value.get("schema"), "schema", 1 << 31)
    if found != SCHEMA:
        raise BundleVersion(found=found, age="newer" if found > SCHEMA else "older", known=SCHEMA)


def _check_tied(manifest: Manifest) -> None:
    seen: set[str] = set()
    for group in manifest.tied:
        if len(group) < 2 or len(set(group)) != len(group) or seen & set(group):
            raise _bad(f"the tied group {list(group)} repeats a name or has only one")
        seen |= set(group)


def _check_views(constants: dict[str, Constant]) -> None:
    for name, item in constants.items():
        if not item.of:
            if item.offset or item.stride:
                raise _bad(f"the constant {name!r} has an offset or a stride but is not a view")
            continue
        if item.of not in constants or constants[item.of].of:
            raise _bad(f"the view {name!r} lies in {item.of!r}, which is not a stored tensor")
        if len(item.stride) != len(item.shape):
            raise _bad(f"the view {name!r} has {len(item.shape)} sizes and {len(item.stride)} strides")


def _constant(value: Any, where: str) -> Constant:
    _exact_keys(value, {"dtype", "shape", "of", "offset", "stride"}, where)
    if _string(value["dtype"], where) not in TORCH_DTYPES:
        raise _bad(f"{where} has the unknown dtype {value['dtype']!r}")
    return Constant(
        dtype=value["dtype"],
        shape=_integers(value["shape"], where),
        of=_string(value["of"], where),
        offset=_integer(value["offset"], where, MAX_BYTES),
        stride=_integers(value["stride"], where),
    )


def _file_entry(value: Any, where: str) -> FileEntry:
    _exact_keys(value, {"size", "sha256", "chunks", "header_sha256"}, where)
    entry = FileEntry(
        size=_integer(value["size"], where, MAX_BYTES),
        sha256=_digest(value["sha256"], where),
        chunks=tuple(_digest(item, where) for item in _list(value["chunks"], where)),
        header_sha256=_digest(value["header_sha256"], where) if value["header_sha256"] != "" else "",
    )
    if len(entry.chunks) != chunk_count(entry.size) or combined(entry.chunks) != entry.sha256:
        raise _bad(f"{where}: size, chunk digests and file digest do not agree")
    return entry


def _weight_source(value: Any) -> WeightSource:
    _exact_keys(value, {"mode", "folder"}, "weights")
    if value["mode"] not in WEIGHT_MODES:
        raise _bad(f"weights: the mode {value['mode']!r} is not one of {', '.join(WEIGHT_MODES)}")
    return WeightSource(value["mode"], _string(value["folder"], "weights"))


def _entries(value: Any, where: str, read: Callable[[Any, str], Any]) -> dict[str, Any]:
    table = _object(value, where)
    if len(table) > MAX_ENTRIES:
        raise _bad(f"{where} has more than {MAX_ENTRIES} entries")
    return {_string(name, where): read(item, f"{where} {name!r}") for name, item in table.items()}


def _exact_keys(value: Any, names: set[str], where: str) -> None:
    _object(value, where)
    unknown, missing = sorted(value.keys() - names), sorted(names - value.keys())
    if unknown:
        raise _bad(f"{where} has the unknown key {unknown[0]!r}")
    if missing:
        raise _bad(f"{where} lacks the key {missing[0]!r}")


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _bad(f"{where} is not an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise _bad(f"{where} is not a list")
    return value


def _strings(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_string(item, where) for item in _list(value, where))


def _string(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > 4096 or any(ord(c) < 32 for c in value):
        raise _bad(f"{where} is not a string of at most 4096 printable characters")
    return value


def _integers(value: Any, where: str) -> tuple[int, ...]:
    items = _list(value, where)
    if len(items) > 32:
        raise _bad(f"{where} has more than 32 dimensions")
    return tuple(_integer(item, where, MAX_BYTES) for item in items)


def _integer(value: Any, where: str, limit: int) -> int:
    if type(value) is not int or not 0 <= value <= limit:
        raise _bad(f"{where} is not a whole number from 0 to {limit}")
    return value


def _digest(value: Any, where: str) -> str:
    if not isinstance(value, str) or not _HEX.match(value):
        raise _bad(f"{where}: a digest is 64 lower-case hexadecimal digits")
    return value


def _bad(reason: str) -> BundleCorrupt:
    return BundleCorrupt(file=MANIFEST, reason=reason)
