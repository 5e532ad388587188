"""What is asked of a plan: two units of ranks, the traffic, and what is assumed; checked before any work."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

from deepinfer_compile.errors import BadOption

PLACES = ("host", "sharded")
POLICIES = ("balanced", "published")
TRAFFIC = "https://github.com/deepseek-ai/profile-data"
DAY = "https://github.com/deepseek-ai/open-infra-index, DeepSeek-V3/R1 inference system overview"
SOURCES = {
    "context": f"{TRAFFIC}: prompts of 4K",
    "prompt": f"{TRAFFIC}: prompts of 4K",
    "prompt_tokens": f"{TRAFFIC}: 16K tokens a GPU in a prefill step",
    "batch": f"{TRAFFIC}: 128 requests a GPU in a decode step; fewer where they do not fit",
    "microbatches": f"{DAY}: two micro-batches, one computes while the other exchanges",
    "ratio": f"{DAY}: 608B tokens in and 168B out in a day",
    "tables": "https://github.com/deepseek-ai/DeepInfer: memory tables in host memory",
    "skew": "an assumption; no load of a deployment is published",
}
"""Where the defaults are from."""


@dataclass(frozen=True)
class Request:
    """Every field is an option of the command, with - for _.

    prefill, decode: ranks of the units. redundant_*: replicas of experts of a layer. batch: requests of a decode rank;
    None is `MOST` or what fits. context: tokens of a request in decode. prompt: tokens of a prompt. prompt_tokens:
    computed by a prefill rank in a step. hit: share of prompts' tokens found in a cache. ratio: tokens in for one out.
    rows, accepted: tokens that a request gives to a decode step, and that it gains by it. tables: of `PLACES`. prices:
    dollars for a million tokens in that hit, that miss, and out.
    """

    prefill: int = 4
    decode: int = 64
    redundant_prefill: int = 0
    redundant_decode: int = 0
    batch: int | None = None
    context: int = 4096
    prompt: int = 4096
    prompt_tokens: int = 16384
    hit: float = 0.0
    ratio: float = 608 / 168
    rows: int = 1
    accepted: float = 1.0
    microbatches: int = 2
    tables: str = "host"
    policy: str = "balanced"
    skew: float = 0.25
    seed: int = 0
    prices: tuple[float, float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "context", "prompt", "prompt_tokens", "rows"):
            self._whole(name, 1)
        for name in ("redundant_prefill", "redundant_decode", "seed"):
            self._whole(name, 0)
        if self.batch is not None:
            self._whole("batch", 1)
        self._in("hit", 0.0, 1.0, open_end=True)
        self._in("ratio", 0.0, math.inf)
        self._in("skew", 0.0, 10.0)
        self._in("accepted", 0.0, float(self.rows))
        for name, known in (("tables", PLACES), ("policy", POLICIES), ("microbatches", (1, 2))):
            if getattr(self, name) not in known:
                fix = f"use {' or '.join(map(str, known))}"
                raise BadOption(name=_option(name), value=getattr(self, name), reason="there is no such way", fix=fix)
        if self.prices is not None and not all(math.isfinite(p) and p >= 0 for p in self.prices):
            fix = "give dollars for a million tokens: hit,miss,output"
            raise BadOption(name="--prices", value=self.prices, reason="a price is a number from 0", fix=fix)

    def as_dict(self) -> dict[str, Any]:
        """The fields as data."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            fix = f"give a whole number from {least}"
            raise BadOption(name=_option(name), value=value, reason="it is a count", fix=fix)

    def _in(self, name: str, low: float, high: float, *, open_end: bool = False) -> None:
        value = getattr(self, name)
        inside = math.isfinite(value) and low <= value <= high and not (open_end and value == high)
        if not inside:
            end = "" if math.isinf(high) else f" to {'below ' if open_end else ''}{high:g}"
            raise BadOption(name=_option(name), value=value, reason="out of range", fix=f"give {low:g}{end}")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


__all__ = ["PLACES", "POLICIES", "SOURCES", "Request"]
