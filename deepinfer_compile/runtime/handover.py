"""What ranks that hand cache rows over must agree on, told and compared before the first row travels.

Rows of one process are bytes to another, so all that decides what they mean is in the record: of which weights they
are, how many tokens a page has, and each cache's place, type and form. Every rank gets every record and compares all of
them, so that all refuse together and none waits for one that has refused. A record of another version is compared like
any other: it differs in `version`, or in a field that one side lacks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from deepinfer_compile.bundle import LEDGER, BundleFiles
from deepinfer_compile.rank_errors import HandoverMismatch
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.ranks import Ranks
from deepinfer_compile.runtime.roles import plans_of

VERSION = 1
ABSENT = "nothing"


@dataclass(frozen=True)
class CacheRecord:
    """A cache whose rows are handed over.

    kind: what it holds, as the compiler names it. group, window: the pages that it shares, and how many positions are
    kept, 0 for all. shape: of the rows of a page, which are fewer than its tokens where several make one.
    """

    name: str
    kind: str
    layer: int
    group: int
    window: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HandoverRecord:
    """What one rank says. units: ranks by role. weights: SHA-256 of what they are. context: longest one, in tokens."""

    version: int
    units: dict[str, int]
    page_size: int
    caches: tuple[CacheRecord, ...]
    context: int
    vocab_size: int
    weights: str

    @classmethod
    def of(
        cls, files: BundleFiles, program: Mapping[str, Any], context: int, checkpoint: Path | None = None
    ) -> HandoverRecord:
        """Of a rank that runs a program of a bundle."""
        windows = program["windows"]
        caches = [
            CacheRecord(
                c["name"], c["kind"], c["layer"], c["group"], windows[c["group"]], c["dtype"], tuple(c["shape"])
            )
            for c in program["caches"]
        ]
        return cls(
            version=VERSION,
            units={role: plan["ranks"] for role, plan in plans_of(files.manifest.experts).items()},
            page_size=PAGE_SIZE,
            caches=tuple(caches),
            context=context,
            vocab_size=int(files.manifest.model["vocab_size"]),
            weights=weights_digest(files, checkpoint),
        )

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(asdict(self)).encode()


def weights_digest(files: BundleFiles, checkpoint: Path | None = None) -> str:
    """SHA-256 of which weights a bundle runs on: their contents where they are in it, else names and sizes of the
    files that they are read from."""
    manifest = files.manifest
    stored = {name: entry.sha256 for name, entry in manifest.files.items() if name.startswith("weights/")}
    told: list[Any] = [sorted(stored.items()), manifest.files[LEDGER].sha256 if LEDGER in manifest.files else ""]
    linked = manifest.weights.folder if manifest.weights.mode == "link" else ""
    folder = checkpoint or (Path(linked) if linked else None)
    if folder is not None:
        there = sorted(file for file in folder.resolve().iterdir() if file.suffix == ".safetensors")
        told.append([(file.name, file.stat().st_size) for file in there])
    return sha256(json.dumps(told).encode()).hexdigest()


def meet(ranks: Ranks, record: HandoverRecord) -> None:
    """Compare the records of all ranks. Raises HandoverMismatch, on all of them, for the first rank that differs from
    rank 0 and the first field in which it does; RankLost."""
    told = [read(data) for data in ranks.told(record.to_bytes())]
    for second, other in enumerate(told):
        found = first_difference(told[0], other)
        if found is not None:
            field, here, there = found
            raise HandoverMismatch(first=0, second=second, field=field, one=here, other=there)


def read(data: bytes) -> Any:
    """What a rank said; what is no JSON is the text that it is."""
    try:
        return json.loads(data)
    except ValueError:
        return data.decode(errors="replace")[:80]


def first_difference(one: Any, other: Any, field: str = "") -> tuple[str, Any, Any] | None:
    """The first field in which two values differ, as `caches[2].dtype`, and both values there."""
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = [(f"{field}.{key}".lstrip("."), key) for key in (*one, *(k for k in other if k not in one))]
        found = (first_difference(one.get(key, ABSENT), other.get(key, ABSENT), name) for name, key in pairs)
        return next((f for f in found if f is not None), None)
    if _listed(one) and _listed(other):
        for i in range(max(len(one), len(other))):
            item = first_difference(_item(one, i), _item(other, i), f"{field}[{i}]")
            if item is not None:
                return item
        return None
    return None if one == other and type(one) is type(other) else (field or "the record", one, other)


def _listed(value: Any) -> bool:
    """Whether a value is a list whose items are compared one by one."""
    return isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value)


def _item(items: Sequence[Any], i: int) -> Any:
    return items[i] if i < len(items) else ABSENT


__all__ = ["CacheRecord", "HandoverRecord", "first_difference", "meet", "weights_digest"]
