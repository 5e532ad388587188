"""What a plan knows of a chip and its links: data files, one value with its source each, all of which can be replaced.

`small` has the published times of exchanges of few tokens, `large` the published rates of exchanges of many; a chip
for which there are none has its links' rates and a latency. Nothing here knows a chip's name.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import BadOption

FOLDER = Path(__file__).parent / "hardware"
CONSTANTS = {
    "memory_bytes": "memory of a rank",
    "memory_fraction": "of it that weights and caches may take",
    "read_bytes": "bytes a second that weights and caches are read at",
    "bf16_flops": "operations a second of 16-bit products",
    "fp8_flops": "operations a second of products of 8-bit numbers, and of 4-bit weights with them",
    "attention_flops": "operations a second of attention over caches",
    "domain_ranks": "ranks of one scale-up domain",
    "domain_bytes": "bytes a second that a rank sends inside its domain",
    "network_bytes": "bytes a second that a rank sends beyond it",
    "latency": "seconds that an exchange takes without data",
    "layer_overhead": "seconds between the kernels of a layer, for each of its micro-batches",
    "step_overhead": "seconds between steps",
    "price_per_hour": "dollars that a rank costs an hour; none leaves costs out",
}
MAY_BE_ZERO = ("latency", "layer_overhead", "step_overhead", "price_per_hour")


@dataclass(frozen=True)
class Points:
    """Published figures by number of ranks: (ranks, of dispatch, of combine), in rising order. tokens, hidden, top: of
    each rank, where the figures are times; then they are seconds, else bytes a second."""

    source: str
    points: tuple[tuple[int, float, float], ...]
    tokens: int = 0
    hidden: int = 0
    top: int = 0

    def at(self, ranks: int) -> tuple[float, float]:
        """Of any number of ranks: between points linear in the logarithm of ranks, beyond them the nearest point's."""
        sizes = [math.log(p[0]) for p in self.points]
        x = min(max(math.log(ranks), sizes[0]), sizes[-1])
        right = next(i for i, size in enumerate(sizes) if size >= x - 1e-12)
        left = max(right - 1, 0)
        part = (x - sizes[left]) / (sizes[right] - sizes[left]) if right > left else 0.0
        a, b = self.points[left], self.points[right]
        return a[1] + part * (b[1] - a[1]), a[2] + part * (b[2] - a[2])


@dataclass(frozen=True)
class Hardware:
    """A chip and its links: values by the names in `CONSTANTS`, and the source of each."""

    name: str
    title: str
    values: Mapping[str, float | None]
    sources: Mapping[str, str]
    small: Points | None = None
    large: Points | None = None
    changed: tuple[str, ...] = field(default=())

    def __getitem__(self, name: str) -> float:
        """A value; 0 where there is none."""
        return float(self.values[name] or 0.0)

    def with_(self, changes: Mapping[str, float]) -> Hardware:
        """A copy with other values. Raises BadOption for a name that is none, or a value that cannot be."""
        for name, value in changes.items():
            if name not in CONSTANTS:
                near = difflib.get_close_matches(name, CONSTANTS, 3)
                fix = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(CONSTANTS)}"
                raise BadOption(name="--set", value=name, reason="no constant has this name", fix=fix)
            _check(f"--set {name}", name, value)
        sources = {**self.sources, **dict.fromkeys(changes, "given")}
        changed = tuple(dict.fromkeys((*self.changed, *changes)))
        return replace(self, values={**self.values, **changes}, sources=sources, changed=changed)

    def links(self, factor: float) -> Hardware:
        """A copy whose links carry `factor` times the bytes a second; latencies stay."""
        rates = {name: self[name] * factor for name in ("domain_bytes", "network_bytes")}
        small, large, latency = self.small, self.large, self["latency"]
        if small is not None:

            def less(time: float) -> float:
                return latency + max(time - latency, 0.0) / factor

            small = replace(small, points=tuple((n, less(a), less(b)) for n, a, b in small.points))
        if large is not None:
            large = replace(large, points=tuple((n, a * factor, b * factor) for n, a, b in large.points))
        return replace(self.with_(rates), small=small, large=large)


