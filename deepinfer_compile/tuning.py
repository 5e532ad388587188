"""What a sweep found, as files: a folder of readable JSON records, one for each kernel, its Params and the target.

A record's key holds everything its figures depend on: the operation, a hash of the kernel's template and of the names
of its fields, the Params, the target with its device, and the versions of the compiler and of torch. The key names the
file, so records of other versions lie beside each other and none is ever read as another. Within a record there is one
bucket for each number of tokens, complete with every legal configuration: its time, or why it was not timed.

A bucket that is being measured is a journal, one line a configuration, appended as each is done; what a killed run
leaves is read back to the last whole line. A record is written to a temporary name and renamed. Nothing that is read
is trusted: a file that is not exactly what is written here is an error that names it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from deepinfer_compile import render
from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.files import sync_folder
from deepinfer_compile.bundle.paths import open_regular
from deepinfer_compile.bundle.replace import FolderLock, new_sibling, siblings
from deepinfer_compile.errors import BadTuning
from deepinfer_compile.kernels import AnySpec, fields_of
from deepinfer_compile.runtime.stored import Malformed, anything, items, number, record, table, text, whole

FORMAT = "deepinfer-tuning"
SCHEMA = 1
DIALECT = "triton"
MOST_BYTES = 64 << 20
"""Of one record."""
MARGIN = 0.02
"""The share by which a configuration must be faster than the default to replace it: less is noise."""

Requests = tuple[tuple[int, int, int], ...]
"""How many requests, new tokens of each, context of each including them; one entry for each run of equal ones."""


def spec_hash(spec: AnySpec) -> str:
    """A hash of what a kernel is: its template with all it includes, its operation, the names of its fields."""
    names = [[f.name for f in fields(kind)] for kind in (spec.params, spec.config)]
    content = [render.digest(spec.template(DIALECT)), spec.op.schema, *names]
    return sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Key:
    """What figures depend on. template: its folder. params: as JSON. device: what the driver calls it."""

    template: str
    op: str
    spec: str
    params: dict[str, Any]
    target: str
    device: str
    triton: str
    torch: str

    @classmethod
    def of(cls, spec: AnySpec, params: Any, target: str, device: str) -> Key:
        """The key of a measurement made by this process."""
        values = render.encode_values(spec.name, fields_of(params))
        versions = {"triton": metadata.version("triton"), "torch": str(torch.__version__).split("+")[0]}
        return cls(spec.name, spec.op.name, spec_hash(spec), values, target, device, **versions)

    def name(self) -> str:
        """Of the record's file, without its ending."""
        return f"{self.op}-{self.target}-{sha256(jsonio.dumps(asdict(self), sort=True)).hexdigest()[:16]}"


@dataclass(frozen=True)
class Measurement:
    """One configuration, as JSON. us: median microseconds of `samples` runs, or None and why it was not timed."""

    config: dict[str, Any]
    us: float | None = None
    samples: int = 0
    rejected: str = ""

    def to_json(self) -> dict[str, Any]:
        """As stored: a time or a reason, never both."""
        if self.us is None:
            return {"config": self.config, "rejected": self.rejected}
        return {"config": self.config, "us": self.us, "samples": self.samples}


@dataclass(frozen=True)
class Bucket:
    """All measurements for one number of tokens, the default's first."""

    tokens: int
    requests: Requests
    measurements: tuple[Measurement, ...]

    @property
    def default_us(self) -> float | None:
        """What the default takes, or None if it was rejected."""
        return self.measurements[0].us

    @property
    def best(self) -> Measurement | None:
        """The fastest, or the default where none is faster by MARGIN; None if everything was rejected."""
        timed = [m for m in self.measurements if m.us is not None]
        if not timed:
            return None
        fastest = min(timed, key=lambda m: m.us or 0.0)
        usual = self.measurements[0]
        kept = usual.us is not None and fastest.us is not None and fastest.us > usual.us * (1 - MARGIN)
        return usual if kept else fastest

    def counts(self) -> dict[str, int]:
        """How many configurations were legal, rejected and measured."""
        measured = sum(m.us is not None for m in self.measurements)
        legal = len(self.measurements)
        return {"legal": legal, "rejected": legal - measured, "measured": measured}

    def summary(self) -> dict[str, Any]:
        """What a reader wants to know first: it follows from the measurements."""
        best = self.best
        found = {"best": best.config if best else None, "best_us": best.us if best else None}
        head = {"tokens": self.tokens, "requests": [list(r) for r in self.requests]}
        return {**head, **found, "default": self.measurements[0].config, "default_us": self.default_us, **self.counts()}


