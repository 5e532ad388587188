"""Text that remembers who wrote it: message characters replaced by private-use stand-ins.

`Marks` is the map from characters to stand-ins for one rendering, `MarkedText` the `str` a template works on. Templates
look inside messages (strip, split at `</think>`, `startswith`), so marked text marks what it is compared with: under a
one-to-one map of characters every such question has the answer it had for the original. Whitespace is not marked, so
that stripping and line splitting work; operations not covered here give a result that no longer translates back to
the plain rendering, which is how the caller finds out.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from deepinfer_compile.errors import BadChat

_STAND_IN = re.compile("[\U000f0000-\U0010ffff]")


class Marks:
    """A one-to-one map from characters to private-use stand-ins that occur nowhere else in one rendering.

    `written` holds the characters of the messages, `avoid` those the template may write itself. Stand-ins are given out
    in code-point order, so marked strings sort as the originals do.
    """

    def __init__(self, written: set[str], avoid: set[str]) -> None:
        taken = written | avoid
        points = chain(range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
        self._free = (point for point in points if chr(point) not in taken)
        self._stand_in: dict[int, int] = {}
        self._original: dict[int, int] = {}
        self._escapes: dict[bool, dict[int, str]] = {}
        self._allot(written)

    def _allot(self, chars: Iterable[str]) -> None:
        for char in sorted(chars):
            if char.isspace() or ord(char) in self._stand_in or ord(char) in self._original:
                continue
            point = next(self._free, None)
            if point is None:
                raise BadChat(reason="the messages use more than 100,000 different characters", fix="split the chat")
            self._stand_in[ord(char)] = point
            self._original[point] = ord(char)

    def mark(self, text: str) -> str:
        """`text` with every character but whitespace replaced by its stand-in; stand-ins stay."""
        self._allot(set(text))
        return text.translate(self._stand_in)

    def plain(self, text: str) -> str:
        """The original of `text`."""
        return text.translate(self._original)

    def masked(self, text: str, word: str, other: str) -> str:
        """`text` with each stand-in replaced by `word` if it stands for a word character, else by `other`."""
        return text.translate({p: word if _is_word(chr(char)) else other for p, char in self._original.items()})

    def wrap(self, value: Any) -> Any:
        """`value` with strings that hold stand-ins as `MarkedText`, also inside lists and tuples."""
        if isinstance(value, (list, tuple)):
            return type(value)(self.wrap(item) for item in value)
        if not isinstance(value, str) or not _STAND_IN.search(value):
            return value
        text = MarkedText(value)
        text.marks = self
        return text

    def wrap_deep(self, value: Any) -> Any:
        """Marked copy of message data (strings, lists, dicts with their keys)."""
        if isinstance(value, str):
            return self.wrap(self.mark(value))
        if isinstance(value, list):
            return [self.wrap_deep(item) for item in value]
        if isinstance(value, dict):
            return {self.wrap_deep(key): self.wrap_deep(item) for key, item in value.items()}
        return value

    def needle(self, value: Any) -> Any:
        """What to look for in marked text in place of `value`."""
        if isinstance(value, tuple):
            return tuple(self.needle(item) for item in value)
        return self.mark(value) if isinstance(value, str) else value

    def escaped(self, text: str, ascii_only: bool) -> str:
        """JSON `text` with the escapes that its stand-ins hid from the JSON writer."""
        table = self._escapes.get(ascii_only)
        if table is None:
            known = list(self._original.items())
            table = {p: self.mark(json.dumps(chr(char), ensure_ascii=ascii_only)[1:-1]) for p, char in known}
            self._escapes[ascii_only] = table
        if ascii_only:
            unmarked = {char for char in text if not char.isascii() and ord(char) not in table}
            table = table | {ord(char): json.dumps(char)[1:-1] for char in unmarked}
        return text.translate(table)


def _is_word(char: str) -> bool:
    kind = unicodedata.category(char)
    return kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or char in "\u200c\u200d"


class MarkedText(str):
    """Marked text: `str` methods see their arguments marked, and their results stay marked text."""

    marks: Marks

    def __str__(self) -> str:
        return self

    def __hash__(self) -> int:
        return hash(self.marks.plain(self))

    def __repr__(self) -> str:
        return self.marks.mark(repr(self.marks.plain(self)))

    def __iter__(self) -> Iterator[str]:
        return (self.marks.wrap(char) for char in str.__iter__(self))

    def __radd__(self, left: Any) -> Any:
        return self.marks.wrap(str.__add__(left, self)) if isinstance(left, str) else NotImplemented

    def replace(self, old: Any, new: Any, count: Any = -1) -> Any:
        return self.marks.wrap(str.replace(self, self.marks.needle(old), new, count))


def _asking(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: MarkedText, *args: Any, **named: Any) -> Any:
        needles = [self.marks.needle(arg) for arg in args]
        return self.marks.wrap(method(self, *needles, **{key: self.marks.needle(arg) for key, arg in named.items()}))

    return call


def _keeping(name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda self, *args: self.marks.wrap(method(self, *args))


def _original(name: str) -> Callable[..., Any]:
    method = getattr(str, name)
    return lambda self, *args: method(self.marks.plain(self), *args)


def _recased(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def call(self: MarkedText) -> Any:
        wholly_marked = all(char.isspace() or _STAND_IN.match(char) for char in str.__iter__(self))
        return self.marks.wrap(self.marks.mark(method(self.marks.plain(self))) if wholly_marked else method(self))

    return call


_METHODS: dict[Callable[[str], Callable[..., Any]], str] = {
    _asking: "__eq__ __ne__ __contains__ startswith endswith find rfind index rindex count split rsplit partition "
    "rpartition strip lstrip rstrip removeprefix removesuffix",
    _keeping: "__add__ __mul__ __rmul__ __getitem__ splitlines join",
    _original: "isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric isprintable istitle isupper",
    _recased: "upper lower title capitalize swapcase casefold",
}
for _make, _names in _METHODS.items():
    for _name in _names.split():
        setattr(MarkedText, _name, _make(_name))
