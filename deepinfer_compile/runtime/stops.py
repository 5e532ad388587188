"""The growing text of one request: incremental decoding, stop strings, and what a stream may show already.

A stop string counts at the character that completes it; of several completed there, the longest wins. So the result
does not depend on how the text was cut into tokens. Text that may be the beginning of a stop string is held back from
streams until it is known not to be one.
"""

from __future__ import annotations

from typing import Any, Protocol


class Detok(Protocol):
    """Turns the ids of one sequence into text, piece by piece."""

    def push(self, token_ids: list[int]) -> str:
        """Append ids; return the newly completed text."""
        ...

    def flush(self) -> str:
        """Return what is left at the end of the sequence."""
        ...


class TextCodec(Protocol):
    """The tokenizer of a model."""

    eos_token_ids: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt, with the special tokens its tokenizer adds."""
        ...

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat, rendered by the model's template."""
        ...

    def detokenizer(self, skip_special_tokens: bool) -> Detok:
        """A fresh incremental decoder."""
        ...

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of ids on their own."""
        ...


class TextState:
    """Text of one request.

    text: everything decoded so far, cut at a stop string once one is found. visible: how many characters of it can no
    longer be taken back; worked out only if `streaming`, else all of it.
    """

    def __init__(self, detok: Detok, stops: tuple[str, ...], *, include_stop: bool, streaming: bool) -> None:
        self._detok = detok
        self._stops = stops
        self._include_stop = include_stop
        self._streaming = streaming
        self._pushed = 0
        self.text = ""
        self.visible = 0

    @property
    def eager(self) -> bool:
        """Whether text is needed at every step, not only at the end."""
        return self._streaming or bool(self._stops)

    def advance(self, token_ids: list[int], end: int, *, checked: bool = True) -> str | None:
        """Decode `token_ids[:end]` as far as not done before; return the stop string completed by it, if any.

        `checked=False` lets stop strings pass (not more than min_tokens so far).
        """
        if end <= self._pushed:
            return None
        piece = self._detok.push(token_ids[self._pushed : end])
        self._pushed = end
        return self._append(piece, checked)

    def finish(self, token_ids: list[int], end: int) -> str | None:
        """Decode the rest of `token_ids[:end]` and the decoder's remainder; all text becomes visible.

        Return a stop string completed by it.
        """
        found = self.advance(token_ids, end) or self._append(self._detok.flush(), True)
        self.visible = len(self.text)
        return found

    def _append(self, piece: str, checked: bool) -> str | None:
        before = len(self.text)
        self.text += piece
        found = self._cut(before) if piece and checked else None
        held = self._held() if self._streaming and found is None else 0
        self.visible = len(self.text) - held
        return found

    def _cut(self, before: int) -> str | None:
        """Cut at the first stop string that ends after `before`."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        if best is None:
            return None
        end, start, stop = best
        self.text = self.text[: end if self._include_stop else start]
        return stop

    def _held(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self._include_stop:
            return 0
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that ends `text`."""
    tail = text[max(0, len(text) - len(stop) + 1) :]
    at = tail.find(stop[0])
    while at >= 0:
        if stop.startswith(tail[at:]):
            return len(tail) - at
        at = tail.find(stop[0], at + 1)
    return 0
