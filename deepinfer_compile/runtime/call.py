"""The requests of one `generate` or `stream` call, and how their results are put together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from deepinfer_compile.errors import CompileError
from deepinfer_compile.runtime.outputs import CompletionOutput, Logprob, RequestOutput, TokenLogprobs
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request, Scored, Update
from deepinfer_compile.runtime.stops import TextCodec


@dataclass(eq=False)
class Parent:
    """One prompt and its completions. open: how many of them are not known to have ended."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    children: list[Request]

    def __post_init__(self) -> None:
        self.open = len(self.children)
        self._sent = [(0, 0)] * len(self.children)

    def result(self, codec: TextCodec | None) -> RequestOutput:
        """All of it, once every completion has ended."""
        outputs = []
        for i, child in enumerate(self.children):
            text = child.text.text if child.text is not None else ""
            outputs.append(self._completion(i, text, 0, len(child.output_ids), codec, ended=True))
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=outputs,
            finished=True,
            prompt_logprobs=self._prompt_logprobs(codec),
            num_cached_tokens=self.children[0].cached,
            metrics=self.children[0].metrics,
        )

    def item(self, update: Update, codec: TextCodec | None) -> RequestOutput:
        """What an update adds to what was sent before; the prompt's log-probabilities come with the first."""
        index = self.children.index(update.request)
        tokens, characters = self._sent[index]
        self._sent[index] = (update.tokens, update.characters)
        text = update.request.text.text[characters : update.characters] if update.request.text is not None else ""
        first = index == 0 and tokens == 0
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[self._completion(index, text, tokens, update.tokens, codec, ended=update.finished)],
            finished=self.open == 0,
            prompt_logprobs=self._prompt_logprobs(codec) if first else None,
            num_cached_tokens=self.children[0].cached,
            metrics=self.children[0].metrics,
        )

    def _completion(
        self, index: int, text: str, start: int, stop: int, codec: TextCodec | None, *, ended: bool
    ) -> CompletionOutput:
        child = self.children[index]
        asked = self.params.logprobs is not None
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=child.output_ids[start:stop],
            cumulative_logprob=sum(entry.logprob for entry in child.logprobs[:stop]) if asked else None,
            logprobs=[_named(entry, codec) for entry in child.logprobs[start:stop]] if asked else None,
            finish_reason=child.finish_reason if ended else None,
            stop_reason=child.stop_reason if ended else None,
        )

    def _prompt_logprobs(self, codec: TextCodec | None) -> list[TokenLogprobs | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        return [None, *(_named(entry, codec) for entry in self.children[0].prompt_logprobs)]


class Call:
    """What one call waits for.

    sink: updates of all its requests, filled by whichever thread runs the engine, emptied by the caller.
    open: completions not known to have ended. ended, tokens: of the prompts and tokens, how many are complete.
    """

    def __init__(self, parents: list[Parent]) -> None:
        self.parents: list[Parent] = []
        self.sink: deque[Update] = deque()
        self.open = 0
        self.ended = 0
        self.tokens = 0
        self._owner: dict[str, Parent] = {}
        for parent in parents:
            self.add(parent)

    def add(self, parent: Parent) -> None:
        """Wait for this one too; not after the call was submitted."""
        self.parents.append(parent)
        self.open += parent.open
        self._owner |= {child.id: parent for child in parent.children}

    def next(self) -> tuple[Parent, Update] | None:
        """The oldest update not looked at, if there is one. Raises the error of a request that the model failed."""
        if not self.sink:
            return None
        update = self.sink.popleft()
        parent = self._owner[update.request.id]
        if update.finished:
            self.open -= 1
            parent.open -= 1
            self.tokens += update.tokens
            self.ended += parent.open == 0
        if update.request.error is not None:
            raise update.request.error
        return parent, update

    def ends(self) -> Iterator[tuple[Parent, CompileError | None]]:
        """The prompts of which all completions have ended by now, with the error of the first that failed."""
        while self.sink:
            parent = self._owner[self.sink[0].request.id]
            with contextlib.suppress(CompileError):  # it is in the request
                self.next()
            if parent.open == 0:
                yield parent, next((child.error for child in parent.children if child.error is not None), None)

    def unfinished(self) -> list[Request]:
        """Completions that have not ended."""
        return [child for parent in self.parents for child in parent.children if child.finish_reason is None]


def _named(entry: Scored, codec: TextCodec | None) -> TokenLogprobs:
    """A scored token as the mapping callers get: the token itself first, then the most likely ones by rank."""
    named = {entry.token: Logprob(entry.logprob, entry.rank, _text(entry.token, codec))}
    for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs), start=1):
        named.setdefault(token, Logprob(logprob, rank, _text(token, codec)))
    return named


def _text(token: int, codec: TextCodec | None) -> str | None:
    return None if codec is None else codec.decode([token], skip_special_tokens=False)
