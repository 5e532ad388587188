"""Choosing tokens from logits, for all requests of a step at once.

A draw takes one uniform number, a hash of (seed, index of the output token), and the token at which the cumulative
probability, in order of token id, exceeds it. Neither the number nor any sum depends on the other rows: sums run over
blocks of fixed width, because torch splits the sum of a single long row among threads and so rounds it differently
than the same row in a batch. That is what makes a seed give the same tokens whatever the batch around it.

Rows that need nothing but the most likely token never leave the first line of `sample`. Where a kernel chooses on the
device (`drawing.py`), rows come to the host only where penalties, min_tokens or log-probabilities need their logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from deepinfer_compile.runtime.drawing import Draw, Numbers
from deepinfer_compile.runtime.pages import Ints
from deepinfer_compile.runtime.penalties import PenaltyCounts
from deepinfer_compile.runtime.request import Request, Scored

BLOCK = 256
"""Width of the partial sums of a draw."""

CANDIDATES = 128
"""Most likely tokens looked at before a whole row is sorted for top_p."""


class Sampler:
    """Sampling parameters of the seats, as arrays. draw: what chooses tokens on the device of the logits."""

    def __init__(self, seats: int, draw: Draw | None = None) -> None:
        self._there = draw
        self._random = np.zeros(seats, dtype=bool)
        self._min_tokens = np.zeros(seats, dtype=np.int64)
        self._seed = np.zeros(seats, dtype=np.uint64)
        self._temperature = np.ones(seats, dtype=np.float32)
        self._top_k = np.zeros(seats, dtype=np.int64)
        self._top_p = np.ones(seats, dtype=np.float64)
        self._min_p = np.zeros(seats, dtype=np.float32)
        self._end_ids: dict[int, NDArray[np.int64]] = {}
        self._penalties: dict[int, PenaltyCounts] = {}
        self._penalised = np.zeros(seats, dtype=bool)
        self._kept: tuple[Ints, dict[str, NDArray[Any]], bool] | None = None

    def join(self, request: Request) -> None:
        """Take over the parameters of a request that has got a seat, perhaps again."""
        seat, params = request.seat, request.params
        self._kept = None
        self._random[seat] = not params.greedy
        self._seed[seat] = request.seed
        self._temperature[seat] = params.temperature
        self._top_k[seat] = max(params.top_k, 0)
        self._top_p[seat] = params.top_p
        self._min_p[seat] = params.min_p
        self._min_tokens[seat] = params.min_tokens
        self._end_ids[seat] = np.array(sorted(request.end_ids), dtype=np.int64)
        self._penalised[seat] = params.penalised
        self._penalties.pop(seat, None)
        if params.penalised:
            self._penalties[seat] = PenaltyCounts(params, request.prompt, request.output_ids)

    def sample(self, logits: Tensor, seats: Ints, index: Ints, drawn: Ints | None = None) -> Ints:
        """Choose a token per row of `logits` [N, vocab]; -1 where the row has no finite maximum (NaN, infinity).

        seats: i64[N]. index: i64[N], how many tokens each request has put out before. drawn: what the device chose by
        `numbers` already. `logits` is not changed, and is f32 where there is no `draw`.
        """
        if not len(seats):
            return np.zeros(0, dtype=np.int64)
        there = self._there
        if drawn is not None:
            tokens = drawn
        else:
            tokens = best(logits) if there is None else there(logits, self.numbers(seats, index))
        edited = self._penalised[seats] | (index < self._min_tokens[seats])
        special = np.flatnonzero(edited if there is not None else edited | self._random[seats])
        if special.size:
            sound = special[tokens[special] >= 0]
            tokens[sound] = self._choose(logits, sound, seats, index)
        self._count(seats, tokens)
        return tokens

    def numbers(self, seats: Ints, index: Ints) -> Numbers:
        """Parameters with which a `Draw` chooses all rows' tokens, as if none were penalised or kept from ending."""
        if self._kept is None or self._kept[0] is not seats:
            random = self._random[seats]
            fixed: dict[str, NDArray[Any]] = {
                "temperature": np.where(random, self._temperature[seats], np.float32(0)),
                "min_p": self._min_p[seats],
                "top_k": self._top_k[seats].clip(max=2**31 - 1).astype(np.int32),
                "top_p": self._top_p[seats].astype(np.float32),
            }
            self._kept = seats, fixed, bool(random.any())
        _, fixed, drawn = self._kept
        return {**fixed, "noise": uniform(self._seed[seats], index) if drawn else np.zeros(len(seats))}

    def _choose(self, logits: Tensor, rows: Ints, seats: Ints, index: Ints) -> Ints:
        """Tokens for the rows that need more than their maximum."""
        owners, index = seats[rows], index[rows]
        picked = _here(_rows(logits, rows)) if self._there is not None else _rows(logits, rows)
        short = np.flatnonzero(index < self._min_tokens[owners])
        if short.size or self._penalised[owners].any():
            picked = picked.clone() if picked is logits else picked
            self._edit(picked, owners, short)
        tokens = best(picked)
        drawn = np.flatnonzero(self._random[owners] & (tokens >= 0))
        if drawn.size:
            noise = uniform(self._seed[owners[drawn]], index[drawn])
            tokens[drawn] = self._draw(_rows(picked, drawn), owners[drawn], noise)
        return tokens

    def _edit(self, logits: Tensor, seats: Ints, short: Ints) -> None:
        """Apply penalties, and forbid the end to the rows `short` of min_tokens, in place."""
        penalised = [(row, self._penalties[seat]) for row, seat in enumerate(seats.tolist()) if self._penalised[seat]]
        PenaltyCounts.apply(logits, penalised)
        for row in short.tolist():
            logits[row, torch.from_numpy(self._end_ids[int(seats[row])]).to(logits.device)] = -torch.inf

    def _draw(self, logits: Tensor, seats: Ints, noise: NDArray[np.float64]) -> Ints:
        """Temperature, min_p, top_k, top_p and the draw, a row per seat."""
        scaled = logits / torch.from_numpy(self._temperature[seats]).to(logits.device)[:, None]
        probs = functional.pad(scaled, (0, -logits.shape[1] % BLOCK), value=-torch.inf).softmax(-1)
        min_p, top_k, top_p = self._min_p[seats], self._top_k[seats], self._top_p[seats]
        if min_p.any():
            floor = probs.amax(-1) * torch.from_numpy(min_p).to(probs.device)
            probs = probs.masked_fill(probs < floor[:, None], 0.0)
        top_k[top_k >= logits.shape[1]] = 0
        _cut(probs, np.flatnonzero(top_k), lambda part, which: kth_largest(part, top_k[which]))
        _cut(probs, np.flatnonzero(top_p < 1.0), lambda part, which: nucleus_floor(part, top_p[which]))
        return invert(probs, noise)

    def _count(self, seats: Ints, tokens: Ints) -> None:
        for row in np.flatnonzero(self._penalised[seats]):
            self._penalties[int(seats[row])].add(int(tokens[row]))


