"""One unit of ranks as data: what it holds, what fits, what a step does and takes, what it gives a second."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_compile.ops.registry import Work
from deepinfer_compile.plan.alltoall import few_tokens, many_tokens
from deepinfer_compile.plan.hardware import Hardware
from deepinfer_compile.plan.load import Load, Placed, in_order, placed
from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.shape import ROUTED, TABLES, Shape
from deepinfer_compile.plan.step import Batch, Costs, costs

MOST = 128
"""Requests of a decode rank where none are asked for and more would fit."""


@dataclass(frozen=True, eq=False)
class Unit:
    """Ranks of one kind with their placement of experts. kind: prefill or decode."""

    kind: str
    shape: Shape
    hardware: Hardware
    load: Load
    request: Request
    plan: Placed

    @staticmethod
    def make(kind: str, shape: Shape, hardware: Hardware, load: Load, request: Request, ranks: int) -> Unit:
        """A unit of some ranks with the request's replicas. Raises BadOption, MissingExtra."""
        redundant = request.redundant_prefill if kind == "prefill" else request.redundant_decode
        return Unit(kind, shape, hardware, load, request, placed(load, ranks, redundant, request.policy))

    # -- memory --------------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, float]:
        """Bytes of weights on the fullest rank by role."""
        held: dict[str, float] = dict(self.shape.role_bytes())
        held[ROUTED] = self.plan.slots * self.shape.expert_bytes * len(self.shape.routed_layers)
        if TABLES in held:
            held[TABLES] = 0.0 if self.request.tables == "host" else held[TABLES] / self.plan.ranks
        return held

    def memory(self) -> dict[str, Any]:
        """Bytes of a rank: usable, weights by role, room for caches, requests that fit and what one takes."""
        usable = self.hardware["memory_bytes"] * self.hardware["memory_fraction"]
        weights = self.weights()
        total = sum(weights.values())
        tokens = self.request.context if self.kind == "decode" else self.request.prompt
        one = self.shape.cache_bytes * tokens + self.shape.request_bytes
        room = usable - total
        return {
            "usable": usable,
            "weights": weights,
            "weights_total": total,
            "room": room,
            "request": one,
            "requests": max(int(room // one), 0) if one else 0,
        }

    def experts(self) -> dict[str, Any]:
        """Experts on a rank, their bytes of a layer, and how even the load is with and without replicas."""
        experts, ranks, plan = self.shape.experts, self.plan.ranks, self.plan
        one = self.shape.expert_bytes
        without = placed(self.load, ranks, 0, self.request.policy) if plan.redundant else plan
        plans = {"in order": in_order(self.load, ranks), "placed": without, "placed with replicas": plan}
        if not plan.redundant:
            del plans["placed with replicas"]
        return {
            "redundant": plan.redundant,
            "a_rank": (experts + plan.redundant) / ranks,
            "slots": plan.slots,
            "empty": plan.empty,
            "layer_bytes": (experts + plan.redundant) / ranks * one,
            "fullest_layer_bytes": plan.slots * one,
            "imbalance": {name: _few(found.imbalance(self.load)) for name, found in plans.items()},
        }

    @property
    def microbatches(self) -> int:
        """As asked; one where there is nothing to exchange."""
        return self.request.microbatches if self.plan.ranks > 1 else 1

    # -- steps ---------------------------------------------------------------------------------------------------------

    def decode_costs(self, batch: int) -> Costs:
        """Of a step with so many requests on every rank."""
        asked, count = self.request, self.microbatches
        share = batch / count
        attention = tuple(_times(work, share) for work in self.shape.step(asked.rows, asked.context))
        rows = np.full(self.shape.layers, share * asked.rows)

        def exchange(tokens: float) -> Any:
            return few_tokens(self.hardware, self.plan.ranks, tokens, self.shape.hidden, self.shape.top)

        made = Batch(rows, share * asked.rows, share * asked.rows, attention, exchange)
        return costs(self.shape, self.hardware, self.plan, self.load, made, count)

    def prompts(self, hit: float) -> tuple[int, int, float]:
        """Where a prompt's computed tokens start, how many they are, and prompts of a rank's step."""
        start = min(int(hit * self.request.prompt), self.request.prompt - 1)
        computed = self.request.prompt - start
        return start, computed, self.request.prompt_tokens / computed

    def prefill_costs(self, hit: float) -> Costs:
        """Of a step whose prompts have this share of their tokens in a cache."""
        count = self.microbatches
        start, computed, prompts = self.prompts(hit)
        share = prompts / count
        attention = tuple(_times(work, share) for work in self.shape.prompt(start, start + computed))
        rows = np.array([share * self.shape.rows(layer, computed) for layer in range(self.shape.layers)])

        def exchange(tokens: float) -> Any:
            sizes = self.shape.hidden, self.shape.top, self.shape.spread
            return many_tokens(self.hardware, self.plan.ranks, tokens, *sizes)

        made = Batch(rows, share * computed, share, attention, exchange)
        return costs(self.shape, self.hardware, self.plan, self.load, made, count)

    def input_rate(self, hit: float) -> float:
        """Tokens a second that a rank takes in, found ones included."""
        return self.prompts(hit)[2] * self.request.prompt / self.prefill_costs(hit).stages.seconds

    # -- together ------------------------------------------------------------------------------------------------------

    def data(self) -> dict[str, Any]:
        """Everything about the unit; `step` is None where it does not fit, and `why` says so."""
        memory = self.memory()
        head = {"kind": self.kind, "ranks": self.plan.ranks, "memory": memory, "experts": self.experts()}
        wanted = self._wanted(memory)
        why = self._short(memory, wanted)
        if why:
            return {**head, "fits": False, "why": why, "step": None}
        return {**head, "fits": True, "why": "", "step": self._step(wanted)}

    def _wanted(self, memory: dict[str, Any]) -> int:
        if self.kind == "prefill":
            return int(-(-self.prompts(self.request.hit)[2] // 1))
        return self.request.batch or max(1, min(MOST, memory["requests"]))

    def _short(self, memory: dict[str, Any], wanted: int) -> str:
        """Why it does not fit; empty if it does."""
        usable = memory["usable"]
        if memory["room"] < 0:
            needs = f"weights take {memory['weights_total'] / 1e9:.1f} GB of a rank"
            experts = memory["weights"][ROUTED] / 1e9
            words = f"{self.plan.slots} experts of a layer are {experts:.1f} GB of them; use more ranks, fewer replicas"
            return f"{needs}, {usable / 1e9:.1f} GB may be used ({words}, or a smaller format)"
        if wanted > memory["requests"]:
            one = memory["request"] / 1e6
            found = f"{wanted} requests of {one:.1f} MB need {wanted * one / 1e3:.2f} GB of caches"
            left = f"{memory['room'] / 1e9:.2f} GB ({memory['requests']} requests)"
            return f"{found}, beside the weights there are {left}"
        return ""

    def _step(self, wanted: int) -> dict[str, Any]:
        asked, decode = self.request, self.kind == "decode"
        found = self.decode_costs(wanted) if decode else self.prefill_costs(asked.hit)
        seconds, peaks = found.stages.seconds, found.peaks
        tokens = wanted * asked.rows if decode else asked.prompt_tokens
        made: dict[str, Any] = {
            "requests": wanted if decode else self.prompts(asked.hit)[2],
            "tokens": tokens,
            "seconds": seconds,
            "phases": found.stages.phases(),
            "exchanges": found.stages.exchanged,
            "exchange_by": found.exchange.by,
            "flops": found.flops,
            "read_bytes": found.read,
            "sent_bytes": found.sent,
            "fullest": float((peaks.fullest / peaks.mean).mean()) if len(peaks.mean) else 1.0,
        }
        if decode:
            made |= {"rate": wanted * asked.accepted / seconds, "user": asked.accepted / seconds}
        else:
            made |= {"rate": tokens / seconds, "input_rate": self.input_rate(asked.hit)}
        return made


def _times(work: Work, share: float) -> Work:
    return Work(round(work.flops * share), round(work.bytes * share))


def _few(found: Any) -> dict[str, float]:
    return {"mean": float(found.mean()), "worst": float(found.max())}


__all__ = ["MOST", "Unit"]