@dataclass(frozen=True)
class Record:
    """One file of a store. buckets: in rising order of tokens."""

    key: Key
    buckets: tuple[Bucket, ...] = ()

    def bucket(self, tokens: int) -> Bucket | None:
        """The bucket for that many tokens."""
        return next((b for b in self.buckets if b.tokens == tokens), None)

    def without(self, tokens: int) -> Record:
        """The record without a bucket."""
        return Record(self.key, tuple(b for b in self.buckets if b.tokens != tokens))

    def having(self, bucket: Bucket) -> Record:
        """The record with a bucket, in place of one for as many tokens."""
        others = self.without(bucket.tokens).buckets
        return Record(self.key, tuple(sorted((*others, bucket), key=lambda b: b.tokens)))


_KEY = record({"params": table(anything), **{f.name: text for f in fields(Key) if f.name != "params"}})
_CONFIG = table(anything, 1)
_TIMED = record({"config": _CONFIG, "us": number, "samples": whole(1)})
_REJECTED = record({"config": _CONFIG, "rejected": text})
_REQUESTS = items(items(whole(), 3), 1)


def _measurement_form(value: Any, where: str) -> None:
    rejected = isinstance(value, dict) and "rejected" in value
    (_REJECTED if rejected else _TIMED)(value, where)
    if not rejected and not (math.isfinite(value["us"]) and value["us"] > 0):
        raise Malformed(f"{where}.us is no time")


_BUCKET = record(
    {
        "tokens": whole(1), "requests": _REQUESTS, "best": anything, "best_us": anything, "default": _CONFIG,
        "default_us": anything, "legal": whole(1), "rejected": whole(), "measured": whole(),
        "measurements": items(_measurement_form, 1),
    }
)  # fmt: skip
_RECORD = record({"format": text, "schema": whole(), "key": _KEY, "buckets": items(_BUCKET)})
_HEAD = record({"key": _KEY, "tokens": whole(1), "requests": _REQUESTS})


def _measurement(data: Mapping[str, Any]) -> Measurement:
    return Measurement(data["config"], data.get("us"), data.get("samples", 0), data.get("rejected", ""))


def _bucket(data: Mapping[str, Any], where: str) -> Bucket:
    """Raises Malformed where the summary is not what the measurements give."""
    requests = tuple((int(r[0]), int(r[1]), int(r[2])) for r in data["requests"] if len(r) == 3)
    made = Bucket(data["tokens"], requests, tuple(_measurement(m) for m in data["measurements"]))
    told = {name: value for name, value in data.items() if name != "measurements"}
    if told != made.summary():
        raise Malformed(f"{where} says something else than its measurements")
    if len({json.dumps(m.config, sort_keys=True) for m in made.measurements}) != len(made.measurements):
        raise Malformed(f"{where} has a configuration twice")
    if sum(count * new for count, new, _ in requests) != made.tokens:
        raise Malformed(f"{where}.requests have not {made.tokens} tokens")
    return made


def dump_record(found: Record) -> bytes:
    """The bytes of a record's file."""
    buckets = [{**b.summary(), "measurements": [m.to_json() for m in b.measurements]} for b in found.buckets]
    return jsonio.dumps({"format": FORMAT, "schema": SCHEMA, "key": asdict(found.key), "buckets": buckets})


