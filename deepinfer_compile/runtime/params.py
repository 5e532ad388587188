"""What a caller may ask of one request, with vLLM's field names and defaults.

Every value is checked when the object is made, so that a wrong one is refused before any work is done for the batch it
came with. Where vLLM repairs a value silently (a tiny temperature, for example) this class either gives it a stated
meaning or refuses it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from deepinfer_compile.errors import BadOption

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    n: completions per prompt; with a seed, completion i uses seed + i.
    presence_penalty, frequency_penalty: counted over the output. repetition_penalty: over prompt and output.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p, min_p: cut on probabilities after temperature, in the order
    min_p, top_k, top_p; tokens tied with the last one kept are kept.
    seed: None draws a fresh one. The same seed gives the same tokens whatever else is in the batch.
    stop: strings that end the text (removed from it unless include_stop_str_in_output). stop_token_ids: ids that end
    it; like the end-of-text id they stay in token_ids and are not part of the text. ignore_eos: go on after it.
    max_tokens: None is up to the context length. min_tokens: so many tokens come before one that may end the output by
    an id or a stop string.
    logprobs, prompt_logprobs: how many of the most likely tokens to report beside the one taken, from the model's own
    distribution (before penalties, temperature and cuts); -1 is the whole vocabulary, None is no report.
    detokenize: False leaves `text` empty.
    retention: the class of the request, by which its cache rows are kept on disk; see prefix_cache_retention of `load`.

    Raises BadOption naming the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Iterable[str] | None = ()
    stop_token_ids: Iterable[int] | None = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    retention: str = "chat"

    def __post_init__(self) -> None:
        self._set("stop", _strings("stop", self.stop))
        self._set("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        self._check_ranges()
        self._check_combinations()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as given to the constructor, always a tuple."""
        return self.stop if isinstance(self.stop, tuple) else ()

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as given to the constructor, always a tuple."""
        return self.stop_token_ids if isinstance(self.stop_token_ids, tuple) else ()

    @property
    def penalised(self) -> bool:
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0.0, 0.0, 1.0)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_ranges(self) -> None:
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.0, math.inf, low_open=True)
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _real("min_p", self.min_p, 0.0, 1.0)
        _integer("n", self.n, 1)
        _integer("top_k", self.top_k, -1)
        _integer("min_tokens", self.min_tokens, 0)
        for name, low in (("seed", -(2**63)), ("max_tokens", 1), ("logprobs", -1), ("prompt_logprobs", -1)):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low)
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise BadOption(name=name, value=getattr(self, name), reason="it is a switch", fix="use True or False")
        if not isinstance(self.retention, str):
            raise BadOption(name="retention", value=self.retention, reason="it is not text", fix="name a class")

    def _check_combinations(self) -> None:
        if self.seed is not None and self.seed >= 2**64:
            raise BadOption(name="seed", value=self.seed, reason="it is wider than 64 bits", fix="use a smaller seed")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            reason = f"max_tokens is {self.max_tokens}"
            raise BadOption(name="min_tokens", value=self.min_tokens, reason=reason, fix="make it at most max_tokens")
        if self.n > 1 and self.greedy:
            reason = "greedy choice would give the same completion each time"
            raise BadOption(name="n", value=self.n, reason=reason, fix="use n=1, or a temperature above 0")
        if self.stop_strings and not self.detokenize:
            fix = "leave detokenize on, or use stop_token_ids"
            raise BadOption(name="stop", value=self.stop_strings, reason="detokenize is off", fix=fix)


def _integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise BadOption(name=name, value=value, reason="it is not an integer", fix="give an integer")
    if value < low:
        raise BadOption(name=name, value=value, reason=f"it is below {low}", fix=f"use {low} or more")


def _real(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise BadOption(name=name, value=value, reason="it is not a number", fix="give a number")
    number = float(value)
    inside = low < number <= high if low_open else low <= number <= high
    if not inside or math.isinf(number):
        bounds = f"{'above' if low_open else 'from'} {low:g}{'' if math.isinf(high) else f' to {high:g}'}, finite"
        raise BadOption(name=name, value=value, reason="it is out of range", fix=f"use a number {bounds}")


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    found = (value,) if isinstance(value, str) else _items(name, value)
    if not all(isinstance(item, str) and item for item in found):
        raise BadOption(name=name, value=value, reason="it holds an empty or non-text entry", fix="give non-empty text")
    return found


def _ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    found = _items(name, value)
    for item in found:
        _integer(name, item, 0)
    return tuple(int(item) for item in found)


def _items(name: str, value: object) -> tuple[Any, ...]:
    if not isinstance(value, Iterable):
        raise BadOption(name=name, value=value, reason="it is not a list", fix="give a list")
    return tuple(value)
