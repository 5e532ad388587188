"""A model that is a hash of what it reads through the cache tables, and the same model without tables.

`HashExecutor` keeps two cached values per token and group, written through `slot` and read only through `block_table`:
a hash of the token, its position and its context hint, and a hash of all values of the first kind that the token may
see. Logits hash all values of the second kind that a token may see. So one wrong page, position, hint or window, for
any token of any chunk, changes every later token. `Oracle` computes the same numbers one token at a time in plain
integers.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup, StepInput
from deepinfer_compile.runtime.page_rows import Form, host_memory
from deepinfer_compile.runtime.params import SamplingParams

MASK = 2**64 - 1
FULL = CacheGroup("full", 0, 1000)
NARROW = CacheGroup("narrow", 7, 100)
WIDE = CacheGroup("wide", 130, 300)
GROUPS = (FULL, NARROW, WIDE)
VOCAB = 97
ROUNDING = 1e-6
"""How far the sampler's f32 probabilities may move the border between two tokens in [0, 1). Measured over logits of
`logits_of`: at most 2.2e-7, and 2 in a million draws lie between the border in f32 and the one in f64."""


def mix(x):
    """A 64-bit hash, of an int or of a uint64 array."""
    if isinstance(x, int):
        x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15 & MASK
        x = (x ^ (x >> 29)) * 0xD6E8FEB86659FD93 & MASK
        return x ^ (x >> 32)
    x = (x ^ (x >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(32))


def logits_of(states, vocab: int = VOCAB) -> np.ndarray:
    """f32[N, vocab] in [-6, 6) from u64[N]."""
    columns = mix(np.arange(1, vocab + 1, dtype=np.uint64))
    hashed = mix(np.asarray(states, dtype=np.uint64)[:, None] + columns)
    return ((hashed >> np.uint64(40)).astype(np.float32) / 2**24 - 0.5) * 12


class HashExecutor:
    """The model behind tables; `steps` holds (requests, tokens) of each step, `writes` (group, pages) of each call that
    wrote some. hint: whether it reads context hints."""

    draw, identity, keep = None, "hash", 0

    def __init__(self, groups=GROUPS, vocab: int = VOCAB, max_model_len: int = 512, hint: bool = True) -> None:
        self.groups, self.vocab_size, self.max_model_len = tuple(groups), vocab, max_model_len
        self.reads_hint = hint
        self.steps: list[tuple[int, int]] = []
        self.writes: list[tuple[int, int]] = []
        self.fail: Exception | None = None
        self.poison: int | None = None

    def allocate(self, pages: tuple[int, ...]) -> None:
        garbage = np.random.default_rng(1)
        self.pages = pages
        self.caches = [garbage.integers(0, 2**63, (n, PAGE_SIZE, 2)).astype(np.uint64) for n in pages]

    def step(self, inputs: StepInput) -> torch.Tensor:
        check(inputs, self)
        self.steps.append((len(inputs.seq_len), len(inputs.input_ids)))
        start, length = inputs.query_start.numpy(), inputs.seq_len.numpy()
        first = mix(inputs.input_ids.numpy().astype(np.uint64) + (inputs.position_ids.numpy().astype(np.uint64) << 20))
        first = mix(first + inputs.context_hint.numpy().astype(np.uint64) * np.uint64(self.reads_hint))
        state = np.zeros(len(first), dtype=np.uint64)
        for g, (group, meta) in enumerate(zip(self.groups, inputs.groups)):
            cache = self.caches[g].reshape(-1, 2)
            cache[meta.slot.numpy(), 0] = first
            for r in range(len(length)):
                own = slice(start[r], start[r + 1])
                slots = meta.slot.numpy()[own]
                table = meta.block_table.numpy()[r]
                cache[slots, 1] = mix(self._seen(cache, table, group, length[r], len(slots), 0) + np.uint64(g))
                state[own] += mix(self._seen(cache, table, group, length[r], len(slots), 1) + np.uint64(g))
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        out = logits_of(state[inputs.rows.numpy()], self.vocab_size)
        if self.poison is not None:
            hit = inputs.input_ids.numpy()[inputs.rows.numpy()] == self.poison
            out[hit, 3] = np.nan
        return torch.from_numpy(out)

    def start(self, inputs: StepInput, numbers, *, following: bool = False) -> None:
        return None

    def page_form(self, group: int) -> Form:
        return Form.of({"rows": (torch.int64, self.caches[group].shape[1:])})

    def read_pages(self, group: int, pages: list[int]) -> torch.Tensor:
        rows = torch.from_numpy(self.caches[group][np.array(pages, dtype=np.int64)].view(np.uint8).copy())
        return rows.view(len(pages), self.page_form(group).size)

    def host_memory(self, size: int) -> torch.Tensor:
        return host_memory(size)

    def write_pages(self, group: int, pages, rows) -> int:
        self.writes.append((group, len(pages)))
        for done, (page, one) in enumerate(zip(pages, rows, strict=True)):
            if one["rows"].shape != self.caches[group][page].shape:
                return done
            self.caches[group][page] = one["rows"].numpy().view(np.uint64)
        return len(pages)

    @staticmethod
    def _seen(cache, table, group: CacheGroup, length: int, new: int, column: int) -> np.ndarray:
        """For each of the newest `new` positions, the sum of what it may see."""
        begin = max(0, length - new - group.window + 1) if group.window else 0
        position = np.arange(begin, length)
        page = table[position // PAGE_SIZE]
        assert (page >= 0).all(), "a position that may be read has no page"
        running = np.cumsum(cache[page * PAGE_SIZE + position % PAGE_SIZE, column])
        newest = running[length - new - begin :]
        if not group.window:
            return newest
        older = np.concatenate((np.zeros(group.window, dtype=np.uint64), running))
        return newest - older[: len(running)][length - new - begin :]


def check(inputs: StepInput, executor: HashExecutor) -> None:
    """The shapes, types and relations that batch.py states."""
    start, length = inputs.query_start.numpy(), inputs.seq_len.numpy()
    total = len(inputs.input_ids)
    assert start.dtype == length.dtype == np.int32
    assert start[0] == 0
    assert start[-1] == total
    assert (np.diff(start) >= 1).all()
    position = np.concatenate([np.arange(n - k, n) for n, k in zip(length, np.diff(start))])
    assert (inputs.position_ids.numpy() == position).all()
    for tensor in (inputs.input_ids, inputs.position_ids, inputs.rows, inputs.context_hint):
        assert tensor.dtype == torch.int64
    ids, rows = inputs.input_ids.numpy(), inputs.rows.numpy()
    assert ((ids >= 0) & (ids < executor.vocab_size)).all()
    assert (np.diff(rows) > 0).all()
    assert not len(rows) or (rows[0] >= 0 and rows[-1] < total)
    assert length.max() <= executor.max_model_len
    for meta, count in zip(inputs.groups, executor.pages, strict=True):
        table, slot = meta.block_table.numpy(), meta.slot.numpy()
        assert table.dtype == np.int32
        assert slot.dtype == np.int64
        assert table.shape == (len(length), -(-length.max() // PAGE_SIZE))
        where: dict[int, int] = {}
        for column, page in zip(np.nonzero(table >= 0)[1].tolist(), table[table >= 0].tolist()):
            assert where.setdefault(page, column) == column, "two places share a page"
        assert all(page < count for page in where)
        written = np.unique(slot // PAGE_SIZE)
        assert all((table == page).sum() == 1 for page in written), "a page is written that two requests hold"
        owner = np.repeat(np.arange(len(length)), np.diff(start))
        assert (slot == table[owner, position // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + position % PAGE_SIZE).all()


@dataclass
class Answer:
    """What a request must give."""

    tokens: list[int]
    finish_reason: str
    stop_reason: int | None
    logits: list[np.ndarray]
    prompt_logits: list[np.ndarray]


class Oracle:
    """The model and the sampler without tables, one token at a time."""

    def __init__(self, groups=GROUPS, vocab: int = VOCAB, max_model_len: int = 512, eos=(), hint: bool = True) -> None:
        self.groups, self.vocab, self.max_model_len, self.eos = tuple(groups), vocab, max_model_len, set(eos)
        self.hint = hint

    def run(self, prompt: list[int], params: SamplingParams, seed: int | None = None, given=()) -> Answer:
        """Complete a prompt. seed: needed where params has none and is random. given: what was put out, which says on
        what side of a border a draw fell that lies within rounding of it."""
        seed = params.seed if params.seed is not None else seed
        memory = [([0], [0]) for _ in self.groups]
        states = [self._feed(memory, token, i, max(len(prompt), i + 1)) for i, token in enumerate(prompt)]
        prompt_logits = list(logits_of(states, self.vocab))
        answer = Answer([], "length", None, [], prompt_logits)
        logits = prompt_logits[-1]
        room = self.max_model_len - len(prompt)
        ends = (set() if params.ignore_eos else self.eos) | set(params.stop_ids)
        while True:
            answer.logits.append(logits)
            other = given[len(answer.tokens)] if len(answer.tokens) < len(given) else None
            token = choose(logits, params, seed, prompt, answer.tokens, ends, other)
            answer.tokens.append(token)
            count = len(answer.tokens)
            if count >= params.min_tokens and token in ends:
                by_eos = not params.ignore_eos and token in self.eos
                answer.finish_reason, answer.stop_reason = "stop", None if by_eos else token
                return answer
            if count >= min(room, params.max_tokens or room):
                return answer
            position = len(prompt) + count - 1
            state = self._feed(memory, token, position, max(len(prompt), position + 1))
            logits = logits_of([state], self.vocab)[0]

    def _feed(self, memory, token: int, position: int, hint: int) -> int:
        first = mix(mix((token + (position << 20)) & MASK) + hint * self.hint & MASK)
        state = 0
        for g, (group, (ones, twos)) in enumerate(zip(self.groups, memory)):
            old = max(0, position + 1 - group.window) if group.window else 0
            ones.append(ones[-1] + first & MASK)
            twos.append(twos[-1] + mix(ones[-1] - ones[old] + g & MASK) & MASK)
            state += mix(twos[-1] - twos[old] + g & MASK)
        return state & MASK


def noise(seed: int, index: int) -> float:
    """The uniform number of a draw, in plain integers."""

    def finalise(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
        return x ^ (x >> 31)

    mixed = finalise(finalise(seed + 0x9E3779B97F4A7C15 & MASK) + index * 0xD1B54A32D192ED03 & MASK)
    return (mixed >> 11) / 2**53


def choose(logits, params: SamplingParams, seed: int | None, prompt, output, ends, other: int | None = None) -> int:
    """One token, by the plainest reading of the parameters, in f64; `other` where the draw might as well be it."""
    probs = distribution(logits, params, prompt, output, ends)
    if params.temperature == 0:
        return int(np.argmax(probs))
    assert seed is not None
    draw = noise(seed % 2**64, len(output))
    token = int(np.argmax(np.cumsum(probs) > draw * probs.sum()))
    return other if other is not None and 0 <= distance(probs, draw, other) < ROUNDING else token


def distance(probs: np.ndarray, draw: float, token: int) -> float:
    """How far a draw is from where it would choose a token: 0 inside; -1 for a token that cannot be chosen."""
    if probs[token] == 0:
        return -1.0
    end = np.cumsum(probs)[token] / probs.sum()
    return float(max(end - probs[token] / probs.sum() - draw, draw - end, 0.0))


def distribution(logits, params: SamplingParams, prompt=(), output=(), ends=()) -> np.ndarray:
    """The distribution a token is drawn from; greedy: scores whose maximum is taken."""
    x = np.asarray(logits, dtype=np.float64).copy()
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * list(output).count(token) + params.presence_penalty
    if len(output) < params.min_tokens:
        x[list(ends)] = -np.inf
    if params.temperature == 0:
        return x
    x = np.exp((x - x.max()) / params.temperature)
    x[x < params.min_p * x.max()] = 0
    if 0 < params.top_k < len(x):
        x[x < np.sort(x)[-params.top_k]] = 0
    if params.top_p < 1:
        down = np.sort(x)[::-1]
        before = np.cumsum(down) - down
        x[x < down[before < params.top_p * x.sum()].min()] = 0
    return x / x.sum()


class Pieces:
    """A decoder in which id i stands for the i-th piece."""

    def __init__(self, pieces: list[str], tail: str = "") -> None:
        self.pieces, self.tail = pieces, tail

    def push(self, token_ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in token_ids)

    def flush(self) -> str:
        return self.tail


def plain_stop(text: str, stops, include: bool) -> tuple[str | None, str]:
    """The first stop completed when a text is read character by character, and the text cut there."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return stop, text[: end if include else end - len(stop)]
    return None, text


