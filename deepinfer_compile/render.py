"""Renders kernel templates to readable source. Strict on purpose: a name the template does not know, a name it misses
and a value that is more than data are all errors, so a rendered file is fully described by its first line.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath

import jinja2
from jinja2 import meta

Value = bool | int | float | str | tuple["Value", ...]

_COMMENT = {".cpp": "//", ".h": "//", ".py": "#"}


@cache
def _environment() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(str(files("deepinfer_compile.templates")))
    return jinja2.Environment(
        loader=loader,
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _source(template: str) -> str:
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), template)[0]


def _tree(template: str) -> list[str]:
    """The template and everything it includes or imports, each once, in order of first mention."""
    found: list[str] = []
    todo = [template]
    while todo:
        name = todo.pop(0)
        if name in found:
            continue
        found.append(name)
        for other in meta.find_referenced_templates(_environment().parse(_source(name))):
            if other is None:
                raise ValueError(f"{name} chooses an included template at run time; name it literally")
            todo.append(other)
    return found


def names_of(template: str) -> frozenset[str]:
    """The names of the values that `template` needs."""
    sources = [_environment().parse(_source(name)) for name in _tree(template)]
    return frozenset(name for source in sources for name in meta.find_undeclared_variables(source))


def _is_data(value: object) -> bool:
    if isinstance(value, tuple):
        return all(_is_data(item) for item in value)
    return isinstance(value, bool | int | float | str)


def stamp(template: str, **values: Value) -> str:
    """One line that says how to render the file again: template, values, and a hash of the template's text."""
    digest = hashlib.sha256("\0".join(_source(name) for name in _tree(template)).encode()).hexdigest()[:16]
    return f"deepinfer {template} {json.dumps(values, sort_keys=True)} {digest}"


def render(template: str, **values: Value) -> str:
    """The text of `template` (a path below the templates folder, ending in `.j2`) with `values` filled in.

    The first line is a comment holding `stamp`. Raises ValueError when the names given are not exactly the names
    needed, TypeError for a value that is not a bool, int, float, str or tuple of those.
    """
    suffix = PurePosixPath(template.removesuffix(".j2")).suffix
    if not template.endswith(".j2") or suffix not in _COMMENT:
        raise ValueError(f"{template!r} is not a template of a known language: {sorted(_COMMENT)} followed by .j2")
    needed, given = names_of(template), frozenset(values)
    if needed != given:
        raise ValueError(
            f"{template}: missing values {sorted(needed - given)}, unknown values {sorted(given - needed)}"
        )
    for name, value in values.items():
        if not _is_data(value):
            raise TypeError(f"{template}: value {name!r} is a {type(value).__name__}; templates take plain data only")
    body = _environment().get_template(template).render(**values)
    return f"{_COMMENT[suffix]} {stamp(template, **values)}\n{body}"
