"""JSON as this package reads and writes it: strict both ways, so that what is written is what is read.

Reading refuses what `json.loads` lets through: duplicate keys, NaN and infinities, bytes that are not UTF-8, and
nesting or numbers that exhaust the interpreter. Writing refuses what `json.dumps` silently changes: keys that are not
strings and values of other types. Nothing here imports torch.
"""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 100
"""Deepest nesting that is written. Reading is bounded by the interpreter's own recursion limit, which is larger."""


class JsonError(ValueError):
    """Bytes that are not the JSON this package accepts; the message is one readable reason."""


def loads(data: bytes) -> Any:
    """Parse strict JSON. Raises JsonError."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except JsonError:
        raise
    except RecursionError:
        raise JsonError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise JsonError(f"it is not valid JSON: {error}") from None


def dumps(value: Any, sort: bool = False) -> bytes:
    """Readable JSON, one item a line; keys in their order, or sorted. Raises TypeError naming a bad value's place."""
    check_plain(value)
    return (json.dumps(value, sort_keys=sort, indent=1, allow_nan=False) + "\n").encode("ascii")


def check_plain(value: Any, where: str = "$", depth: int = 0) -> None:
    """Raise TypeError unless `value` is made of dict[str, ...], list, tuple, str, int, finite float, bool and None."""
    if depth > MAX_DEPTH:
        raise TypeError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"{where} has the key {key!r}, which is not a string")
            check_plain(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            check_plain(item, f"{where}[{index}]", depth + 1)
    elif isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{where} is {value}, which JSON cannot hold")
    elif value is not None and type(value) not in (str, int, bool):
        raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonError(f"the key {twice!r} occurs twice in one object")
    return result


def _no_constant(name: str) -> Any:
    raise JsonError(f"{name} is not JSON")
