"""The offline door: `LLM.generate` and `LLM.stream` over one engine, in the manner of vLLM's offline interface."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from deepinfer_compile.errors import BadRequest, CompileError
from deepinfer_compile.runtime import prompts as reading
from deepinfer_compile.runtime.batch import Executor
from deepinfer_compile.runtime.call import Call, Parent
from deepinfer_compile.runtime.driver import Driver
from deepinfer_compile.runtime.engine import Engine
from deepinfer_compile.runtime.options import EngineOptions
from deepinfer_compile.runtime.outputs import RequestOutput
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.prefix import PrefixStats
from deepinfer_compile.runtime.progress import progress_bar
from deepinfer_compile.runtime.prompts import Prompt
from deepinfer_compile.runtime.stops import TextCodec, TextState


class LLM:
    """A loaded model that completes prompts.

    A prompt is text, a chat (a list of message dicts) or token ids; without a tokenizer (`text` None) ids only.
    Sizes and cache options are those of EngineOptions; eos_token_ids are added to the tokenizer's. default_params serve
    calls without params. Several threads may use one LLM; their requests share the batch.

    Raises OutOfMemory when not even one request of max_model_len tokens fits into memory_bytes, BadOption for sizes
    out of range.
    """

    def __init__(
        self,
        executor: Executor,
        text: TextCodec | None = None,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        memory_bytes: int | None = None,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        prefix_cache_ttl: float = 180.0,
        prefix_cache_folder: str | Path | None = None,
        prefix_cache_bytes: int = 16 << 30,
        prefix_cache_retention: Mapping[str, float] | None = None,
        eos_token_ids: tuple[int, ...] = (),
        default_params: SamplingParams | None = None,
    ) -> None:
        options = EngineOptions(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            memory_bytes=memory_bytes,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
            prefix_cache_ttl=prefix_cache_ttl,
            prefix_cache_folder=prefix_cache_folder,
            prefix_cache_bytes=prefix_cache_bytes,
            prefix_cache_retention=prefix_cache_retention,
        )
        known = text.eos_token_ids if text is not None else ()
        self.engine = self._engine(executor, options, (*eos_token_ids, *known), text)
        self.default_params = default_params or SamplingParams()
        self._codec = text
        self._driver = Driver(self.engine)
        self._numbers = itertools.count()

    def _engine(
        self, executor: Executor, options: EngineOptions, eos_token_ids: Sequence[int], text: TextCodec | None
    ) -> Engine:
        """What runs the requests."""
        return Engine(executor, options, eos_token_ids=eos_token_ids)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its completion together."""
        return self.engine.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts; one result per prompt, in their order, cancelled ones included ("abort").

        params: for all prompts, or one for each. progress (or use_tqdm, vLLM's name for it): show a bar on stderr.
        Every prompt is checked before any is run. An interruption or error cancels what is left of the call.

        Raises ContextTooLong, BadRequest, NoTokenizer, BadChat, BadOption, BadLogits.
        """
        call = self._submit(prompts, params, streaming=False)
        try:
            with progress_bar(progress or use_tqdm, len(call.parents)) as show:
                while call.open:
                    self._driver.advance(call)
                    while call.next():
                        show(call.ended, call.tokens)
        finally:
            self._driver.drop(call)
        return [parent.result(self._codec) for parent in call.parents]

    def as_completed(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | CompileError]]:
        """Complete prompts; each with its number as soon as it has ended, or the error that it alone has: one of those
        that `generate` raises for a prompt. An end of the iteration cancels what is left. Raises BadOption."""
        wanted = reading.each(self.default_params if params is None else params, len(prompts))
        call, refused, numbers = Call([]), list[tuple[int, CompileError]](), dict[str, int]()
        for number, (prompt, one) in enumerate(zip(prompts, wanted)):
            try:
                parent = self._parent(prompt, one, streaming=False)
            except CompileError as error:
                refused.append((number, error))
                continue
            call.add(parent)
            numbers[parent.request_id] = number
        self._driver.submit(call)
        try:
            yield from refused
            while call.open:
                self._driver.advance(call)
                for parent, failed in call.ends():
                    yield numbers[parent.request_id], failed or parent.result(self._codec)
        finally:
            self._driver.drop(call)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Stream:
        """Complete prompts and yield what is new as it comes.

        Each item holds one completion of one prompt: `text`, `token_ids` and `logprobs` since the item before it. Text
        that may turn out to begin a stop string is held back. Prompts are checked here, not at the first item.

        Raises what `generate` raises.
        """
        return Stream(self._driver, self._submit(prompts, params, streaming=True), self._codec)

    def cancel(self, request_id: str | None = None) -> None:
        """End a request (none: all) with finish_reason "abort". From any thread; ended or unknown ids are ignored."""
        for parent in self._driver.parents():
            if request_id in (None, parent.request_id):
                for child in parent.children:
                    self.engine.cancel(child.id)

    @property
    def active(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival. From any thread."""
        return [p.request_id for p in self._driver.parents() if any(c.finish_reason is None for c in p.children)]

    @property
    def prefix_stats(self) -> PrefixStats:
        """What the prefix cache did so far and holds now. From any thread."""
        return self.engine.prefix_stats

    def reset_prefix_cache(self) -> None:
        """Reuse no cache rows written so far, and delete those on disk. From any thread; running requests go on, and
        what they hold is not reused. Waits for the step that another thread is running."""
        self.engine.forget_prefixes()
        self._driver.reap()

    def close(self, timeout: float = 30.0) -> bool:
        """Write to prefix_cache_folder what waits for it, at most so many seconds, and use it no more. From any thread.

        Whether all was written. Requests may go on; a second call does nothing. The end of the process does the same
        with a limit of a few seconds.
        """
        return self.engine.close(timeout)

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        streaming: bool,
    ) -> Call:
        """Check and encode everything, then queue it."""
        given = reading.as_list(prompts)
        wanted = reading.each(self.default_params if params is None else params, len(given))
        call = Call([self._parent(prompt, one, streaming) for prompt, one in zip(given, wanted)])
        self._driver.submit(call)
        return call

    def _parent(self, prompt: Prompt, params: SamplingParams, streaming: bool) -> Parent:
        request_id = str(next(self._numbers))
        given = reading.encode(request_id, prompt, self._codec)
        children = []
        for i in range(params.n):
            seed = None if params.seed is None else (params.seed + i) % 2**64
            child_id = request_id if params.n == 1 else f"{request_id}.{i}"
            text = self._text_state(request_id, params, streaming)
            own = replace(params, n=1, seed=seed, prompt_logprobs=None if i else params.prompt_logprobs)
            children.append(self.engine.make(child_id, given.ids, own, text=text, streaming=streaming))
        return Parent(request_id, given.text, given.ids, params, children)

    def _text_state(self, request_id: str, params: SamplingParams, streaming: bool) -> TextState | None:
        if self._codec is None and params.stop_strings:
            reason = "stop strings need a tokenizer and this model has none"
            raise BadRequest(request=request_id, reason=reason, fix="use stop_token_ids")
        if self._codec is None or not params.detokenize:
            return None
        return TextState(
            self._codec.detokenizer(params.skip_special_tokens),
            params.stop_strings,
            include_stop=params.include_stop_str_in_output,
            streaming=streaming,
        )


class Stream:
    """An iterator over what is new in the requests of one `LLM.stream` call.

    `close` (also at the end of a `with` block, or when the stream is dropped) cancels what is left; `LLM.cancel` ends
    one request and lets its last item through. One thread may iterate while another cancels or closes.
    """

    def __init__(self, driver: Driver, call: Call, codec: TextCodec | None) -> None:
        self._driver = driver
        self._call = call
        self._codec = codec
        self._closed = False

    @property
    def request_ids(self) -> list[str]:
        """One id per prompt."""
        return [parent.request_id for parent in self._call.parents]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        """The next item. Raises BadLogits if the model failed a request; the stream is closed then."""
        try:
            while self._call.open and not self._closed:
                found = self._call.next()
                if found is not None:
                    parent, update = found
                    return parent.item(update, self._codec)
                self._driver.advance(self._call)
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Cancel what is left and free its pages before returning."""
        if not self._closed:
            self._closed = True
            self._driver.drop(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._driver.abandon(self._call)
