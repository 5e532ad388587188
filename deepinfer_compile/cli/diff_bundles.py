"""`diff`: what differs between two bundles, in the order in which one would ask."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, stdout
from deepinfer_compile.cli.stored_text import diff as text_diff
from deepinfer_compile.cli.stored_text import graph_lines

if TYPE_CHECKING:
    from deepinfer_compile.bundle import BundleFiles

SKIPPED = {"files", "constants", "seconds"}
"""Manifest keys that are compared elsewhere, or that say how long something took."""


@guarded
def diff(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Compare two bundles: manifest, graphs, weights by content, other files by hash. Exit code 1 if they differ."""
    from deepinfer_compile.bundle import read_bundle

    found = compare(read_bundle(a), read_bundle(b))
    if as_json:
        print_json(found)
    else:
        _print(found)
    if not found["same"]:
        raise typer.Exit(1)


def compare(a: BundleFiles, b: BundleFiles) -> dict[str, Any]:
    """All differences as plain data. Raises BundleCorrupt."""
    manifest = [{"field": k, "a": x, "b": y} for k, x, y in _fields(a, b)]
    programs, weights, files = _programs(a, b), _weights(a, b), _files(a, b)
    same = not (manifest or programs or any(weights[k] for k in ("only_a", "only_b", "changed")) or files)
    return {"same": same, "manifest": manifest, "programs": programs, "weights": weights, "files": files}


def _fields(a: BundleFiles, b: BundleFiles) -> list[tuple[str, Any, Any]]:
    import dataclasses

    left, right = (flat(dataclasses.asdict(dataclasses.replace(f.manifest, files={}, constants={}))) for f in (a, b))
    names = sorted(left.keys() | right.keys())
    return [(k, left.get(k), right.get(k)) for k in names if left.get(k) != right.get(k)]


def flat(value: Any, path: str = "") -> dict[str, Any]:
    """Nested data as path -> leaf; lists of plain values are leaves, SKIPPED keys are left out."""
    if isinstance(value, dict):
        parts = {f"{path}.{k}" if path else str(k): v for k, v in value.items() if k not in SKIPPED}
    elif isinstance(value, (list, tuple)) and any(isinstance(v, dict) for v in value):
        parts = {f"{path}[{v.get('name', i) if isinstance(v, dict) else i}]": v for i, v in enumerate(value)}
    else:
        return {path: list(value) if isinstance(value, tuple) else value}
    return {k: v for name, part in parts.items() for k, v in flat(part, name).items()}


def _programs(a: BundleFiles, b: BundleFiles) -> list[dict[str, Any]]:
    """One entry for each graph that differs or is in one bundle only, with its text diff."""
    left, right = _graphs(a), _graphs(b)
    found = []
    for key in dict.fromkeys((*left, *right)):
        lines = text_diff(left.get(key, []), right.get(key, []), "/".join(key))
        if lines:
            found.append({"program": key[0], "block": key[1], "diff": lines})
    return found


def _graphs(files: BundleFiles) -> dict[tuple[str, str], list[str]]:
    from deepinfer_compile.runtime.stored import read_programs

    found: dict[tuple[str, str], list[str]] = {}
    stored = read_programs(files)
    for name, data in stored.programs.items():
        found[name, "skeleton"] = graph_lines(data["skeleton"])
        for block, digest in data["blocks"].items():
            found[name, block] = graph_lines(stored.graphs[digest])
    return found


def _weights(a: BundleFiles, b: BundleFiles) -> dict[str, Any]:
    """Runtime tensors by name. Values are compared where both bundles can give them; equal files are not read."""
    left, right = a.manifest.constants, b.manifest.constants
    changed = [n for n in left if n in right and (left[n].dtype, left[n].shape) != (right[n].dtype, right[n].shape)]
    found: dict[str, Any] = {
        "only_a": [n for n in left if n not in right],
        "only_b": [n for n in right if n not in left],
        "changed": changed,
        "compared": True,
    }
    if _digests(a) == _digests(b) and a.manifest.weights.mode == b.manifest.weights.mode == "copy":
        return found
    if "none" in (a.manifest.weights.mode, b.manifest.weights.mode):
        return {**found, "compared": False}
    held_a, held_b = a.weights(), b.weights()
    both = [n for n in left if n in right and n not in changed]
    changed += [n for n in both if not _equal(held_a[n], held_b[n])]
    return found


def _digests(files: BundleFiles) -> set[str]:
    return {entry.sha256 for entry in files.manifest.files.values() if entry.header_sha256}


def _equal(a: Any, b: Any) -> bool:
    """Equal bytes: NaN equals itself and 0.0 is not -0.0."""
    import torch

    left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return bool(torch.equal(left, right))


def _files(a: BundleFiles, b: BundleFiles) -> dict[str, str]:
    """Files outside programs and weights that differ: name -> changed, only in a, only in b."""
    left, right = a.manifest.files, b.manifest.files
    found: dict[str, str] = {}
    for name in sorted(left.keys() | right.keys()):
        if name.startswith(("programs/", "weights/", "report.")):
            continue
        if name not in right or name not in left:
            found[name] = "only in a" if name in left else "only in b"
        elif left[name].sha256 != right[name].sha256:
            found[name] = "changed"
    return found


def _print(found: dict[str, Any]) -> None:
    console = stdout()
    if found["same"]:
        console.print("the bundles are the same" + _uncompared(found))
        return
    for entry in found["manifest"]:
        console.print(f"{entry['field']}: {entry['a']!r} -> {entry['b']!r}", soft_wrap=True)
    for entry in found["programs"]:
        for line in entry["diff"]:
            style = {"+": "green", "-": "red"}.get(line[:1], "")
            console.print(line, style=style, soft_wrap=True)
    weights = found["weights"]
    for kind, words in (("only_a", "only in a"), ("only_b", "only in b"), ("changed", "changed")):
        if weights[kind]:
            console.print(
                f"weights: {plural(len(weights[kind]), 'tensor')} {words}: {few(weights[kind])}", soft_wrap=True
            )
    for name, words in found["files"].items():
        console.print(f"{name}: {words}", soft_wrap=True)
    if not weights["compared"]:
        console.print(_uncompared(found).removeprefix("; "))


def _uncompared(found: dict[str, Any]) -> str:
    return "" if found["weights"]["compared"] else "; weight values were not compared: one bundle does not hold them"


def few(names: list[str], limit: int = 8) -> str:
    """The first names of a long list."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


__all__ = ["compare", "diff"]
