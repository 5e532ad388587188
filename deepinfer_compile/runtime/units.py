"""Engines of a job in which some ranks read prompts and others decode: each has its unit, programs and experts.

A rank that reads prompts takes the first token of a request itself. If there are to be more, it offers the request to
the rank that decodes the fewest of its own; that one says when it has room, gets the cache rows and all that decides
the next tokens, and gives back each token that it makes. So a request ends where it came in: text, log-probabilities
and streams are made there, and one that is cancelled there is dropped on the other rank. The units wait for each
other's messages and never for each other's steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from weakref import WeakMethod

import numpy as np
from torch import Tensor

from deepinfer_compile.errors import BadRequest, RankLost
from deepinfer_compile.runtime.engine import Engine
from deepinfer_compile.runtime.handed import HandedSeats, Held, PromptSeats
from deepinfer_compile.runtime.mail import Mail, Message
from deepinfer_compile.runtime.options import EngineOptions
from deepinfer_compile.runtime.outputs import FinishReason
from deepinfer_compile.runtime.pages import Ints
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.ranks import WAIT
from deepinfer_compile.runtime.request import Request, Scored
from deepinfer_compile.runtime.scheduler import Batch
from deepinfer_compile.runtime.spread import PAUSE_S
from deepinfer_compile.runtime.stops import TextCodec, TextState
from deepinfer_compile.runtime.unit import UnitExecutor

OFFER, GRANT, ROWS, TOKENS, CANCEL = "offer", "grant", "rows", "tokens", "cancel"
NOBODY = -1


class UnitEngine(Engine, ABC):
    """What both engines do: look at what has come before each step, and wait for more where there is nothing to run."""

    _executor: UnitExecutor

    def __init__(self, executor: UnitExecutor, options: EngineOptions | None, eos_token_ids: Sequence[int]) -> None:
        super().__init__(executor, options, eos_token_ids=eos_token_ids)
        self._mail: Mail = executor.mail

    def step(self) -> None:
        """See `Engine`. A step that fails ends the call of all ranks. Raises RankLost."""
        with self._executor.whole("a step"):
            super().step()

    def reap(self) -> None:
        """See `Engine`."""
        super().reap()
        if not self._executor.ranks.lost:
            self._read(self._mail.take())

    def _rest(self, seconds: float = PAUSE_S) -> None:
        if self._executor.attend(WAIT) == WAIT:
            self._read(self._mail.take(seconds))

    @abstractmethod
    def _read(self, messages: list[Message]) -> None:
        """Do what messages say."""


class PromptEngine(UnitEngine):
    """Of a rank that reads prompts. `_offered`: by request, the rank that was asked; `_away`: that has it."""

    seats = PromptSeats
    scheduler: PromptSeats

    def __init__(self, executor: UnitExecutor, options: EngineOptions | None, eos_token_ids: Sequence[int]) -> None:
        super().__init__(executor, options, eos_token_ids)
        self._offered: dict[str, int] = {}
        self._away: dict[str, int] = {}

    def step(self) -> None:
        """See `UnitEngine`."""
        try:
            super().step()
        except BaseException:
            self._offered.clear()
            self._away.clear()
            raise

    def _read(self, messages: list[Message]) -> None:
        for message in messages:
            if message.kind == GRANT:
                self._hand(message.body["id"], message.peer)
            elif message.kind == TOKENS:
                for entry in message.body["of"]:
                    self._returned(*entry)

    def _take(self, request: Request, token: int) -> None:
        super()._take(request, token)
        if request.finish_reason is None and request.id not in self._away:
            self.scheduler.park(request)
            peer = self._offered[request.id] = self._least_busy()
            self._mail.send(peer, OFFER, {"id": request.id, "rows": request.length - 1})

    def _least_busy(self) -> int:
        """The rank that has the fewest requests from here; of equal ones not the same for all ranks here."""
        busy = [*self._offered.values(), *self._away.values()]
        peers, first = self._mail.peers, self._executor.ranks.rank
        turned = [peers[(first + i) % len(peers)] for i in range(len(peers))]
        return min(turned, key=busy.count)

    def _hand(self, request_id: str, peer: int) -> None:
        """Give the rows of a request to the rank that has room for it, and free what it holds here."""
        if request_id not in self._offered:
            return  # it was cancelled, which that rank will read next
        del self._offered[request_id]
        self._away[request_id] = peer
        request = self._alive[request_id]
        held = Held.taken(self._executor, self.scheduler.pages, request.seat, request.length - 1)
        self.scheduler.remove(request)
        self._mail.send(peer, ROWS, {"rows": held.done, **described(request)}, held.joined())

    def _returned(self, request_id: str, token: int, scored: list[Any] | None, ended: bool) -> None:
        """Take a token that another rank made."""
        request = self._alive.get(request_id)
        if request is None:
            return
        if scored is not None:
            request.logprobs.append(Scored(*scored))
        if ended:
            self._away[request_id] = NOBODY
        self._take(request, token)
        if ended != (request.finish_reason is not None):
            raise AssertionError(f"request {request_id} ends on one rank and not on the other")

    def _release(self, request: Request) -> None:
        away = request.id in self._away
        peer = self._away.pop(request.id, self._offered.pop(request.id, NOBODY))
        if peer != NOBODY:
            self._mail.send(peer, CANCEL, {"id": request.id})
        if not away:
            super()._release(request)


class DecodeEngine(UnitEngine):
    """Of a rank that decodes what others have read. codec: finds stop strings.

    `_offers`: (rank, request there, its rows), in order. `_granted`: of those that may come now, their rows. `_home`:
    by request, the rank that it is of and what it is called there.
    """

    seats = HandedSeats
    scheduler: HandedSeats

    def __init__(
        self,
        executor: UnitExecutor,
        options: EngineOptions | None,
        eos_token_ids: Sequence[int],
        codec: TextCodec | None,
    ) -> None:
        super().__init__(executor, options, eos_token_ids)
        self.scheduler.executor = executor
        self._codec = codec
        self._offers: deque[tuple[int, str, int]] = deque()
        self._granted: dict[tuple[int, str], int] = {}
        self._home: dict[str, tuple[int, str]] = {}
        self._made: defaultdict[int, list[Any]] = defaultdict(list)
        executor.serve = WeakMethod(self.serve)  # a cycle would keep the process group until Python ends

    def make(self, request_id: str, *args: Any, **kwargs: Any) -> Request:
        """Raises BadRequest: prompts are read elsewhere."""
        fix = "give them to a rank that reads prompts, the first ones of the job, and none here"
        raise BadRequest(request=request_id, reason="this rank decodes what others have read", fix=fix)

    def serve(self) -> None:
        """Decode until the ranks that read prompts have no more. Raises RankLost."""
        while self._mail.open or self.alive:
            self.step()

    def step(self) -> None:
        """See `UnitEngine`."""
        try:
            super().step()
        except BaseException:
            for state in (self._alive, self._offers, self._granted, self._home, self._made):
                state.clear()
            raise

    def reap(self) -> None:
        """See `UnitEngine`."""
        super().reap()
        self._grant()

    def _read(self, messages: list[Message]) -> None:
        for message in messages:
            if message.kind == OFFER:
                self._offers.append((message.peer, message.body["id"], message.body["rows"]))
            elif message.kind == ROWS:
                self._arrive(message)
            elif message.kind == CANCEL:
                self._drop(message.peer, message.body["id"])

    def _grant(self) -> None:
        """Say yes to the offers that there is room for, first come, first served."""
        while self._offers and self.scheduler.has_room(self._offers[0][2], [*self._granted.values()]):
            peer, request_id, rows = self._offers.popleft()
            self._granted[peer, request_id] = rows
            self._mail.send(peer, GRANT, {"id": request_id})

    def _arrive(self, message: Message) -> None:
        """Queue a request with its rows."""
        home = message.peer, message.body["id"]
        done = self._granted.pop(home)
        held = Held.cut(self._executor, self.scheduler.pages, done, message.rows)
        if held is None:
            ranks, reason = self._executor.ranks, f"rank {message.peer} gave {len(message.rows)} bytes of {done} rows"
            raise RankLost(rank=ranks.rank, ranks=ranks.size, reason=reason, patience="nothing of it was used")
        request = restored(message.body, f"{message.peer}:{message.body['id']}", self._codec)
        self._home[request.id] = home
        self._alive[request.id] = request
        self.scheduler.bring(request, held)

    def _drop(self, peer: int, request_id: str) -> None:
        """Forget a request that was cancelled where it is from."""
        self._offers = deque(offer for offer in self._offers if offer[:2] != (peer, request_id))
        self._granted.pop((peer, request_id), None)
        request = self._alive.get(f"{peer}:{request_id}")
        if request is not None:
            self._end(request, "abort")

    def _join(self, request: Request) -> None:
        self.scheduler.put(request)
        super()._join(request)

    def _sample(self, batch: Batch, logits: Tensor, requests: list[Request], index: Ints, drawn: Ints | None) -> None:
        super()._sample(batch, logits, requests, index, drawn)
        for peer, made in self._made.items():
            self._mail.send(peer, TOKENS, {"of": made})
        self._made.clear()

    def _take(self, request: Request, token: int) -> None:
        peer, request_id = self._home[request.id]
        super()._take(request, token)
        scored = request.logprobs[-1] if request.params.logprobs is not None and token >= 0 else None
        self._made[peer].append((request_id, token, scored, request.finish_reason is not None))

    def _end(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None, *, shown: int | None = None
    ) -> None:
        del self._home[request.id]
        super()._end(request, reason, stop_reason, shown=shown)


def described(request: Request) -> dict[str, Any]:
    """All that decides the tokens that come next, beside cache rows, as plain data."""
    return {
        "id": request.id,
        "prompt": request.prompt.tolist(),
        "output": request.output_ids,
        "params": asdict(request.params),
        "limit": request.limit,
        "end_ids": sorted(request.end_ids),
        "eos_ids": sorted(request.eos_ids),
        "seed": request.seed,
    }


def restored(body: dict[str, Any], name: str, codec: TextCodec | None) -> Request:
    """The request that `described` told of, under another name. It has text only where that may end it."""
    params = SamplingParams(**body["params"])
    return Request(
        id=name,
        prompt=np.array(body["prompt"], dtype=np.int64),
        params=params,
        limit=body["limit"],
        end_ids=frozenset(body["end_ids"]),
        eos_ids=frozenset(body["eos_ids"]),
        seed=body["seed"],
        text=_text(body["output"], params, codec),
        output_ids=list(body["output"]),
    )


def _text(output: list[int], params: SamplingParams, codec: TextCodec | None) -> TextState | None:
    """What finds stop strings after the tokens so far; None where there are none to be found."""
    if not params.stop_strings or codec is None:
        return None
    detokenizer, include = codec.detokenizer(params.skip_special_tokens), params.include_stop_str_in_output
    made = TextState(detokenizer, params.stop_strings, include_stop=include, streaming=False)
    made.advance(output, len(output), checked=False)  # what they complete would have ended it
    return made


def unit_engine(
    executor: UnitExecutor, options: EngineOptions, eos_token_ids: Sequence[int], codec: TextCodec | None
) -> UnitEngine:
    """The engine of a rank by its role."""
    if executor.unit.prefill:
        return PromptEngine(executor, options, eos_token_ids)
    return DecodeEngine(executor, options, eos_token_ids, codec)


__all__ = ["DecodeEngine", "PromptEngine", "UnitEngine", "unit_engine"]
