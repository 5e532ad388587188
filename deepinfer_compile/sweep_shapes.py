"""What a sweep measures: calls of one kernel, from a JSON file or from the kernel's own cases.

    [{"op": "experts", "params": {"hidden": 7168, ...}, "tokens": [1, 16, 64], "new": 1, "context": 4096}]

params: every field of the kernel's Params. tokens: numbers of new tokens, a bucket each. new: of each request, 1 if it
is not given; it divides every number of tokens. context: of each request, including its new tokens, which it is if it
is not given. op: needed where a template computes several operations. A dtype is given by its name, a tuple as a list.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from deepinfer_compile import render
from deepinfer_compile.bundle import jsonio
from deepinfer_compile.errors import BadOption, BadShapes, CompileError
from deepinfer_compile.kernels import AnySpec, Case, specs
from deepinfer_compile.runtime.stored import Malformed, anything, items, record, table, text, whole
from deepinfer_compile.tuning import DIALECT, Requests

DEFAULT = "default"
MOST_BYTES = 1 << 20
"""Of a shapes file."""
_SHAPE = record(
    {"params": table(anything), "tokens": items(whole(1), 1)}, {"op": text, "new": whole(1), "context": whole(1)}
)
_SHAPES = items(_SHAPE, 1)


@dataclass(frozen=True)
class Shape:
    """One bucket to measure."""

    spec: AnySpec
    params: Any
    tokens: int
    requests: Requests

    def case(self) -> Case[Any]:
        """The batch."""
        flat = [(new, length) for count, new, length in self.requests for _ in range(count)]
        return Case(str(self), self.params, tuple(n for n, _ in flat), tuple(length for _, length in flat))

    def __str__(self) -> str:
        parts = [f"{count} x {new} of {length}" for count, new, length in self.requests]
        tokens = f"{self.tokens} token{'s' * (self.tokens != 1)}"
        return f"{self.spec.op.name}, {tokens} ({', '.join(parts)})"


def template_specs(template: str) -> tuple[AnySpec, ...]:
    """The kernels of a template that can be tuned. Raises BadOption."""
    tunable = [s for s in specs() if DIALECT in s.sources]
    found = tuple(s for s in tunable if s.name == template)
    if not found:
        fix = f"use one of {', '.join(dict.fromkeys(s.name for s in tunable))}"
        raise BadOption(name="TEMPLATE", value=template, reason="no kernel has that name", fix=fix)
    return found


def read_shapes(template: str, source: str | Path) -> tuple[Shape, ...]:
    """The buckets of a shapes file, or of the template's own cases for "default". Raises BadShapes, BadOption."""
    found = template_specs(template)
    if str(source) == DEFAULT:
        return default_shapes(found)
    file = Path(source)
    try:
        if file.stat().st_size > MOST_BYTES:
            raise BadShapes(file=file, reason=f"it has more than {MOST_BYTES} bytes", fix="name fewer shapes")
        data = jsonio.loads(file.read_bytes())
        _SHAPES(data, "the file")
    except OSError as error:
        fix = f"give a JSON file, or {DEFAULT!r} for the kernel's own cases"
        raise BadShapes(file=file, reason=f"it cannot be read: {error.strerror or error}", fix=fix) from None
    except (Malformed, jsonio.JsonError) as error:
        fix = 'write a list of {"params": {...}, "tokens": [...], "new": 1, "context": 4096}'
        raise BadShapes(file=file, reason=str(error), fix=fix) from None
    shapes = [s for i, entry in enumerate(data) for s in _entry(found, entry, str(file), f"the file[{i}]")]
    return tuple(_unique(shapes, str(file)))


def default_shapes(found: Iterable[AnySpec]) -> tuple[Shape, ...]:
    """The cases that tests use, those with tokens; of two with equal Params and tokens the first."""
    shapes: dict[tuple[str, Any, int], Shape] = {}
    for spec in found:
        for case in spec.cases:
            runs = [(n, length) for n, length in zip(case.new, case.lengths)]
            requests = tuple((len(list(same)), n, length) for (n, length), same in groupby(runs))
            tokens = sum(case.new)
            if tokens:
                shapes.setdefault((spec.op.name, case.params, tokens), Shape(spec, case.params, tokens, requests))
    return tuple(shapes.values())


