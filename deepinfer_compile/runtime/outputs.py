"""What a request gives back, with vLLM's field names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True)
class Logprob:
    """One token of a reported distribution.

    logprob: natural logarithm of its probability. rank: 1 for the most likely token. decoded_token: None where the
    model has no tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""Token id to its entry; the token taken comes first, the most likely ones follow in order."""


@dataclass(frozen=True)
class CompletionOutput:
    """One completion of a prompt, or what was added to it since the last item of a stream.

    finish_reason: None while it runs; "stop" (end of text, a stop id or a stop string), "length", "abort" (cancelled).
    stop_reason: the stop string or stop id that ended it, None for end of text and all else.
    logprobs: one entry a token of `token_ids`, None unless asked for; cumulative_logprob is their sum since the start.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True)
class RequestMetrics:
    """What the first token of a completion waited for, in seconds, and where the cache rows before it came from.

    first_token: since the request was queued; the sum of the next four.
    queued: for a seat, for pages, for rows that another request computes, or for steps of others.
    index: looking up which rows are there, and taking these.
    transfer: reading from disk and copying to the caches, `disk_bytes` in all.
    recompute: the steps that compute the rows that were not found, beside whatever else they do.
    ram_rows: rows that were in the caches, `ram_bytes` of them, which are used where they are. disk_rows: rows that
    were there beside these because of what was read from disk. recomputed_rows: all others. Where the request was
    preempted before its first token, these are of the last time that it started.
    """

    first_token: float
    queued: float
    index: float
    transfer: float
    recompute: float
    ram_rows: int
    ram_bytes: int
    disk_rows: int
    disk_bytes: int
    recomputed_rows: int


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its completions.

    prompt: the text as given, None for a chat or token ids. prompt_logprobs: one entry a prompt token, the first is
    None because nothing precedes it; entries are missing at the end if the request was cancelled while it was read.
    num_cached_tokens: prompt tokens of the first completion whose cache rows were there already, None before it runs.
    metrics: of the first completion, None before its first token and without the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)