class Codec:
    """A tokenizer over bytes: most ids are one letter, some are words, some are parts of a character.

    Ids 5 and 11 are special and end a text; "<eos>" in a prompt is five letters, never id 5.
    """

    eos_token_ids = (5, 11)

    def __init__(self) -> None:
        letters = "abcdefghijklmnopqrstuvwxyz .,<>"
        self.bytes = [letters[i % len(letters)].encode() for i in range(VOCAB)]
        self.bytes[40:46] = [b"the ", b"stop", b"END", b"ab", b"bcd", b""]
        self.bytes[50:60] = [bytes([b]) for b in "é€é€".encode()]
        self.bytes[5], self.bytes[11] = b"<eos>", b"<end>"

    def encode(self, text: str) -> list[int]:
        plain = [i for i in range(40) if i not in self.eos_token_ids]
        return [plain[ord(letter) % len(plain)] for letter in text]

    def encode_chat(self, messages, add_generation_prompt: bool = True) -> list[int]:
        assert add_generation_prompt
        return [77, *self.encode("".join(f"{m['role']}:{m['content']};" for m in messages)), 78]

    def detokenizer(self, skip_special_tokens: bool) -> ByteDetok:
        return ByteDetok(self, skip_special_tokens)

    def decode(self, ids, skip_special_tokens: bool) -> str:
        one = self.detokenizer(skip_special_tokens)
        return one.push(list(ids)) + one.flush()


class ByteDetok:
    def __init__(self, codec: Codec, skip: bool) -> None:
        self.codec, self.skip = codec, skip
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: list[int]) -> str:
        kept = [i for i in token_ids if not (self.skip and i in self.codec.eos_token_ids)]
        return self.decoder.decode(b"".join(self.codec.bytes[i] for i in kept))

    def flush(self) -> str:
        return self.decoder.decode(b"", True)
