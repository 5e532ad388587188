"""Renders kernel templates to readable source. Strict on purpose: a name the template does not know, a name it misses
and a value that is more than data are all errors, so a rendered file is fully described by its first line, the stamp.

A value reaches the source as a literal of the source's language that means exactly the same value, or not at all: the
renderer prints every expression itself (Jinja's `finalize`), so that no template can print a value's Python spelling by
accident. In Triton sources a float keeps its last bit and its special values, a string stays a quoted string and a
torch dtype becomes Triton's. C++ templates take whole numbers and words only.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any

import jinja2
import torch
from jinja2 import meta
from jinja2.runtime import Context

from deepinfer_compile.errors import BadStamp

Value = bool | int | float | str | torch.dtype | tuple["Value", ...]

STAMP = "stamp"
"""The name under which a template prints its own first line."""
TRITON_DTYPES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
_COMMENT = {".cpp": "//", ".h": "//", ".py": "#"}
_WORD = re.compile(r"[A-Za-z0-9_.+-]*\Z")
_STAMP = re.compile(r"(?:#|//)?\s*deepinfer (\S+) (\{.*\}) ([0-9a-f]{16})\s*\Z", re.ASCII)


class _Line(str):
    """Text that a template prints as it is: the stamp, made here."""


def python_literal(value: object) -> str:
    """A Python expression (with `tl`, triton.language, in reach) for exactly this value. Raises TypeError."""
    if isinstance(value, torch.dtype) and value in TRITON_DTYPES:
        return f"tl.{TRITON_DTYPES[value]}"
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) is str:
        return ascii(value)
    if type(value) is tuple:
        return "(" + "".join(f"{python_literal(item)}, " for item in value).rstrip() + ")"
    if type(value) in (bool, int):
        return repr(value)
    raise TypeError(f"{value!r} has no exact literal in a Triton source")


def cpp_literal(value: object) -> str:
    """C++ text for exactly this whole number, truth value or word. Raises TypeError."""
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int and -(1 << 63) < value < 1 << 63:
        return str(value)
    if type(value) is str and _WORD.match(value):
        return value
    raise TypeError(f"{value!r} has no exact literal in a C++ source")


_LITERALS: dict[str, Callable[[object], str]] = {
    ".cpp": cpp_literal,
    ".h": cpp_literal,
    ".py": python_literal,
}


@jinja2.pass_context
def _print(context: Context, value: object) -> str:
    """What an expression of a template becomes in its output."""
    if type(value) is _Line:
        return value
    if isinstance(value, jinja2.Undefined):
        return str(value)  # raises, with the name
    return _LITERALS[_suffix(context.name or "")](value)


def _suffix(template: str) -> str:
    return PurePosixPath(template.removesuffix(".j2")).suffix


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(str(files("deepinfer_compile.templates")))
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        finalize=_print,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _source(template: str) -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), template)[0]


@cache
def _mentions(text: str) -> tuple[frozenset[str], tuple[str | None, ...]]:
    """Names that a template's text leaves undeclared, and the templates it includes or imports."""
    parsed = jinja2.Environment(trim_blocks=True, lstrip_blocks=True).parse(text)
    return frozenset(meta.find_undeclared_variables(parsed)), tuple(meta.find_referenced_templates(parsed))


def _tree(template: str) -> dict[str, str]:
    """The template and everything it includes or imports by name, each once, in order of first mention."""
    found: dict[str, str] = {}
    todo = [template]
    while todo:
        name = todo.pop(0)
        if name in found:
            continue
        found[name] = _source(name)
        for other in _mentions(found[name])[1]:
            if other is None:
                raise ValueError(f"{name} chooses an included template at run time; name it literally")
            todo.append(other)
    return found


def names_of(template: str) -> frozenset[str]:
    """The names of the values that `template` needs; `stamp` is among them where it prints its stamp itself."""
    return frozenset(name for text in _tree(template).values() for name in _mentions(text)[0])


def digest(template: str) -> str:
    """A hash of the template's text and of all it includes."""
    return hashlib.sha256("\0".join(_tree(template).values()).encode()).hexdigest()[:16]


