"""Token ids to text while they arrive, at a cost per token that does not depend on how much came before.

Byte-level decoders (the common case) are an exact byte table and an incremental UTF-8 decoder, which together give what
decoding all ids at once gives, invalid bytes included. Every other decoder is asked for the text of a short window: the
tokens emitted last, as context, and those not yet emitted, because decoders look only at neighbours and at being first.

Byte-fallback tokens (`<0xE4>`) go through the incremental UTF-8 decoder too. There the library decodes a whole run of
bytes or none of it: one bad byte makes every byte of its run U+FFFD. A stream has shown the good characters of the run
by then, so it keeps them and replaces the bad bytes only. `decode` of the same ids differs in that case alone.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

_FALLBACK = re.compile("<0x([0-9A-Fa-f]{2})>")
_HELD = 4
"""Tokens at most held back for a character that is not complete: UTF-8 has no longer ones."""


def _byte_alphabet() -> dict[int, int]:
    """Code point to byte, for the 256 characters in which byte-level vocabularies are written."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + index: byte for index, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _decoder_types(tokenizer: Tokenizer) -> list[str]:
    """Class names of the decoders that run, in order."""
    if tokenizer.decoder is None:
        return []
    carrier = Tokenizer(BPE())
    carrier.decoder = tokenizer.decoder
    decoder: dict[str, Any] = json.loads(carrier.to_str())["decoder"]
    return [part["type"] for part in decoder.get("decoders", [decoder])]


class DetokTables:
    """What the detokenizers of one tokenizer share: the bytes of each token, filled in as tokens come up."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        types = _decoder_types(tokenizer)
        self.tokenizer = tokenizer
        self.byte_level = types == ["ByteLevel"]
        self._byte_fallback = "ByteFallback" in types
        self._model = tokenizer.model
        self._added: dict[int, str] = {}
        self._special: set[str] = set()
        for token_id, token in tokenizer.get_added_tokens_decoder().items():
            normalizer = tokenizer.normalizer if token.normalized else None
            self._added[token_id] = normalizer.normalize_str(token.content) if normalizer else token.content
            if token.special:
                self._special.add(token.content)
        self._bytes: dict[int, bytes] = {}

    def text(self, token_id: int) -> str | None:
        """How the decoder sees the token; None for ids that no token has."""
        added = self._added.get(token_id)
        found: str | None = self._model.id_to_token(token_id) if added is None else added
        return found

    def shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding shows the token at all."""
        text = self.text(token_id)
        return text is not None and not (skip_special_tokens and text in self._special)

    def spelled(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            text = self.text(token_id) or ""
            points = [_BYTES.get(ord(char), -1) for char in text]
            known = self._bytes[token_id] = text.encode() if -1 in points else bytes(points)
        return known

    def fallback(self, token_id: int) -> bytes:
        """The byte of a byte-fallback token, b"" for any other token."""
        match = _FALLBACK.fullmatch(self.text(token_id) or "") if self._byte_fallback else None
        return bytes([int(match[1], 16)]) if match else b""


class Detok:
    """Text of one stream of ids. `push` gives what is certain so far, `flush` the rest and starts over.

    The texts of all pushes and the flush, joined, are the text of all ids. Ids that no token has show nothing.
    """

    def __init__(self, tables: DetokTables, skip_special_tokens: bool) -> None:
        self._tables = tables
        self._skip = skip_special_tokens
        self._reset()

    def _reset(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self._run: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """Text completed by `ids`."""
        shown = [token_id for token_id in ids if self._tables.shown(token_id, self._skip)]
        if self._tables.byte_level:
            return self._utf8.decode(b"".join(map(self._tables.spelled, shown)))
        return "".join(map(self._step, shown))

    def flush(self) -> str:
        """Text held back so far; bytes that never became a character are U+FFFD."""
        text = self._utf8.decode(b"", final=True) + self._window()
        self._reset()
        return text

    def _step(self, token_id: int) -> str:
        byte = self._tables.fallback(token_id)
        if byte:
            return self._step_byte(token_id, byte)
        text = self._end_run()
        self._pending.append(token_id)
        new = self._window()
        if new.endswith("\ufffd") and len(self._pending) < _HELD:
            return text
        self._emitted(self._pending)
        return text + new

    def _step_byte(self, token_id: int, byte: bytes) -> str:
        text = ""
        if self._pending:
            text = self._window()
            self._emitted(self._pending)
        self._run.append(token_id)
        new = self._utf8.decode(byte)
        if not new:
            return text
        if not self._context and "\ufffd" not in new:
            new = self._decode(self._run)
        self._emitted([token_id])
        return text + new

    def _end_run(self) -> str:
        """Close a run of bytes: what is left of it was no character."""
        if self._run:
            self._emitted(self._run[-1:])
        return self._utf8.decode(b"", final=True)

    def _window(self) -> str:
        """Text of the pending tokens."""
        if not self._pending:
            return ""
        return self._decode(self._context + self._pending)[len(self._context_text) :]

    def _emitted(self, ids: list[int]) -> None:
        """Make `ids` the context. Tokens without text join the old context, so that a window is never first again."""
        text = self._decode(ids)
        if not text:
            ids = (self._context + ids)[-2 * _HELD :]
            text = self._decode(ids)
        self._context, self._context_text = list(ids), text
        self._pending, self._run = [], []

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tables.tokenizer.decode(ids, skip_special_tokens=False)
        return text