def _entry(found: tuple[AnySpec, ...], entry: dict[str, Any], file: str, where: str) -> list[Shape]:
    """The buckets of one entry. Raises BadShapes."""
    names = ", ".join(s.op.name for s in found)
    chosen = [s for s in found if s.op.name == entry.get("op", s.op.name)]
    if len(chosen) != 1:
        reason = "names none of the template's operations" if "op" in entry else "is needed: the template has several"
        reason = f"{where}.op {reason}"
        raise BadShapes(file=file, reason=reason, fix=f"give one of {names}")
    params = _params(chosen[0], entry["params"], file, f"{where}.params")
    new = entry.get("new", 1)
    context = entry.get("context", new)
    if context < new:
        fix = "context counts the new tokens too"
        raise BadShapes(file=file, reason=f"{where}.context is {context}, less than {new} new tokens", fix=fix)
    for tokens in entry["tokens"]:
        if tokens % new:
            reason = f"{where}.tokens has {tokens}, no multiple of {new} new tokens a request"
            raise BadShapes(file=file, reason=reason, fix="change tokens or new")
    return [Shape(chosen[0], params, n, ((n // new, new, context),)) for n in entry["tokens"]]


def _unique(shapes: list[Shape], file: str) -> list[Shape]:
    seen: set[tuple[str, Any, int]] = set()
    for shape in shapes:
        key = (shape.spec.op.name, shape.params, shape.tokens)
        if key in seen:
            reason = f"{shape.tokens} tokens are there twice for {shape.params}"
            raise BadShapes(file=file, reason=reason, fix="one call a number of tokens: choices go by that alone")
        seen.add(key)
    return shapes


def _params(spec: AnySpec, given: dict[str, Any], file: str, where: str) -> Any:
    """Params from JSON, every field of its own type. Raises BadShapes."""
    kinds = typing.get_type_hints(spec.params)
    wanted = [f.name for f in dataclasses.fields(spec.params)]
    fix = f"the fields are {', '.join(f'{name} ({kinds[name].__name__})' for name in wanted)}"
    if given.keys() != set(wanted):
        lacks, extra = [n for n in wanted if n not in given], sorted(given.keys() - set(wanted))
        parts = [f"lacks {', '.join(lacks)}"] * bool(lacks) + [f"has the unknown {', '.join(extra)}"] * bool(extra)
        raise BadShapes(file=file, reason=f"{where} {' and '.join(parts)}", fix=fix)
    values = {}
    for name in wanted:
        try:
            values[name] = _value(kinds[name], given[name])
        except ValueError as error:
            raise BadShapes(file=file, reason=f"{where}.{name} {error}", fix=fix) from None
    try:
        return spec.params(**values)
    except ValueError as error:
        raise BadShapes(file=file, reason=f"{where}: {error}", fix="use sizes that a model has") from None


def _value(kind: type, given: Any) -> Any:
    """A value of a field's type; a dtype may be given by its name. Raises ValueError."""
    if kind is torch.dtype and isinstance(given, str):
        given = {"dtype": given}
    try:
        value = render.decode(given)
    except (TypeError, AttributeError):
        raise ValueError(f"is {str(given)[:60]!r}, no value") from None
    if kind is float and type(value) is int:
        return float(value)
    parts = value if isinstance(value, tuple) else ()
    if type(value) is not (typing.get_origin(kind) or kind) or {type(p) for p in parts} - {*typing.get_args(kind)}:
        raise ValueError(f"is {str(given)[:60]!r}, not of type {kind.__name__}")
    return value


def fault(shape: Shape, file: str, error: Exception) -> CompileError:
    """The error for a shape that the kernel's own functions do not take."""
    fix = "give Params that a graph could give; `deepinfer-compile inspect` of a bundle shows some"
    return BadShapes(file=file, reason=f"{shape}: {error}", fix=fix)