def best(logits: Tensor) -> Ints:
    """Most likely token per row of f32[N, vocab], the lowest id of equal ones; -1 where the maximum is not finite."""
    if _in_numpy(logits):
        # NumPy's argmax is vectorised and torch's is not: 0.15 against 1.6 ms for 64 x 49152.
        values = logits.detach().numpy()
        tokens: Ints = values.argmax(1)
        return np.where(np.isfinite(values[np.arange(len(tokens)), tokens]), tokens, -1)
    top, found = logits.max(-1)
    return np.asarray(torch.where(torch.isfinite(top), found, -1).cpu().numpy(), dtype=np.int64)


def uniform(seed: NDArray[np.uint64], index: Ints) -> NDArray[np.float64]:
    """Numbers in [0, 1), a hash of (seed, index) each: two rounds of the splitmix64 finaliser, upper 53 bits."""
    mixed = _mix(_mix(seed + np.uint64(0x9E3779B97F4A7C15)) + index.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _in_numpy(values: Tensor) -> bool:
    """Whether NumPy's faster kernels can work on a tensor in place."""
    return values.device.type == "cpu"


def _rows(values: Tensor, rows: Ints) -> Tensor:
    """Some rows of a tensor, lowest first: the tensor itself if they are all of them."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, torch.from_numpy(rows).to(values.device))


def _here(logits: Tensor) -> Tensor:
    """Logits as the host computes with them."""
    return logits.float().cpu()


def _cut(probs: Tensor, rows: Ints, floor: Callable[[Tensor, Ints], Tensor]) -> None:
    """Set to 0, in place, what lies below `floor(part, rows)` in some rows."""
    if not rows.size:
        return
    part = _rows(probs, rows)
    part.masked_fill_(part < floor(part, rows)[:, None], 0.0)
    if part is not probs:
        probs.index_copy_(0, torch.from_numpy(rows).to(probs.device), part)


def largest(probs: Tensor, count: int) -> Tensor:
    """The `count` largest values per row of f32[N, V], in descending order."""
    if not _in_numpy(probs):
        return probs.topk(count).values
    # NumPy's partition and sort are vectorised: 2 against 4 ms for the best 50 of 64 x 49152, 7 against 220 for all.
    values = probs.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def kth_largest(probs: Tensor, k: Ints) -> Tensor:
    """The k-th largest value per row of [N, V]; k: i64[N], 1..V."""
    values = largest(probs, int(k.max()))
    return values.gather(1, torch.from_numpy(k - 1).to(probs.device)[:, None])[:, 0]


def nucleus_floor(probs: Tensor, p: NDArray[np.float64]) -> Tensor:
    """The smallest value kept per row of [N, V] when the most likely tokens are kept until their share reaches p."""
    goal = block_sums(probs).sum(-1) * torch.from_numpy(p).to(probs.device)
    floor, reached = _reach(largest(probs, min(CANDIDATES, probs.shape[1])), goal)
    if not bool(reached.all()):
        rest = (~reached).nonzero()[:, 0]
        floor[rest] = _reach(largest(probs[rest], probs.shape[1]), goal[rest])[0]
    return floor


def _reach(descending: Tensor, goal: Tensor) -> tuple[Tensor, Tensor]:
    """Value at which the running sum reaches the goal (the last value if it does not), and whether it does."""
    running = descending.cumsum(-1, dtype=torch.float64)
    at = torch.searchsorted(running, goal[:, None])
    last = descending.shape[1] - 1
    return descending.gather(1, at.clamp(max=last))[:, 0], at[:, 0] <= last


def block_sums(probs: Tensor) -> Tensor:
    """f64[N, V / BLOCK] partial sums of f32[N, V], each rounded the same way whatever N is."""
    return probs.view(len(probs), -1, BLOCK).sum(-1).double()


def invert(probs: Tensor, noise: NDArray[np.float64]) -> Ints:
    """The token at which the cumulative share of [N, V] (V a multiple of BLOCK) exceeds noise f64[N]."""
    sums = block_sums(probs).cumsum(-1)
    target = torch.from_numpy(noise).to(probs.device)[:, None] * sums[:, -1:]
    block = _first_above(sums, target)
    before = torch.where(block > 0, sums.gather(1, (block - 1).clamp(min=0)), 0.0)
    inside = probs.view(len(probs), -1, BLOCK)[torch.arange(len(probs), device=probs.device), block[:, 0]]
    offset = _first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    return np.asarray((block * BLOCK + offset)[:, 0].cpu().numpy(), dtype=np.int64)


def _first_above(running: Tensor, target: Tensor) -> Tensor:
    """First column whose running sum exceeds the target; rounding may leave none, then the last that adds anything."""
    last = (running < running[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(running, target, right=True).minimum(last)


def score(logits: Tensor, rows: Ints, tokens: Ints, top: int) -> list[Scored]:
    """Log-probabilities of one token per row and of the `top` most likely ones; `top` -1 is the whole vocabulary."""
    log = _here(_rows(logits, rows)).log_softmax(-1)
    taken = log.gather(1, torch.from_numpy(tokens)[:, None])
    values, ids = log.topk(log.shape[1] if top < 0 else min(top, log.shape[1]))
    ranks = (_count_true(log > taken) + 1).tolist()
    found = zip(tokens.tolist(), taken[:, 0].tolist(), ranks, ids.tolist(), values.tolist())
    return [Scored(*entry) for entry in found]


def _count_true(mask: Tensor) -> Ints:
    if not _in_numpy(mask):
        return np.asarray(mask.sum(-1).cpu().numpy(), dtype=np.int64)
    return np.asarray(np.count_nonzero(mask.numpy(), axis=1), dtype=np.int64)
