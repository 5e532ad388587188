"""What the pages of a request hold: the keys by which the tree of cached pages finds them, and their names on disk.

A request that waits asks for them at every step, and each of its thousands of pages takes a hash, so they are made once
and kept while it waits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.request import Request

Key = tuple[bytes, int]
"""What a page holds beside what its parents hold: 64 tokens, and the hint if it matters."""
SIZE = PAGE_SIZE * 8
"""Bytes of a page's tokens."""


@dataclass
class Asked:
    """Of a request of so many tokens: the keys of its full pages, its last token's not among them, and the names of as
    many as were needed."""

    length: int
    keys: list[Key]
    digests: list[bytes] = field(default_factory=list)

    def names(self, known: Sequence[bytes], root: bytes) -> list[bytes]:
        """Those of all pages. known: of the first ones; root: what they begin from."""
        if not self.digests:
            self.digests += known
        digest = self.digests[-1] if self.digests else root
        for key in self.keys[len(self.digests) :]:
            digest = digest_of(digest, key)
            self.digests.append(digest)
        return self.digests


def digest_of(parent: bytes, key: Key) -> bytes:
    """The name of a page on disk: a hash of what it holds and of the name of the page before."""
    tokens, hint = key
    return hashlib.sha256(parent + tokens + hint.to_bytes(8, "little")).digest()


def page_key(request: Request, page: int, reads_hint: bool) -> Key:
    """What a page holds, beside what its parents hold. The hint of a row is max(prompt, position + 1)."""
    start, prompt = page * PAGE_SIZE, len(request.prompt)
    tokens = request.prompt[start : start + PAGE_SIZE].tobytes()
    if start + PAGE_SIZE > prompt:
        answer = request.output_ids[max(start - prompt, 0) : start + PAGE_SIZE - prompt]
        tokens += np.array(answer, dtype=np.int64).tobytes()
    return tokens, max(prompt, start + 1) if reads_hint else 0


def page_keys(request: Request, reads_hint: bool) -> list[Key]:
    """Of a request's full pages, its last token's not among them."""
    prompt, count = len(request.prompt), (request.length - 1) // PAGE_SIZE
    tokens = request.prompt.tobytes()
    hint = prompt if reads_hint else 0
    whole = min(prompt // PAGE_SIZE, count)
    keys = [(tokens[at : at + SIZE], hint) for at in range(0, whole * SIZE, SIZE)]
    return keys + [page_key(request, page, reads_hint) for page in range(whole, count)]