def parse_record(data: bytes, file: str) -> Record:
    """The inverse of `dump_record`. Raises BadTuning naming `file`."""
    try:
        value = jsonio.loads(data)
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            raise Malformed(f"its format is not {FORMAT!r}")
        if value.get("schema") != SCHEMA:
            raise Malformed(f"its schema is {str(value.get('schema'))[:20]}, this version reads {SCHEMA}")
        _RECORD(value, "the record")
        buckets = tuple(_bucket(b, f"the record.buckets[{i}]") for i, b in enumerate(value["buckets"]))
        if [b.tokens for b in buckets] != sorted({b.tokens for b in buckets}):
            raise Malformed("its buckets are not in rising order of tokens")
        return Record(Key(**value["key"]), buckets)
    except (Malformed, jsonio.JsonError) as error:
        raise BadTuning(file=file, reason=str(error)) from None


class Journal:
    """The measurements of a bucket that is not complete: a line each, so that a kill loses the one in flight."""

    def __init__(self, path: Path, key: Key, tokens: int, requests: Requests) -> None:
        """Read what is there, or begin. Raises BadTuning for a line that was never written here, OSError."""
        self._path = path
        head = {"key": asdict(key), "tokens": tokens, "requests": [list(r) for r in requests]}
        found = _read(path).split(b"\n")[:-1] if os.path.lexists(path) else []
        if not found or self._parse(_HEAD, found[0]) != head:
            found = []
        else:
            for line in found[1:]:
                self._parse(_measurement_form, line)
        # rewritten without a torn last line, so that the next one begins where a line begins
        whole_lines = [json.dumps(head).encode(), *found[1:]]
        self.found = [_measurement(json.loads(line)) for line in whole_lines[1:]]
        write_whole(path, b"".join(line + b"\n" for line in whole_lines))

    def _parse(self, form: Any, line: bytes) -> Any:
        try:
            value = jsonio.loads(line)
            form(value, "a line")
        except (Malformed, jsonio.JsonError) as error:
            raise BadTuning(file=str(self._path), reason=str(error)) from None
        return value

    def add(self, made: Measurement) -> None:
        """Append one measurement. Raises OSError."""
        self.found.append(made)
        with self._path.open("ab") as file:
            file.write(json.dumps(made.to_json(), allow_nan=False).encode() + b"\n")

    def remove(self) -> None:
        """End it: the record has the bucket."""
        self._path.unlink()


def _read(path: Path) -> bytes:
    """The content of a plain file. Raises BadTuning."""
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise BadTuning(file=str(path), reason=f"it cannot be read: {error.strerror or error}") from None
    if len(data) > MOST_BYTES:
        raise BadTuning(file=str(path), reason=f"it has more than {MOST_BYTES} bytes")
    return data


def write_whole(path: Path, data: bytes) -> None:
    """Write a file so that every moment shows the old or the new one. Raises OSError."""
    beside = new_sibling(path, "tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    sync_folder(path.parent)


class Store:
    """A folder of records."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, key: Key) -> Path:
        """Where the record of a key is or would be."""
        return self.folder / f"{key.name()}.json"

    def read(self, key: Key) -> Record:
        """The record of a key, without buckets if there is none. Raises BadTuning."""
        path = self.path(key)
        return self._load(path) if os.path.lexists(path) else Record(key)

    def records(self) -> list[Record]:
        """Every record, by file name. Raises BadTuning for the first that is damaged."""
        return [self._load(path) for path in sorted(self.folder.glob("[!.]*.json"))]

    def write(self, found: Record) -> None:
        """Put a record in its place. Raises OSError."""
        write_whole(self.path(found.key), dump_record(found))

    def journal(self, key: Key, tokens: int, requests: Requests) -> Journal:
        """What was measured of a bucket so far. Raises BadTuning, OSError."""
        return Journal(self.folder / f".{key.name()}.{tokens}.jsonl", key, tokens, requests)

    @contextlib.contextmanager
    def claim(self, key: Key) -> Iterator[None]:
        """Keep other sweeps away from a record. Raises OutputBusy, OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(self.path(key))
        try:
            for left in siblings(self.path(key), "tmp"):
                left.unlink()
            yield
        finally:
            lock.release()

    def _load(self, path: Path) -> Record:
        found = parse_record(_read(path), str(path))
        if found.key.name() != path.stem:
            raise BadTuning(file=str(path), reason=f"it is the record {found.key.name()}, under another name")
        return found
