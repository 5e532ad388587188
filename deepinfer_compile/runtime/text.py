"""Prompts to token ids and back, such that text from a user never becomes a control token.

Control tokens are the special tokens, those named in the tokenizer's configuration, and other added tokens in brackets
that the chat template spells (`</think>`, `<tool_call>`). Added tokens that are none of these (runs of newlines, tags)
are text helpers and match in user text as the model was trained. A token of whitespace only is always a
helper, because templates and users both write whitespace.

The tokenizer itself finds control tokens: a copy of it with an empty model and the same normalizer and added tokens
reports where each matches, by its own rules for stripping, single words and normalized spellings. A chat is scanned as
rendered and with the characters of its messages masked. If both scans agree, no message touched a control token, and
the plain encoding is right by definition, provided that the model inside the tokenizer made no control token on its own
(lower-casing normalizers, Unigram pieces). Otherwise the text is cut at the control tokens of the masked scan, and
what lies between is encoded by a copy whose control tokens have unreachable spellings, in the model's vocabulary too.

A cut is exact: the tokenizer treats the text between added tokens in isolation, except that Metaspace's scheme
"first" looks at the offset, so pieces after the first use a copy with the scheme "never". That is also what makes long
texts parallel: their pieces are encoded as one batch, which the library spreads over threads. The one inexact case is a
control token matched in normalized text under a normalizer that looks at neighbours; long benign texts are not cut
there.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel

from deepinfer_compile.errors import BadChat, BadRequest, BadTokenizer
from deepinfer_compile.runtime.detok import Detok, DetokTables

if TYPE_CHECKING:
    from deepinfer_compile.runtime.chat import ChatTemplate

PARALLEL_CHARS = 8192
"""Rendered chats of at least this many characters are encoded in parallel pieces."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


# -- loading ----------------------------------------------------------------------------------------------------------