def encode(value: Value) -> Any:
    """A value as JSON. Raises TypeError for what is more than data: only exact types pass, so no subclass does."""
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if type(value) is float and not math.isfinite(value):
        return {"float": str(value)}
    if type(value) is tuple:
        return [encode(item) for item in value]
    if type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"is a {type(value).__name__}; templates take plain data only")


def decode(data: Any) -> Value:
    """The inverse of `encode`. Raises ValueError."""
    if isinstance(data, list):
        return tuple(decode(item) for item in data)
    if isinstance(data, dict):
        if list(data) == ["float"] and data["float"] in ("inf", "-inf", "nan"):
            return float(data["float"])
        found = getattr(torch, str(data.get("dtype")), None)
        if list(data) == ["dtype"] and isinstance(found, torch.dtype):
            return found
        raise ValueError(f"{data} is no value")
    if data is None:
        raise ValueError("null is no value")
    value: Value = data
    return value


def encode_values(template: str, values: Mapping[str, Value]) -> dict[str, Any]:
    """All values as JSON. Raises TypeError naming the template and the value that is not plain data."""
    found = {}
    for name, value in values.items():
        try:
            found[name] = encode(value)
        except TypeError as err:
            raise TypeError(f"{template}: value {name!r} {err}") from None
    return found


def stamp(template: str, data: Mapping[str, Any]) -> str:
    """One line that says how to render the file again: template, values as JSON, and a hash of the template's text."""
    return f"deepinfer {template} {json.dumps(data, sort_keys=True, allow_nan=False)} {digest(template)}"


def parse_stamp(line: str) -> tuple[str, dict[str, Any], str]:
    """Template, values as JSON and template hash of a stamp line, with or without comment sign. Raises BadStamp."""
    found = _STAMP.match(line.strip())
    if found is None:
        raise BadStamp(reason="it does not read `deepinfer TEMPLATE {values} HASH`", stamp=line.strip()[:120])
    try:
        data = json.loads(found[2])
    except ValueError as err:
        raise BadStamp(reason=f"its values are not JSON: {err}", stamp=line.strip()[:120]) from None
    return found[1], data, found[3]


def fill(template: str, values: Mapping[str, Value], line: str) -> str:
    """The text of `template` with `values` filled in and `line` as its stamp.

    Raises ValueError when the names given are not exactly the names needed, TypeError for a value that is not plain
    data or has no literal in the template's language.
    """
    needed, given = names_of(template) - {STAMP}, frozenset(values)
    if needed != given:
        raise ValueError(
            f"{template}: missing values {sorted(needed - given)}, unknown values {sorted(given - needed)}"
        )
    _check_literals(template, values)
    found = {**values, STAMP: _Line(line)} if STAMP in names_of(template) else dict(values)
    return _environment().get_template(template).render(**found)


def _leaves(value: Value) -> Iterator[Value]:
    """The value itself, or the items of a tuple down to the last."""
    if type(value) is not tuple:
        yield value
        return
    for item in value:
        yield from _leaves(item)


def _check_literals(template: str, values: Mapping[str, Value]) -> None:
    """Every value and every item of a tuple can be printed exactly. Raises TypeError naming the value."""
    literal = _LITERALS[_suffix(template)]
    for name, value in values.items():
        try:
            for item in _leaves(value):
                literal(item)
        except TypeError as err:
            raise TypeError(f"{template}: value {name!r}: {err}") from None


def render(template: str, **values: Value) -> str:
    """The text of `template` (a path below the templates folder, ending in `.j2`) with `values` filled in.

    The first line is a comment holding the stamp. Raises what `fill` raises.
    """
    suffix = _suffix(template)
    if not template.endswith(".j2") or suffix not in _COMMENT:
        raise ValueError(f"{template!r} is not a template of a known language: {sorted(_COMMENT)} followed by .j2")
    line = stamp(template, encode_values(template, values))
    return f"{_COMMENT[suffix]} {line}\n{fill(template, values, line)}"