def known() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(f.stem for f in FOLDER.glob("*.json"))


def read_hardware(name: str) -> Hardware:
    """A description by its name, or of a JSON file. Raises BadOption, OSError."""
    path = FOLDER / f"{name}.json"
    if name not in known():
        path = Path(name)
        if path.suffix != ".json":
            near = difflib.get_close_matches(name.lower(), known(), 3)
            fix = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known())}, or a .json file"
            raise BadOption(name="--hardware", value=name, reason="there is no such description", fix=fix)
    try:
        raw = json.loads(path.read_text())
    except (ValueError, RecursionError) as err:
        raise _bad(path, f"it is not JSON ({err})") from None
    if not isinstance(raw, dict) or not isinstance(raw.get("constants"), dict):
        raise _bad(path, "it has no object `constants`")
    return _parsed(raw, path)


def _parsed(raw: Mapping[str, Any], path: Path) -> Hardware:
    values: dict[str, float | None] = {}
    sources: dict[str, str] = {}
    given = raw["constants"]
    for name in {**CONSTANTS, **given}:
        entry = given.get(name)
        if name not in CONSTANTS:
            near = difflib.get_close_matches(name, CONSTANTS, 1) or list(CONSTANTS)
            raise _bad(path, f"{name} is no constant; near it is {near[0]}")
        if not isinstance(entry, dict) or not isinstance(entry.get("source"), str) or "value" not in entry:
            raise _bad(path, f"{name} ({CONSTANTS[name]}) must be an object with value and source")
        if entry["value"] is not None or name != "price_per_hour":
            _check(f"{path}: {name}", name, entry["value"])
        values[name], sources[name] = entry["value"], entry["source"]
    small, large = _points(raw.get("small"), path, "small"), _points(raw.get("large"), path, "large")
    name = str(raw.get("name", path.stem))
    return Hardware(name, str(raw.get("title", name)), values, sources, small, large)


def _points(raw: Any, path: Path, name: str) -> Points | None:
    if raw is None:
        return None
    form = "a source and points [ranks, dispatch, combine] in rising order"
    rows = raw.get("points") if isinstance(raw, dict) else None
    if not isinstance(rows, Sequence) or not rows or not isinstance(raw.get("source"), str):
        raise _bad(path, f"{name} must have {form}")
    good = all(isinstance(row, Sequence) and len(row) == 3 and all(_number(v) and v > 0 for v in row) for row in rows)
    if not good or [row[0] for row in rows] != sorted({row[0] for row in rows}):
        raise _bad(path, f"{name} must have {form}")
    sizes = {key: raw.get(key, 0) for key in ("tokens", "hidden", "top")}
    if name == "small" and not all(isinstance(v, int) and v > 0 for v in sizes.values()):
        raise _bad(path, "small must say of how many tokens, hidden and top its times are")
    return Points(raw["source"], tuple((int(a), float(b), float(c)) for a, b, c in rows), **sizes)


def _check(place: str, name: str, value: Any) -> None:
    low = name not in MAY_BE_ZERO
    if not _number(value) or value < 0 or (low and value == 0) or (name == "memory_fraction" and value > 1):
        what = "a number above 0" if low else "a number from 0"
        fix = f"give {what}" + (" to 1" if name == "memory_fraction" else "")
        raise BadOption(name=place, value=value, reason=f"it is {CONSTANTS[name]}", fix=fix)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _bad(path: Path, reason: str) -> BadOption:
    fix = "copy a description of this package (deepinfer_compile/plan/hardware) and change its values"
    return BadOption(name="--hardware", value=str(path), reason=reason, fix=fix)


__all__ = ["CONSTANTS", "Hardware", "Points", "known", "read_hardware"]
