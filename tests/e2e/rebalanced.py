"""Traffic through a rank that may move its experts, and what it reports of it: see `traffic`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from torch import Tensor

import deepinfer_compile.runtime.interpret as interpret
from deepinfer_compile import Rebalance, SamplingParams, load
from deepinfer_compile.ops import parallel
from deepinfer_compile.runtime.bundled import BundleLLM


class Rows:
    """Counts the rows of experts that this rank gives to each rank, [layers, ranks], until it is taken."""

    def __init__(self, llm: BundleLLM) -> None:
        assert llm.ranks is not None
        section = llm.ranks.spread.section
        self.room, self.found = section["room"], np.zeros((section["layers"], section["ranks"]), np.int64)
        self.calls = 0

    def __call__(self, *given: Tensor) -> Tensor:
        slots = PLAIN(*given)
        to = (slots[slots >= 0] // self.room).numpy()
        self.found[self.calls % len(self.found)] += np.bincount(to, minlength=self.found.shape[1])
        self.calls += 1
        return slots

    def take(self) -> list[list[int]]:
        found, self.found = self.found, np.zeros_like(self.found)
        return found.tolist()


PLAIN = parallel.chosen_slots


def parts_of(llm: BundleLLM) -> list[int]:
    """What must stay the same object: programs, what runs their blocks, the memory of weights."""
    assert llm.ranks is not None
    programs = llm.ranks.programs.values()
    runners = [id(call.runner) for program in programs for call in program.calls]
    return [*map(id, programs), *runners, *(held.data_ptr() for held in llm.weights.values())]


def traffic(job: dict[str, Any], rank: int) -> tuple[dict[str, Any], BundleLLM]:
    """Complete the prompts `rounds` times; lists have an entry a round. rebalance: its options, None for none; or a
    list of those of each rank."""
    made: list[int] = []
    build = interpret.GraphFunction.__init__
    wanted = job["rebalance"][rank] if isinstance(job["rebalance"], list) else job["rebalance"]
    options = Rebalance(**wanted) if wanted else None
    sizes = {"max_model_len": 200, "max_num_batched_tokens": 96, "enable_prefix_caching": False}
    llm = load(job["bundle"], native=bool(job.get("native")), rebalance=options, **sizes)
    assert llm.ranks is not None
    before = parts_of(llm)
    interpret.GraphFunction.__init__ = lambda *args: (made.append(1), build(*args))[1]  # type: ignore
    parallel.chosen_slots = rows = Rows(llm)  # type: ignore[assignment]
    params = SamplingParams(temperature=0.0, max_tokens=job["count"], ignore_eos=True)
    found: dict[str, Any] = {name: [] for name in ("rounds", "rows", "stats", "plans", "seconds")}
    for _ in range(job["rounds"]):
        begin = time.perf_counter()
        done = llm.generate(job["traffic"][rank], params)
        found["seconds"].append(time.perf_counter() - begin)
        found["rounds"].append([list(o.outputs[0].token_ids) for o in done])
        found["rows"].append(rows.take())
        found["stats"].append(vars(llm.expert_stats))
        found["plans"].append(llm.ranks.spread.placement.phy2log.tolist())
    parallel.chosen_slots = PLAIN
    interpret.GraphFunction.__init__ = build  # type: ignore[method-assign]
    return {**found, "same": parts_of(llm) == before and not made, "sent": vars(llm.ranks.ranks.sent)}, llm


def rank_imbalance(found: list[dict[str, Any]], number: int) -> float:
    """The most rows of a rank over the mean, in the worst layer, of a round of all ranks."""
    rows = np.sum([f["rows"][number] for f in found], axis=0)
    return float((rows.max(1) / rows.mean(1)).max())
