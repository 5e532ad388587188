"""One running completion: what was asked, what came out so far, and why it ended."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deepinfer_compile.errors import CompileError
from deepinfer_compile.runtime.outputs import FinishReason, RequestMetrics
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.stops import TextState


class Scored(NamedTuple):
    """A token under the model's own distribution, and the most likely tokens beside it, best first."""

    token: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Update(NamedTuple):
    """What a step did to a request: its output is now `tokens` ids and `characters` of showable text long."""

    request: Request
    tokens: int
    characters: int
    finished: bool


@dataclass(eq=False)
class Timing:
    """When things happened to a request, and for how long, in seconds of one clock; see `RequestMetrics`.

    arrived, seated, first: when it was queued, got its seat, and gave its first token (0 before that).
    """

    arrived: float
    seated: float = 0.0
    first: float = 0.0
    index: float = 0.0
    transfer: float = 0.0
    ram_rows: int = 0
    ram_bytes: int = 0
    disk_rows: int = 0
    disk_bytes: int = 0
    recomputed_rows: int = 0

    def spent(self, index: float, transfer: float = 0.0) -> None:
        """Add to what was spent, until there is a first token; a request that was preempted later looks again."""
        if not self.first:
            self.index += index
            self.transfer += transfer

    def metrics(self) -> RequestMetrics:
        """What is reported of it, once there is a first token."""
        whole, recompute = self.first - self.arrived, self.first - self.seated
        return RequestMetrics(
            first_token=whole,
            queued=whole - recompute - self.index - self.transfer,
            index=self.index,
            transfer=self.transfer,
            recompute=recompute,
            ram_rows=self.ram_rows,
            ram_bytes=self.ram_bytes,
            disk_rows=self.disk_rows,
            disk_bytes=self.disk_bytes,
            recomputed_rows=self.recomputed_rows,
        )


@dataclass(eq=False, kw_only=True)
class Request:
    """A completion on its way through the engine.

    prompt: i64[length]. limit: most output tokens. end_ids: tokens that end it, eos_ids those of them that mean end of
    text. seed: 64 bits. streaming: an Update is wanted for every step, not only the last. sink: where the owner
    collects its updates. seat: its row in the tables while it runs, else -1. cached: prompt tokens that were found in
    the prefix cache when it first ran, None before. timing: where there is a prefix cache. error: set when the model
    failed it.
    """

    id: str
    prompt: NDArray[np.int64]
    params: SamplingParams
    limit: int
    end_ids: frozenset[int]
    eos_ids: frozenset[int]
    seed: int
    text: TextState | None = None
    streaming: bool = False
    sink: deque[Update] = field(default_factory=deque)
    seat: int = -1
    cached: int | None = None
    timing: Timing | None = None
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[Scored] = field(default_factory=list)
    prompt_logprobs: list[Scored] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: CompileError | None = None

    @property
    def length(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.prompt) + len(self.output_ids)

    @property
    def tokens(self) -> NDArray[np.int64]:
        """Prompt and output, of which nobody changes one; no copy where there is no output yet."""
        if not self.output_ids:
            return self.prompt
        return np.concatenate((self.prompt, np.array(self.output_ids, dtype=np.int64)))

    @property
    def metrics(self) -> RequestMetrics | None:
        """Of its first token, once it is there."""
        return self.timing.metrics() if self.timing is not None and self.timing.first else None

    def spent(self, index: float, transfer: float = 0.0) -> None:
        """Note seconds, if it is timed."""
        if self.timing is not None:
            self.timing.spent(index, transfer)

    @property
    def unscored(self) -> int:
        """The first prompt position whose logits are still wanted for prompt_logprobs (prompt end if none is)."""
        wanted = self.params.prompt_logprobs is not None
        return len(self.prompt_logprobs) if wanted else len(self.prompt) - 1

    def report(self) -> None:
        """Put the present state into the sink."""
        characters = self.text.visible if self.text is not None else 0
        self.sink.append(Update(self, len(self.output_ids), characters, self.finish_reason is not None))