def _added_token(spec: Any) -> AddedToken | None:
    """The token that a configuration value (text, or its fields as a dict) describes; None if it is no token."""
    if isinstance(spec, str):
        return AddedToken(spec, special=True, normalized=False)
    if not isinstance(spec, dict) or not isinstance(spec.get("content"), str):
        return None
    flags = {key: bool(spec[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in spec}
    return AddedToken(spec["content"], special=bool(spec.get("special", True)), **flags)


def _named_tokens(config: dict[str, Any]) -> dict[str, AddedToken]:
    """Tokens the configuration names (`eos_token`, ...), the usual names first."""
    extra = config.get("extra_special_tokens")
    named = config | (extra if isinstance(extra, dict) else {})
    names = [*_NAMED, *sorted(key for key in named if key.endswith("_token") and key not in _NAMED)]
    names += [key for key in extra if key not in names] if isinstance(extra, dict) else []
    tokens = {name: _added_token(named.get(name)) for name in names}
    return {name: token for name, token in tokens.items() if token is not None}


def _load(file: Path, config: dict[str, Any]) -> Tokenizer:
    """The tokenizer as Transformers sets it up: its file, and added tokens that only the configuration names.

    What surrounds a plain prompt is the file's business; like Transformers, this ignores `add_bos_token` next to it.
    """
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise BadTokenizer(file=file, reason=str(error), fix="copy tokenizer.json of the model again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    described = config.get("added_tokens_decoder") or {}
    listed = [_added_token(described[key]) for key in sorted(described, key=int)]
    tokenizer.add_tokens([token for token in listed if token])
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    wanted = [*_named_tokens(config).values(), *map(_added_token, extra if isinstance(extra, list) else [])]
    missing = {token.content: token for token in wanted if token and token.content not in known}
    tokenizer.add_special_tokens(list(missing.values()))
    return tokenizer


def _template_source(config: dict[str, Any]) -> str | None:
    """The configuration's chat template (of several, the one called "default")."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else None


# -- copies of a tokenizer --------------------------------------------------------------------------------------------


def _copy(like: Tokenizer, model: Any, tokens: Iterable[AddedToken], pre_tokenizer: Any) -> Tokenizer:
    """A tokenizer that differs from `like` in the model, the added tokens and the pre-tokenizer; parts are shared."""
    copy = Tokenizer(model)
    copy.normalizer = like.normalizer
    copy.pre_tokenizer = pre_tokenizer
    copy.post_processor = like.post_processor
    copy.add_tokens(list(tokens))
    return copy


def _never_first(part: Any) -> Any:
    """The JSON form of a pre-tokenizer, for text that is not at the start."""
    if isinstance(part, list):
        return [_never_first(item) for item in part]
    if not isinstance(part, dict):
        return part
    changed = {"prepend_scheme": "never"} if part.get("prepend_scheme") == "first" else {}
    return {key: _never_first(item) for key, item in part.items()} | changed


def _later_pre_tokenizer(tokenizer: Tokenizer) -> Any:
    """The pre-tokenizer for pieces after the first; None where position makes no difference."""
    carrier = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    carrier.pre_tokenizer = tokenizer.pre_tokenizer
    form = json.loads(carrier.to_str())
    changed = form | {"pre_tokenizer": _never_first(form["pre_tokenizer"])}
    return None if changed == form else Tokenizer.from_str(json.dumps(changed)).pre_tokenizer


def _unreachable(model: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The JSON form of a model with vocabulary entries renamed, and without the merges that would make or use them."""
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        renamed: Any = {names.get(piece, piece): number for piece, number in vocab.items()}
    else:
        renamed = [[names.get(piece, piece), score] for piece, score in vocab]
    model = model | {"vocab": renamed}
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        prefix = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            [left, right] for left, right in model["merges"] if not names.keys() & {left, right, left + right[prefix:]}
        ]
    return model


def _harmless(full: Tokenizer, control: dict[int, str]) -> Tokenizer:
    """A copy with the ids of `full` in which no text becomes one of `control` (id to spelling).

    Their spellings become random ones. The unknown token stays what the model gives for text it does not know.
    """
    nonce = secrets.token_hex(16)
    names = {text: f"\U0010fffd{nonce}:{number}" for number, text in control.items()}
    model = full.model
    if any(model.token_to_id(text) is not None for text in names):
        form = json.loads(full.to_str())
        form |= {"added_tokens": [], "post_processor": None, "model": _unreachable(form["model"], names)}
        model = Tokenizer.from_str(json.dumps(form)).model
    added = full.get_added_tokens_decoder()
    hidden = {n: AddedToken(names[text], special=True, normalized=False) for n, text in control.items()}
    tokens = [hidden.get(number, added[number]) for number in sorted(added)]
    return _copy(full, model, tokens, full.pre_tokenizer)


def _is_control(token: AddedToken, named: Iterable[str], chat_template: str) -> bool:
    """Whether user text must not become this added token."""
    if token.content.isspace():
        return False
    bracketed = len(token.content) > 2 and token.content[0] in "<[{(" and token.content[-1] in ">]})"
    return token.special or token.content in named or (bracketed and token.content in chat_template)


# -- finding control tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Match:
    """A control token in a text: characters `start` to `end` (with whitespace it swallows)."""

    start: int
    end: int
    token_id: int


class _Scanner:
    """Finds control tokens as the tokenizer would, without running its model."""

    def __init__(self, full: Tokenizer, control: dict[int, str]) -> None:
        added = full.get_added_tokens_decoder()
        unknown = secrets.token_hex(16)
        self._tokenizer = _copy(full, WordLevel({unknown: 0}, unk_token=unknown), added.values(), None)
        self._tokenizer.post_processor = None
        by_text = {text: number for number, text in control.items()}
        own = self._tokenizer.get_added_tokens_decoder()
        self._ids = {number: by_text[token.content] for number, token in own.items() if token.content in by_text}
        spelled = set().union(*(token.content for token in added.values()))
        self.word = self._filler(range(0x10000, 0x1000C), spelled)
        self.other = self._filler(range(0x1D100, 0x1D127), spelled)

    def _filler(self, points: range, spelled: set[str]) -> str:
        """A character of no added token that the normalizer keeps."""
        normalizer = self._tokenizer.normalizer
        free = [chr(point) for point in points if chr(point) not in spelled]
        kept = [char for char in free if normalizer is None or char in normalizer.normalize_str(char)]
        return (kept or free)[0]

    def find(self, text: str) -> list[_Match]:
        """All matches, in order."""
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        found = zip(encoding.ids, encoding.offsets)
        return [_Match(start, end, self._ids[number]) for number, (start, end) in found if number in self._ids]


# -- public -----------------------------------------------------------------------------------------------------------


class TextCodec:
    """Text to ids and back for one model. Build it with `from_files`.

    eos_token_ids: ids that end a generation. vocab_size: largest id + 1. control_token_ids: ids that user text never
    becomes (except the unknown token, for text the model has no token for).
    """

    def __init__(
        self, full: Tokenizer, named: dict[str, str], chat_template: str | None, eos_token_ids: tuple[int, ...]
    ) -> None:
        self.eos_token_ids = eos_token_ids
        added = full.get_added_tokens_decoder()
        self.vocab_size: int = max([full.get_vocab_size(with_added_tokens=False), *(number + 1 for number in added)])
        self._full = full
        self._named = named
        self._source = chat_template
        self._control = {
            number: token.content
            for number, token in added.items()
            if _is_control(token, named.values(), chat_template or "")
        }
        self.control_token_ids = frozenset(self._control)
        self._tables = DetokTables(full)
        self._exact_cuts = {n for n in self._control if not added[n].normalized or full.normalizer is None}

    @classmethod
    def from_files(
        cls,
        tokenizer_json: Path,
        tokenizer_config: dict[str, Any],
        chat_template: str | None,
        generation_config: dict[str, Any],
    ) -> TextCodec:
        """Read a tokenizer. Without `chat_template`, the one in `tokenizer_config` (if any) is used.

        Raises BadTokenizer if `tokenizer_json` cannot be read.
        """
        full = _load(tokenizer_json, tokenizer_config)
        named = {name: token.content for name, token in _named_tokens(tokenizer_config).items()}
        stops = generation_config.get("eos_token_id")
        ends = [full.token_to_id(named["eos_token"])] if "eos_token" in named else []
        ends += stops if isinstance(stops, list) else [stops]
        eos_token_ids = tuple(dict.fromkeys(int(end) for end in ends if end is not None))
        return cls(full, named, chat_template or _template_source(tokenizer_config), eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt, with what the tokenizer puts around it. Raises BadRequest if `text` is not valid."""
        if not isinstance(text, str) or _SURROGATE.search(text):
            reason = "it holds half of a surrogate pair" if isinstance(text, str) else f"it is a {type(text).__name__}"
            raise BadRequest(request="prompt", reason=reason, fix="give the prompt as valid Unicode text")
        encoding = self._full.encode_batch_fast([text])[0]
        added = zip(encoding.ids, encoding.special_tokens_mask)
        if not any(number in self._control and not mask for number, mask in added):
            return list(encoding.ids)
        lost = self._unwritable(text, self._scanner.find(text))
        if lost:
            fix = "leave it out; the model has no other token for it"
            raise BadRequest(request="prompt", reason=f"the control token {lost!r} cannot be written as text", fix=fix)
        return list(self._safe.encode(text).ids)

    def encode_chat(self, messages: list[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
        """Ids of a chat: control tokens where the template writes them, ordinary text everywhere else.

        Raises BadChat if there is no template, or if it or the messages are not valid.
        """
        rendered = self._chat.render(messages, add_generation_prompt)
        text = rendered.text
        found = self._scanner.find(text)
        wanted = self._scanner.find(rendered.masked(self._scanner.word, self._scanner.other))
        if found == wanted:
            ids = self._encode_benign(text, found)
            if [number for number in ids if number in self._control] == [match.token_id for match in found]:
                return ids
        lost = self._unwritable(text, [match for match in found if match not in wanted])
        if lost:
            fix = "leave it out; the model has no other token for it"
            raise BadChat(reason=f"the control token {lost!r} in a message cannot be written as text", fix=fix)
        return self._encode_pieces(text, wanted, self._safe, self._safe_later)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Spaces before punctuation are left as the model wrote them."""
        text: str = self._full.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self, skip_special_tokens: bool) -> Detok:
        """A detokenizer for one stream of ids."""
        return Detok(self._tables, skip_special_tokens)

    def _encode_benign(self, text: str, found: list[_Match]) -> list[int]:
        """The plain encoding of `text`, in parallel if it is long."""
        cuts = [match for match in found if match.token_id in self._exact_cuts]
        if len(text) < PARALLEL_CHARS or not cuts:
            return list(self._full.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        return self._encode_pieces(text, cuts, self._full, self._full_later)

    @staticmethod
    def _encode_pieces(text: str, cuts: list[_Match], first: Tokenizer, later: Tokenizer) -> list[int]:
        """Ids of `cuts` and, between them, of the text; the piece at the start of `text` by `first`."""
        starts = [0, *(cut.end for cut in cuts)]
        ends = [*(cut.start for cut in cuts), len(text)]
        pieces = [text[start:end] for start, end in zip(starts, ends)]
        ids = list(first.encode_batch_fast(pieces[:1], add_special_tokens=False)[0].ids)
        for cut, encoding in zip(cuts, later.encode_batch_fast(pieces[1:], add_special_tokens=False)):
            ids += [cut.token_id, *encoding.ids]
        return ids

    def _unwritable(self, text: str, typed: list[_Match]) -> str:
        """A control token that a user typed and that no ordinary tokens can spell, or ""."""
        spellings = dict.fromkeys(text[match.start : match.end] for match in typed)
        return next((s for s in spellings if not self._safe_later.encode(s, add_special_tokens=False).ids), "")

    @cached_property
    def _chat(self) -> ChatTemplate:
        from deepinfer_compile.runtime.chat import ChatTemplate

        if self._source is None:
            fix = "send the prompt as plain text, or rebuild from a folder with chat_template.jinja"
            raise BadChat(reason="this model has no chat template", fix=fix)
        return ChatTemplate(self._source, self._named)

    @cached_property
    def _scanner(self) -> _Scanner:
        return _Scanner(self._full, self._control)

    @cached_property
    def _later(self) -> Any:
        return _later_pre_tokenizer(self._full)

    @cached_property
    def _full_later(self) -> Tokenizer:
        if self._later is None:
            return self._full
        added = self._full.get_added_tokens_decoder()
        return _copy(self._full, self._full.model, [added[number] for number in sorted(added)], self._later)

    @cached_property
    def _safe(self) -> Tokenizer:
        return _harmless(self._full, self._control)

    @cached_property
    def _safe_later(self) -> Tokenizer:
        if self._later is None:
            return self._safe
        added = self._safe.get_added_tokens_decoder()
        return _copy(self._safe, self._safe.model, [added[number] for number in sorted(added)], self._later)
