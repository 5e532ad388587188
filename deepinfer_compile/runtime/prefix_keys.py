"""What the pages of a request hold: the keys by which the tree of cached pages finds them, and their names on disk.

A request that waits asks for them at every step, and each of its thousands of names takes a hash, so they are made
once, when they are needed first, and kept while it waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.pages import Ints
from deepinfer_compile.runtime.request import Request

Key = tuple[bytes, int]
"""What a page holds beside what its parents hold: 64 tokens, and the hint if it matters."""
SIZE = PAGE_SIZE * 8
"""Bytes of a page's tokens."""


@dataclass
class Asked:
    """Of a request of so many tokens: its full pages, its last token's not among them, and the names of as many as were
    needed.

    tokens: i64, of these pages. prompt: tokens of the prompt where keys hold a hint, 0 where they do not.
    """

    length: int
    tokens: Ints
    prompt: int
    digests: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, request: Request, reads_hint: bool) -> Asked:
        """The pages of a request."""
        length = request.length
        tokens = request.tokens[: (length - 1) // PAGE_SIZE * PAGE_SIZE]
        return cls(length, tokens, len(request.prompt) if reads_hint else 0)

    @property
    def count(self) -> int:
        """How many pages."""
        return len(self.tokens) // PAGE_SIZE

    def key(self, page: int) -> Key:
        """The key of a page."""
        start = page * PAGE_SIZE
        return self.tokens[start : start + PAGE_SIZE].tobytes(), self._hint(page)

    def names(self, count: int, known: Iterable[bytes], root: bytes) -> list[bytes]:
        """Those of the first pages, at least so many. known: of the first ones, looked at where there are none yet;
        root: what they begin from."""
        if not self.digests:
            self.digests += known
        digest, first = self.digests[-1] if self.digests else root, len(self.digests)
        content = self.tokens[first * PAGE_SIZE : count * PAGE_SIZE].tobytes()
        for page in range(first, count):
            start = (page - first) * SIZE
            digest = _name(digest, content[start : start + SIZE], self._hint(page))
            self.digests.append(digest)
        return self.digests

    def _hint(self, page: int) -> int:
        return max(self.prompt, page * PAGE_SIZE + 1) if self.prompt else 0


def digest_of(parent: bytes, key: Key) -> bytes:
    """The name of a page on disk: a hash of what it holds and of the name of the page before."""
    return _name(parent, *key)


def _name(parent: bytes, tokens: bytes, hint: int) -> bytes:
    return hashlib.sha256(b"".join((parent, tokens, hint.to_bytes(8, "little")))).digest()


def page_key(request: Request, page: int, reads_hint: bool) -> Key:
    """What a page holds, beside what its parents hold. The hint of a row is max(prompt, position + 1)."""
    start, prompt = page * PAGE_SIZE, len(request.prompt)
    tokens = request.prompt[start : start + PAGE_SIZE].tobytes()
    if start + PAGE_SIZE > prompt:
        answer = request.output_ids[max(start - prompt, 0) : start + PAGE_SIZE - prompt]
        tokens += np.array(answer, dtype=np.int64).tobytes()
    return tokens, max(prompt, start + 1) if reads_hint else 0
