"""From what a caller passes as prompts to token ids, with the sampling parameters of each.

A prompt is text, a chat (a list of messages) or token ids; what stands for a list of prompts is told apart by its
first entry. Everything is checked and encoded before any of it is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple

from deepinfer_compile.errors import BadOption, BadRequest, NoTokenizer
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.stops import TextCodec

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""One prompt: text, token ids, or the messages of a chat."""


class Encoded(NamedTuple):
    """A prompt as given if it was text, and its ids."""

    text: str | None
    ids: list[int]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list. `[]` is no prompt."""
    plain = _plain(prompts)
    if isinstance(plain, str):
        return [plain]
    if not isinstance(plain, (list, tuple)):
        raise _refused("0", f"it is a {type(prompts).__name__}")
    if plain and isinstance(plain[0], (Integral, Mapping)):
        return [plain]
    return list(plain)


def each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    """Parameters per prompt. Raises BadOption unless there is one for all or one for each."""
    if isinstance(params, SamplingParams):
        return [params] * count
    if not all(isinstance(entry, SamplingParams) for entry in params):
        fix = "give SamplingParams, or a list of them"
        raise BadOption(name="params", value=params, reason="it holds something else than SamplingParams", fix=fix)
    if len(params) != count:
        fix = "give one for all prompts, or one for each"
        raise BadOption(name="params", value=f"{len(params)} entries", reason=f"there are {count} prompts", fix=fix)
    return list(params)


def encode(request_id: str, prompt: Prompt, codec: TextCodec | None) -> Encoded:
    """Ids of one prompt. Raises NoTokenizer for text and chats without a codec, BadRequest for anything else."""
    plain = _plain(prompt)
    if isinstance(plain, str):
        return Encoded(plain, _needed(codec).encode(plain))
    if not isinstance(plain, (list, tuple)):
        raise _refused(request_id, f"it is a {type(prompt).__name__}")
    if set(map(type, plain)) <= {int}:  # a long prompt's ids, of which the next line would ask one by one
        return Encoded(None, list(plain))
    if all(isinstance(entry, Integral) and not isinstance(entry, bool) for entry in plain):
        return Encoded(None, [int(entry) for entry in plain])
    if all(isinstance(entry, Mapping) for entry in plain):
        return Encoded(None, _needed(codec).encode_chat([dict(entry) for entry in plain]))
    kinds = ", ".join(sorted({type(entry).__name__ for entry in plain}))
    raise _refused(request_id, f"it is a list of {kinds}")


def _plain(prompt: object) -> Any:
    """Arrays and tensors as lists."""
    to_list = getattr(prompt, "tolist", None)
    return prompt if to_list is None else to_list()


def _needed(codec: TextCodec | None) -> TextCodec:
    if codec is None:
        raise NoTokenizer()
    return codec


def _refused(request_id: str, reason: str) -> BadRequest:
    fix = "give text, a list of token ids, or a list of messages (dicts)"
    return BadRequest(request=request_id, reason=f"the prompt cannot be read: {reason}", fix=fix)
