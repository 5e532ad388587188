"""The sizes and caches of an engine, checked when they are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime.batch import Executor
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.pages import Pages, pages_for
from deepinfer_compile.runtime.prefix import PrefixCache
from deepinfer_compile.runtime.prefix_disk import DiskTier

DAY = 86400.0
RETENTION = {"chat": 7 * DAY, "agent": 3 * DAY}
"""Classes of requests that there are without being named, and how many seconds their pages are kept on disk."""
MOST_SECONDS = 36500 * DAY


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Sizes of the engine.

    max_num_seqs: requests that run at once. max_num_batched_tokens: most new tokens of one step; longer prompts are
    read in chunks. memory_bytes: for the caches; None is what max_num_seqs full requests need, at most half of the
    memory available now. max_model_len: context length, None is the executor's. backtrack: newest tokens that callers
    of the scheduler may drop again, kept readable in windows. enable_prefix_caching: keep the cache rows of requests
    that ended, for prompts that start alike. prefix_cache_ttl: seconds that they are kept without use.
    prefix_cache_folder: where they are kept on disk too, for other processes; None: nowhere. They are written by a
    thread when a request ends. prefix_cache_bytes: what that folder may hold. prefix_cache_retention: seconds that they
    are kept there after their last use, by the class of the request (`SamplingParams.retention`), beside those of
    RETENTION; 0 is not at all. Pages that several classes use are kept as long as one of them needs.

    Raises BadOption naming the field.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    memory_bytes: int | None = None
    max_model_len: int | None = None
    backtrack: int = 0
    enable_prefix_caching: bool = True
    prefix_cache_ttl: float = 180.0
    prefix_cache_folder: str | Path | None = None
    prefix_cache_bytes: int = 16 << 30
    prefix_cache_retention: Mapping[str, float] | None = None

    @property
    def retention(self) -> dict[str, float]:
        """Seconds of all classes."""
        return {**RETENTION, **(self.prefix_cache_retention or {})}

    def __post_init__(self) -> None:
        lows = {
            "max_num_seqs": 1, "max_num_batched_tokens": 1, "memory_bytes": 0, "max_model_len": 2, "backtrack": 0,
            "prefix_cache_ttl": 0, "prefix_cache_bytes": 0,
        }  # fmt: skip
        for name, low in lows.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise BadOption(name=name, value=value, reason=f"it is below {low}", fix=f"use {low} or more")
        if self.prefix_cache_folder is not None and not self.enable_prefix_caching:
            raise BadOption(
                name="prefix_cache_folder",
                value=str(self.prefix_cache_folder),
                reason="enable_prefix_caching is off",
                fix="leave it out, or turn enable_prefix_caching on",
            )
        for name, seconds in self.retention.items():
            if not 0 <= seconds <= MOST_SECONDS:
                fix = f"give seconds from 0 to {MOST_SECONDS:g}"
                reason = f"the class {name!r} is out of range"
                raise BadOption(name="prefix_cache_retention", value=seconds, reason=reason, fix=fix)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise BadOption(
                name="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
                reason=f"each of max_num_seqs={self.max_num_seqs} requests needs a token a step",
                fix="raise it to max_num_seqs, or lower max_num_seqs",
            )


def prefix_cache(pages: Pages, executor: Executor, options: EngineOptions) -> PrefixCache:
    """The prefix cache of an engine. Raises BadOption for a folder without a model that can be named, or unusable."""
    disk = None
    if options.prefix_cache_folder is not None:
        if not executor.identity:
            fix = "leave it out"
            reason = "this executor does not say which model it runs"
            raise BadOption(name="prefix_cache_folder", value=str(options.prefix_cache_folder), reason=reason, fix=fix)
        there = DiskPages(
            Path(options.prefix_cache_folder),
            executor.identity,
            options.prefix_cache_bytes,
            longest=max(options.retention.values()),
            spans=[None if group.reach is None else pages_for(group.reach) for group in pages.groups],
        )
        disk = DiskTier(there, executor, options.retention)
    return PrefixCache(
        pages,
        seats=options.max_num_seqs,
        backtrack=options.backtrack,
        reads_hint=executor.reads_hint,
        keep=executor.keep,
        time_to_live=options.prefix_cache_ttl,
        disk=disk,
    )
