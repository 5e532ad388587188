"""The step loop: schedule, run the model, choose tokens, end what has ended.

One thread calls `step` or `reap` at a time; `add` and `cancel` may be called from any thread at any moment, because
they only leave a note that the next step takes up.
"""

from __future__ import annotations

import secrets
import time
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from deepinfer_compile.errors import BadLogits, BadOption, BadRequest, ContextTooLong
from deepinfer_compile.runtime.ahead import Ahead, steps_alone
from deepinfer_compile.runtime.batch import Executor
from deepinfer_compile.runtime.options import EngineOptions, prefix_cache
from deepinfer_compile.runtime.outputs import FinishReason
from deepinfer_compile.runtime.pages import Ints, Pages, caches_in_words, plan_pages
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.prefix import PrefixStats
from deepinfer_compile.runtime.request import Request, Timing
from deepinfer_compile.runtime.sampling import Sampler, score
from deepinfer_compile.runtime.scheduler import Batch, Scheduler
from deepinfer_compile.runtime.stops import TextState


class Engine:
    """Continuous batching of requests over one executor.

    eos_token_ids end a request unless it ignores them. Raises OutOfMemory when not even one request of max_model_len
    tokens fits into the caches, BadOption when max_model_len exceeds what the executor was built for.
    """

    seats: type[Scheduler] = Scheduler

    def __init__(
        self, executor: Executor, options: EngineOptions | None = None, *, eos_token_ids: Sequence[int] = ()
    ) -> None:
        options = options or EngineOptions()
        built = executor.max_model_len
        self.max_model_len = built if options.max_model_len is None else options.max_model_len
        if self.max_model_len > built:
            reason = f"the programs were built for {built}"
            raise BadOption(name="max_model_len", value=self.max_model_len, reason=reason, fix=f"use at most {built}")
        seats = options.max_num_seqs
        counts = plan_pages(
            executor.groups,
            seats=seats,
            max_model_len=self.max_model_len,
            chunk=options.max_num_batched_tokens,
            backtrack=options.backtrack,
            memory_bytes=options.memory_bytes,
        )
        pages = Pages(
            executor.groups, counts, seats=seats, max_model_len=self.max_model_len, backtrack=options.backtrack
        )
        self.scheduler = self.seats(
            pages,
            max_num_seqs=seats,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix=prefix_cache(pages, executor, options) if options.enable_prefix_caching else None,
        )
        prefix = self.scheduler.prefix
        self._disk = prefix.disk if prefix is not None else None
        self._classes = frozenset(options.retention)
        self._executor = executor
        self._sampler = Sampler(seats, executor.draw)
        self._eos = frozenset(int(token) for token in eos_token_ids)
        self._alive: dict[str, Request] = {}
        self._arrived: deque[Request] = deque()
        self._cancelled: deque[str] = deque()
        self._ahead: Ahead | None = None
        self._outdated: deque[str] = deque()
        self._resting = False
        executor.allocate(counts)
        self.caches = caches_in_words(executor.groups, counts, options.memory_bytes)

    @property
    def alive(self) -> int:
        """Requests that have not ended."""
        return len(self._alive) + len(self._arrived)

    @property
    def pages_used(self) -> tuple[int, ...]:
        """Cache pages in use, a number per cache group."""
        return self.scheduler.pages.used

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache did; zeros without one."""
        return self.scheduler.prefix.stats if self.scheduler.prefix is not None else PrefixStats()

    def forget_prefixes(self, identity: str = "") -> None:
        """Reuse no rows written so far, from the next `step` or `reap` on. From any thread.

        identity: of the model that the executor runs now; without it, pages on disk are deleted too.
        """
        self._outdated.append(identity)
        self._wake()

    def make(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        text: TextState | None = None,
        streaming: bool = False,
    ) -> Request:
        """Check a request without queueing it.

        Raises BadRequest for an empty prompt or ids outside the vocabulary, ContextTooLong for a prompt that leaves no
        room for a token (or for min_tokens). A max_tokens beyond the context length ends at it with reason "length".
        """
        tokens = _array(prompt)
        self._check(request_id, prompt, tokens, params)
        room = self.max_model_len - len(prompt)
        needed = max(1, params.min_tokens)
        if room < needed:
            total, limit = len(prompt) + needed, self.max_model_len
            raise ContextTooLong(request=request_id, needed=total, limit=limit, built=self._executor.max_model_len)
        eos = frozenset[int]() if params.ignore_eos else self._eos
        return Request(
            id=request_id,
            prompt=tokens,
            params=params,
            limit=room if params.max_tokens is None else min(params.max_tokens, room),
            end_ids=eos | frozenset(params.stop_ids),
            eos_ids=eos,
            seed=(secrets.randbits(64) if params.seed is None else params.seed) % 2**64,
            text=text,
            streaming=streaming,
        )

    def add(self, request: Request) -> None:
        """Queue a request made by `make`. From any thread."""
        if self.scheduler.prefix is not None:
            request.timing = Timing(time.perf_counter())
        self._arrived.append(request)
        self._wake()

    def cancel(self, request_id: str) -> None:
        """End a request with reason "abort" at the next `step` or `reap`; unknown or ended ones are ignored.

        From any thread.
        """
        self._cancelled.append(request_id)
        self._wake()

    def reap(self) -> None:
        """Take up arrivals and cancellations without running the model."""
        while self._outdated:
            if self.scheduler.prefix is not None:
                self.scheduler.prefix.clear(self._outdated[0])
            self._outdated.popleft()  # not before: an interrupted step leaves it to the next
        while self._arrived:
            request = self._arrived.popleft()
            self._alive[request.id] = request
            self.scheduler.add(request)
        while self._cancelled:
            found = self._alive.get(self._cancelled.popleft())
            if found is not None:
                self._end(found, "abort")

    def step(self) -> None:
        """Run one step. Each request that ended, and each streaming one that advanced, gets an Update in its sink.

        A request whose logits have no finite maximum ends with `error` set; the others go on. If the step fails or is
        interrupted, caches and tables are not to be trusted any more, so every request starts over from its tokens.
        """
        try:
            self._step()
        except BaseException:
            self._ahead = None
            self.scheduler.restart(list(self._alive.values()))
            raise

    def _step(self) -> None:
        self.reap()
        if self._disk is not None:
            self._disk.pump()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self._land(ahead):
            return
        plan = self.scheduler.schedule()
        if plan is None:
            self._rest()
            return
        for seat in plan.joined:
            self._join(self.scheduler.request(seat))
        batch = self.scheduler.batch(plan)
        requests = [self.scheduler.request(seat) for seat in batch.sampled.tolist()]
        index = np.array([len(request.output_ids) for request in requests], dtype=np.int64)
        logits, drawn = self._run(batch, requests, index)
        self.scheduler.advance(plan)
        self._score_prompts(batch, logits)
        if requests:
            self._sample(batch, logits, requests, index, drawn)

    def _join(self, request: Request) -> None:
        """A request has got a seat, and its first step there comes."""
        self._sampler.join(request)

    def _rest(self, seconds: float = 1.0) -> None:
        """Where all requests wait for pages from disk, wait for one to come, or for a note from another thread."""
        if self._disk is None or not self._disk.reading:
            return
        self._resting = True
        try:
            if not (self._arrived or self._cancelled or self._outdated):
                self._disk.work.wait(seconds)
        finally:
            self._resting = False

    def _wake(self) -> None:
        """End a rest; from any thread, also inside the garbage collector."""
        if self._resting and self._disk is not None:
            self._disk.work.wake()

    def flush(self, seconds: float) -> bool:
        """Wait until what ended requests left behind is on disk, at most so many seconds; whether it is. From any
        thread."""
        return self._disk is None or self._disk.work.flush(seconds)

    def close(self, seconds: float) -> bool:
        """As `flush`, and use the disk no more; requests may go on."""
        if self._disk is None:
            return True
        whole = self._disk.work.close(seconds)
        self._wake()
        self._disk.work.check()
        return whole

    def _run(self, batch: Batch, requests: list[Request], index: Ints) -> tuple[Tensor, Ints | None]:
        """Logits of the step; and tokens, where the device chooses one for every row within it."""
        if self._executor.draw is None or not len(index) or len(index) != len(batch.inputs.rows):
            return self._executor.step(batch.inputs), None
        flight = self._executor.start(batch.inputs, self._sampler.numbers(batch.sampled, index))
        if flight is None:
            return self._executor.step(batch.inputs), None
        self._ahead = self._follow(Ahead(flight, batch.sampled, requests, index, steps_alone(requests)))
        return flight.logits, flight.tokens()

    def _follow(self, last: Ahead) -> Ahead | None:
        """Start the step after the one under way, if that takes nothing but its tokens."""
        if last.left < 1 or self._arrived or self._cancelled:
            return None
        inputs = self.scheduler.follow()
        if inputs is None:
            return None
        index = last.index + 1
        flight = self._executor.start(inputs, self._sampler.numbers(last.seats, index), following=True)
        return None if flight is None else Ahead(flight, last.seats, last.requests, index, last.left - 1)

    def _land(self, ahead: Ahead) -> bool:
        """End a step under way; False if all its requests have ended."""
        self._ahead = self._follow(ahead)
        rows = ahead.rows()
        if not len(rows):
            return False
        tokens = ahead.flight.tokens()[rows]
        plan = ahead.plan(rows)
        self.scheduler.advance(plan)
        self.scheduler.append(plan.seats, tokens)
        for row, token in zip(rows.tolist(), tokens.tolist()):
            self._take(ahead.requests[row], token)
        return True

    def _check(self, request_id: str, prompt: Sequence[int], tokens: Ints, params: SamplingParams) -> None:
        """See `make`. tokens: the prompt's."""
        vocab = self._executor.vocab_size
        if not len(prompt):
            fix = "give at least one token"
            raise BadRequest(request=request_id, reason="the prompt is empty", fix=fix)
        for name, ids, array in (
            ("prompt", prompt, tokens),
            ("stop_token_ids", params.stop_ids, _array(params.stop_ids)),
        ):
            if len(array) and not 0 <= array.min() <= array.max() < vocab:
                wrong = next(token for token in ids if not 0 <= token < vocab)
                fix = "use the tokenizer of this model"
                reason = f"{name} holds {wrong}, the vocabulary has {vocab} ids"
                raise BadRequest(request=request_id, reason=reason, fix=fix)
        if params.retention not in self._classes:
            reason, known = f"its class {params.retention!r} is not known", ", ".join(sorted(self._classes))
            fix = f"use one of {known}, or name it in prefix_cache_retention"
            raise BadRequest(request=request_id, reason=reason, fix=fix)

    def _score_prompts(self, batch: Batch, logits: Tensor) -> None:
        """Fill prompt_logprobs from the rows of this step."""
        for seat, rows in batch.scored:
            request = self.scheduler.request(seat)
            first = request.unscored + 1
            tokens = request.prompt[first : first + len(rows)]
            request.prompt_logprobs += score(logits, rows, tokens, request.params.prompt_logprobs or 0)

    def _sample(self, batch: Batch, logits: Tensor, requests: list[Request], index: Ints, drawn: Ints | None) -> None:
        """Choose a token for each request that is due one. index: tokens each has put out. drawn: of every row."""
        if len(batch.sampled_rows) != len(logits):
            logits = logits.index_select(0, torch.from_numpy(batch.sampled_rows).to(logits.device))
        tokens = self._sampler.sample(logits, batch.sampled, index, drawn)
        self.scheduler.append(batch.sampled, tokens)
        self._score_outputs(requests, tokens, logits)
        for request, token in zip(requests, tokens.tolist()):
            self._take(request, token)

    def _score_outputs(self, requests: list[Request], tokens: Ints, logits: Tensor) -> None:
        """Report log-probabilities; rows that ask for equally many are done together, so that ties fall the same way
        whatever else is in the batch."""
        rows: defaultdict[int, list[int]] = defaultdict(list)
        for row, request in enumerate(requests):
            if request.params.logprobs is not None and tokens[row] >= 0:
                rows[request.params.logprobs].append(row)
        for top, group in rows.items():
            for row, entry in zip(group, score(logits, np.array(group), tokens[group], top)):
                requests[row].logprobs.append(entry)

    def _take(self, request: Request, token: int) -> None:
        """Append a token, and end the request if it is the last."""
        if token < 0:
            request.error = BadLogits(request=request.id, position=request.length - 1)
            self._end(request, "abort")
            return
        request.output_ids.append(token)
        count, params = len(request.output_ids), request.params
        if count == 1 and request.timing is not None:
            request.timing.first = time.perf_counter()
        enough = count > params.min_tokens
        if enough and token in request.end_ids:
            shown = count if params.include_stop_str_in_output else count - 1
            self._end(request, "stop", None if token in request.eos_ids else token, shown=shown)
            return
        eager = request.text is not None and request.text.eager
        found = request.text.advance(request.output_ids, count, checked=enough) if request.text and eager else None
        if found is not None:
            self._end(request, "stop", found, shown=0)
        elif count >= request.limit:
            self._end(request, "length")
        elif request.streaming:
            request.report()

    def _end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None, *, shown: int | None = None
    ) -> None:
        """Free what a request holds and complete its text, which covers `shown` tokens (none: all; 0: is complete)."""
        request.finish_reason, request.stop_reason = reason, stop_reason
        if request.text is not None and shown != 0:
            found = request.text.finish(request.output_ids, len(request.output_ids) if shown is None else shown)
            if found is not None and reason == "length":
                request.finish_reason, request.stop_reason = "stop", found
        del self._alive[request.id]
        request.report()
        self._release(request)  # last: it copies pages for the disk, and whoever waits must hear of the end

    def _release(self, request: Request) -> None:
        """Free what a request holds that has ended."""
        self.scheduler.remove(request)


def _array(ids: Sequence[int]) -> Ints:
    """Token ids as an array; those that no vocabulary has may be others there that none has."""
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError:
        return np.array([min(max(token, -1), 2**63 - 1) for token in ids], dtype=np.int64)
