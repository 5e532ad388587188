"""The configurations that a build or the backend takes from a store of tuning records, and the defaults elsewhere.

A record is used where its kernel is this version's, its compiler and torch are this environment's and its target is the
one that is built for. A number of tokens takes the bucket whose number is nearest in ratio, the larger of two that are
equally near, and none that is more than REACH times larger or smaller: tiles that are best change slowly with the
number of tokens, and not at all for free. What is stored is looked up among the legal configurations, so nothing else
than those is ever rendered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_compile import render
from deepinfer_compile.errors import BadOption, BadTuning
from deepinfer_compile.kernels import AnySpec, Limits
from deepinfer_compile.tuning import Bucket, Key, Record, Store

REACH = 2.0
"""How many times larger or smaller a measured number of tokens may be."""
INTERPRETER = "interpreter"
"""The device of records that Triton's interpreter made: they say nothing of any other device."""


@dataclass(frozen=True)
class Chosen:
    """A configuration for up to `upto` tokens, None without a limit. bucket: where it was measured, None for a default.

    default_us: what the default took there, None if it was rejected.
    """

    upto: int | None
    config: Any
    bucket: int | None = None
    us: float | None = None
    default_us: float | None = None

    def to_json(self) -> dict[str, Any] | None:
        """What a bundle says about a tuned configuration, None for a default."""
        if self.bucket is None:
            return None
        return {"upto": self.upto, "tokens": self.bucket, "us": self.us, "default_us": self.default_us}


def nearest(buckets: Sequence[Bucket], tokens: int) -> Bucket | None:
    """The bucket for a number of tokens by the rule above, of those in which something was measured."""
    near = [b for b in buckets if b.best is not None and max(b.tokens, tokens) <= REACH * min(b.tokens, tokens)]
    return min(near, key=lambda b: (max(b.tokens, tokens) / min(b.tokens, tokens), -b.tokens), default=None)


class Tuned:
    """What a store says for one target. device: its name, None for the only one that the store has.

    used: how many choices came from the store. ignored: why records of kernels that were asked for were not used.
    """

    def __init__(self, folder: str | Path, target: str, limits: Limits, device: str | None = None) -> None:
        """Read every record. Raises BadOption for no folder or several devices, BadTuning."""
        self.target, self.limits = target, limits
        self.used = 0
        self.ignored: dict[str, None] = {}
        store = Store(folder)
        if not store.folder.is_dir():
            fix = "give the folder that `deepinfer-compile tune --store` wrote"
            raise BadOption(name="tuned", value=str(folder), reason="there is no such folder", fix=fix)
        self._store = store
        self._records = [r for r in store.records() if r.key.target == target]
        self.device = device or _only_device(folder, [r.key.device for r in self._records])
        self._legal: dict[str, dict[Any, Any]] = {}

    def choices(self, spec: AnySpec, params: Any, buckets: Sequence[int]) -> tuple[Chosen, ...]:
        """As `kernels.choices`: in rising order of `upto`, the last without a limit, equal neighbours as one.

        Raises BadTuning for a stored configuration that is not legal.
        """
        found: list[Chosen] = []
        for tokens in buckets:
            made = self.choose(spec, params, tokens)
            if found and (found[-1].config, found[-1].bucket) == (made.config, made.bucket):
                found.pop()
            found.append(made)
        last = found[-1]
        return (*found[:-1], Chosen(None, last.config, last.bucket, last.us, last.default_us))

    def choose(self, spec: AnySpec, params: Any, tokens: int) -> Chosen:
        """The configuration for a number of tokens. Raises BadTuning."""
        key = Key.of(spec, params, self.target, self.device)
        bucket = nearest(self._buckets(key), tokens)
        if bucket is None or bucket.best is None:
            return Chosen(tokens, spec.default(params, self.limits, tokens))
        self.used += 1
        config = self._config(key, spec, params, bucket.best.config)
        return Chosen(tokens, config, bucket.tokens, bucket.best.us, bucket.default_us)

    def _buckets(self, key: Key) -> tuple[Bucket, ...]:
        """Of the record of this key; notes why others of the same kernel and Params are not used."""
        same = [r for r in self._records if (r.key.op, r.key.params) == (key.op, key.params)]
        for record in same:
            if record.key != key:
                self.ignored[f"{self._store.path(record.key).name}: {why_not(record, key)}"] = None
        return next((r.buckets for r in same if r.key == key), ())

    def _config(self, key: Key, spec: AnySpec, params: Any, data: dict[str, Any]) -> Any:
        """The legal configuration that equals a stored one."""
        name = key.name()
        if name not in self._legal:
            self._legal[name] = {c: c for c in spec.space(params, self.limits)}
        try:
            wanted = spec.config(**{field: render.decode(item) for field, item in data.items()})
            return self._legal[name][wanted]
        except (KeyError, TypeError, ValueError):
            reason = f"{str(data)[:200]} is no legal configuration of {spec.name}"
            raise BadTuning(file=str(self._store.path(key)), reason=reason) from None


def _only_device(folder: str | Path, devices: Sequence[str]) -> str:
    real = sorted(set(devices) - {INTERPRETER})
    if len(real) > 1:
        reason = f"it has records of {' and '.join(real)}"
        raise BadOption(name="tuned", value=str(folder), reason=reason, fix="keep the records of each in a folder")
    return real[0] if real else ""


def why_not(record: Record, key: Key) -> str:
    """How a record for the same kernel and Params differs from what is wanted, in words."""
    if record.key.device != key.device:
        return f"measured on {record.key.device or 'an unnamed device'}"
    if record.key.spec != key.spec:
        return f"made from another version of the kernel {key.template}"
    return f"made with triton {record.key.triton}, torch {record.key.torch}; here {key.triton}, {key.torch}"
