"""Which requests run in the next step, and with how many tokens.

First come, first served. Running requests go first, in order of arrival, each with all tokens its cache lacks (one
while it generates, a chunk while its prompt is read) as far as the token budget goes; then waiting ones are admitted.
When pages run out, the youngest running request loses its pages and its place and later reads prompt and output again;
a request takes pages only from younger ones, and waits if there is none. So the oldest always advances, and since
every accepted request fits into the caches alone, all of them end. A request that is admitted starts after the pages
that it shares with others (`prefix.py`); it waits while the next one is about to be filled by another, which takes
what the budget gives until then. While pages of a request are on their way from disk, those behind it go first.

The state of running requests is kept as arrays with one entry a seat, so that a step costs array operations and not a
loop over requests.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from deepinfer_compile.runtime.batch import PAGE_SIZE, GroupMeta, StepInput
from deepinfer_compile.runtime.pages import Ints, Pages, pages_for
from deepinfer_compile.runtime.prefix import Hit, PrefixCache
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.steady import Steady

SCORING_TOKENS = 256
"""Most prompt tokens of requests with prompt_logprobs in one step: each needs a row of logits over the vocabulary."""


@dataclass(frozen=True)
class Plan:
    """The requests of one step: their seats, in order of arrival, and how many new tokens each has (at least 1).

    joined: the seats among them that were taken in this step.
    """

    seats: Ints
    count: Ints
    joined: list[int]


@dataclass(frozen=True)
class Batch:
    """One step's input and who its logits belong to.

    inputs: for the executor. sampled: seats that get a new token; sampled_rows: their rows of the logits.
    scored: (seat, rows of the logits) where prompt_logprobs are wanted.
    """

    inputs: StepInput
    sampled: Ints
    sampled_rows: Ints
    scored: list[tuple[int, Ints]]


class Scheduler:
    """Queue, seats and pages of all unfinished requests. prefix: what requests share; None: nothing."""

    def __init__(
        self, pages: Pages, *, max_num_seqs: int, max_num_batched_tokens: int, prefix: PrefixCache | None = None
    ) -> None:
        self.pages = pages
        self.prefix = prefix
        self.preemptions = 0
        self._budget = max_num_batched_tokens
        self._seats = max_num_seqs
        self._length = np.zeros(max_num_seqs, dtype=np.int64)
        self._done = np.zeros(max_num_seqs, dtype=np.int64)
        self._prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self._newest = np.zeros(max_num_seqs, dtype=np.int64)
        self._scoring = np.zeros(max_num_seqs, dtype=bool)
        self.restart([])

    def restart(self, requests: list[Request]) -> None:
        """Forget all seats and pages; queue `requests`, which are all that have not ended, in order of arrival."""
        for request in requests:
            request.seat = -1
        self.pages.reset()
        if self.prefix is not None:
            self.prefix.reset()
        self.waiting = deque(requests)
        self._seated: list[Request | None] = [None] * self._seats
        self._free = list(range(self._seats - 1, -1, -1))
        self._running = np.zeros(0, dtype=np.int64)
        self._feed: dict[int, Ints] = {}
        self._kept: tuple[Plan, Steady] | None = None

    @property
    def running(self) -> int:
        """Requests with a seat."""
        return len(self._running)

    def request(self, seat: int) -> Request:
        """The request on a seat."""
        found = self._seated[seat]
        if found is None:
            raise LookupError(f"seat {seat} is empty")
        return found

    def add(self, request: Request) -> None:
        """Queue a request that fits into the caches when it is alone."""
        self.waiting.append(request)
        if len(self.waiting) <= self._seats:
            self._expect(request)

    def remove(self, request: Request) -> None:
        """Forget a request, wherever it is, and free what it holds."""
        if request.seat < 0:
            self.waiting.remove(request)
            if self.prefix is not None:
                self.prefix.drop(request)
        else:
            if self.prefix is not None and request.error is None:
                self.prefix.store(request)
            self._vacate(request, failed=request.error is not None)
        if self.prefix is not None and self.prefix.disk is not None and not self.waiting and not self.running:
            self.prefix.disk.pump(math.inf)  # nobody waits for it, and no step may come

    def schedule(self) -> Plan | None:
        """Choose the next step and give its requests pages; None when there is no request.

        Tables are final after this call; `advance` must follow when the step has run.
        """
        if self._kept is not None and not self._admits() and self._is_steady(*self._kept):
            return self._kept[0]
        seats = self._running
        count = self._grant(seats)
        self.pages.trim(seats, self._done[seats])
        tight = not self.pages.try_grow(seats, self._done[seats] + count)
        if tight:
            count = self._squeeze(seats, count)
        kept = count > 0
        plan = Plan(seats[kept], count[kept], [])
        if self.waiting and not tight:
            plan = self._admit(plan)
        return plan if len(plan.seats) else None

    def advance(self, plan: Plan) -> None:
        """Note that the cache rows of a plan are written."""
        self._done[plan.seats] += plan.count
        if self.prefix is not None and self.prefix.note(plan.seats, self._done[plan.seats], self.request):
            self._kept = None
        for seat in [seat for seat, feed in self._feed.items() if self._done[seat] == len(feed)]:
            del self._feed[seat]
            self._scoring[seat] = False

    def append(self, seats: Ints, tokens: Ints) -> None:
        """Note the new token of each seat."""
        self._newest[seats] = tokens
        self._length[seats] += 1

    def batch(self, plan: Plan) -> Batch:
        """The executor's input for a plan (before `advance`)."""
        seats, count = plan.seats, plan.count
        if self._kept is not None and plan is self._kept[0]:
            inputs = self._kept[1].step(self._done[seats], self._newest[seats])
            return Batch(inputs, sampled=seats, sampled_rows=inputs.rows.numpy(), scored=[])
        start = self._done[seats]
        ends = np.cumsum(count)
        begins = ends - count
        total = int(ends[-1])
        seat = np.repeat(seats, count)
        position = np.arange(total) + np.repeat(start - begins, count)
        wanted = np.zeros(total, dtype=bool)
        finishing = start + count == self._length[seats]
        wanted[ends[finishing] - 1] = True
        scored = self._scored(plan, begins, wanted)
        rows = np.flatnonzero(wanted)
        inputs = StepInput(
            input_ids=torch.from_numpy(self._ids(plan, begins, total)),
            position_ids=torch.from_numpy(position),
            rows=torch.from_numpy(rows),
            query_start=torch.from_numpy(np.concatenate(([0], ends)).astype(np.int32)),
            seq_len=torch.from_numpy((start + count).astype(np.int32)),
            context_hint=torch.from_numpy(np.maximum(self._prompt[seat], position + 1)),
            groups=self._metas(seats, int((start + count).max()), seat, position),
        )
        self._kept = None
        if total == len(rows) == len(seats) and not plan.joined and not scored:
            reaches = [group.reach for group in self.pages.groups]
            steady = Steady.of(inputs, start, self._prompt[seats], reaches)
            self._kept = Plan(seats, count, []), steady
        return Batch(
            inputs=inputs,
            sampled=seats[finishing],
            sampled_rows=np.searchsorted(rows, ends[finishing] - 1),
            scored=[(owner, np.searchsorted(rows, tokens)) for owner, tokens in scored],
        )

    def follow(self) -> StepInput | None:
        """The input of the step after the one that `batch` gave last, before that one has run (and before `advance`).

        Its input ids are not known yet. None where it depends on more than the tokens: a request joined, left or has
        prompt to read, one that waits finds a seat, or pages have run out.
        """
        if self._kept is None or self._admits():
            return None
        plan, steady = self._kept
        seats = plan.seats
        done = self._done[seats] + 1
        if not (self._length[seats] == done).all():
            return None
        if not steady.covers(done):
            self.pages.trim(seats, done)
            if not self.pages.try_grow(seats, done + 1):
                return None
            steady = self._steady(seats, done)
            self._kept = plan, steady
        return steady.step(done, self._newest[seats])

    def _steady(self, seats: Ints, done: Ints) -> Steady:
        """A step of one token a request, made anew."""
        prompt = self._prompt[seats]
        inputs = StepInput(
            input_ids=torch.from_numpy(self._newest[seats]),
            position_ids=torch.from_numpy(done),
            rows=torch.arange(len(seats)),
            query_start=torch.arange(len(seats) + 1, dtype=torch.int32),
            seq_len=torch.from_numpy((done + 1).astype(np.int32)),
            context_hint=torch.from_numpy(np.maximum(prompt, done + 1)),
            groups=self._metas(seats, int(done.max()) + 1, seats, done),
        )
        return Steady.of(inputs, done, prompt, [group.reach for group in self.pages.groups])

    def _is_steady(self, plan: Plan, steady: Steady) -> bool:
        """Whether the next step is the kept one, moved on."""
        done = self._done[plan.seats]
        return steady.covers(done) and bool((self._length[plan.seats] == done + 1).all())

    def _grant(self, seats: Ints) -> Ints:
        """Tokens for each running seat under the budgets, earlier seats first."""
        want = self._length[seats] - self._done[seats]
        scoring = self._scoring[seats]
        if scoring.any():
            want = np.where(scoring, _share(np.where(scoring, want, 0), SCORING_TOKENS), want)
        return _share(want, self._budget)

    def _squeeze(self, seats: Ints, count: Ints) -> Ints:
        """Give pages out one by one, oldest first, taking them from the youngest when they run out."""
        count = count.copy()
        until = self._done[seats] + count
        kept = len(seats)
        for i in np.flatnonzero(self.pages.lacking(seats, until)).tolist():
            if i >= kept:
                break
            while not self.pages.try_grow(seats[i : i + 1], until[i : i + 1]):
                if kept == i + 1:
                    count[i] = 0
                    break
                kept -= 1
                self._preempt(self.request(int(seats[kept])))
        count[kept:] = 0
        return count

    def _admit(self, plan: Plan) -> Plan:
        """Seat waiting requests while seats, budget and pages last; return the extended plan."""
        budget = self._budget - int(plan.count.sum())
        scoring = SCORING_TOKENS - int(plan.count[self._scoring[plan.seats]].sum())
        promised = [0] * len(self.pages.groups)
        new: list[int] = []
        grants: list[int] = []
        at = 0
        while at < min(len(self.waiting), self._seats) and self._free:
            request = self.waiting[at]
            if not self._ready(request):
                at += 1
                continue
            scores = _scores(request)
            hit = self.prefix.find(request) if self.prefix is not None and not scores else None
            if hit and self.prefix and self.prefix.is_coming(request, hit, self._readers()):
                break
            chunk = min(request.length - (hit.tokens if hit else 0), budget, scoring if scores else budget)
            if chunk <= 0 or not self.pages.promise(request.length, chunk, promised, hit.pages if hit else ()):
                break
            budget -= chunk
            scoring -= chunk if scores else 0
            del self.waiting[at]
            new.append(self._take_seat(request, scores, hit))
            grants.append(chunk)
        if not new:
            return plan
        joined, count = np.array(new), np.array(grants)
        if not self.pages.try_grow(joined, self._done[joined] + count):
            raise AssertionError("promised pages are gone")
        self._running = np.concatenate((self._running, joined))
        return Plan(np.concatenate((plan.seats, joined)), np.concatenate((plan.count, count)), new)

    def _admits(self) -> bool:
        """Whether a request that waits could be seated, but for pages."""
        if not self._free or self.prefix is None:
            return bool(self._free and self.waiting)
        return not all(self.prefix.waits(request) for request in islice(self.waiting, self._seats))

    def _ready(self, request: Request) -> bool:
        """Whether a request waits for nothing from disk."""
        return self.prefix is None or _scores(request) or self.prefix.ready(request)

    def _readers(self) -> list[Request]:
        """Requests whose prompts are read now as fast as the budget allows."""
        return [self.request(seat) for seat in self._feed if not self._scoring[seat]]

    def _expect(self, request: Request) -> None:
        """Begin to read from disk what a request needs that is among the next to be seated."""
        if self.prefix is not None and not _scores(request):
            self.prefix.expect(request)

    def _take_seat(self, request: Request, scores: bool, hit: Hit | None) -> int:
        self._kept = None
        if len(self.waiting) >= self._seats:
            self._expect(self.waiting[self._seats - 1])
        seat = request.seat = self._free.pop()
        self._seated[seat] = request
        self._feed[seat] = request.tokens
        self._length[seat] = request.length
        self._done[seat] = hit.tokens if hit else 0
        self._prompt[seat] = len(request.prompt)
        self._scoring[seat] = scores
        if request.cached is None:
            request.cached = hit.tokens if hit else 0
        if self.prefix is not None:
            self.prefix.join(seat, request, hit)
        return seat

    def _vacate(self, request: Request, *, failed: bool = False) -> None:
        self._kept = None
        seat, request.seat = request.seat, -1
        if self.prefix is not None:
            self.prefix.leave(seat, request, failed=failed)
        self.pages.clear(seat)
        self._seated[seat] = None
        self._feed.pop(seat, None)
        self._free.append(seat)
        self._running = self._running[self._running != seat]

    def _preempt(self, request: Request) -> None:
        self._vacate(request)
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _ids(self, plan: Plan, begins: Ints, total: int) -> Ints:
        """Packed input ids; a seat whose fed tokens are all written continues with its newest token."""
        ids = np.empty(total, dtype=np.int64)
        ids[begins] = self._newest[plan.seats]
        for seat, begin, count in zip(plan.seats, begins, plan.count) if self._feed else ():
            feed = self._feed.get(int(seat))
            if feed is not None:
                done = int(self._done[seat])
                ids[begin : begin + count] = feed[done : done + count]
        return ids

    def _scored(self, plan: Plan, begins: Ints, wanted: NDArray[np.bool_]) -> list[tuple[int, Ints]]:
        """Mark the tokens whose logits score a prompt token; return them by seat."""
        found: list[tuple[int, Ints]] = []
        for i in np.flatnonzero(self._scoring[plan.seats]):
            seat = int(plan.seats[i])
            request, done = self.request(seat), int(self._done[seat])
            start = max(done, request.unscored)
            stop = min(done + int(plan.count[i]), len(request.prompt) - 1)
            if start < stop:
                tokens = np.arange(start, stop) - done + begins[i]
                wanted[tokens] = True
                found.append((seat, tokens))
        return found

    def _metas(self, seats: Ints, longest: int, seat: Ints, position: Ints) -> tuple[GroupMeta, ...]:
        page, offset = position // PAGE_SIZE, position % PAGE_SIZE
        width = pages_for(longest)
        metas = []
        for group in self.pages.groups:
            slot = group.table[seat, page].astype(np.int64) * PAGE_SIZE + offset
            metas.append(GroupMeta(torch.from_numpy(group.table[seats, :width]), torch.from_numpy(slot)))
        return tuple(metas)


def _scores(request: Request) -> bool:
    """Whether logits of a request's prompt are still wanted, so that all of it is computed."""
    return request.unscored < len(request.prompt) - 1


def _share(want: Ints, budget: int) -> Ints:
    """Hand out a budget from the front."""
    share: Ints = np.clip(budget - np.cumsum(want) + want, 0, want)
    return share
