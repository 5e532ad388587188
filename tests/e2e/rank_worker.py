"""One rank of a test: `python -m tests.e2e.rank_worker FOLDER SIZE PATIENCE RANK` does FOLDER/jobs.json.

A job names a bundle, the target that runs (by default the references, or with `native` this CPU; each rank takes the
GPU of its number), and what each rank does with it: `forced`, a sequence whose logits are wanted, read in a prompt and
then token by token, none where a rank has nothing to do; `prompts`, to be completed; `place`, another placement than it
was loaded with; `traffic`, see `rebalanced`; `die`, `stop` or `fail`, the rank that ends, stands still or raises in its
third step. One with `bundles` is of two units, see `handed_over`.
FOLDER/RANK.json gets a dict a job: tokens, bytes that were sent, what the formula for them needs; and
FOLDER/RANK.JOB.safetensors its tensors: logits, and the experts that it holds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_compile import SamplingParams, load
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.ops import parallel
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.ranks import BACKENDS, join
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from tests.e2e.forced import forced_logits
from tests.e2e.handed_over import serve
from tests.e2e.rebalanced import traffic

SIZES = {"max_model_len": 200, "max_num_batched_tokens": 96}


class Seen:
    """Watches the steps of an executor and the choices in them. away: of each exact dispatch, the rows that leave the
    rank. lanes: of each static one, the lanes of each rank."""

    def __init__(self, executor: SpreadExecutor, room: int) -> None:
        self.away: list[int] = []
        self.lanes: list[int] = []
        self.kinds: list[str] = []
        inner, rank, ranks = executor.run, executor.ranks.rank, executor.ranks.size

        def run(kind: str, inputs: Any, more: dict[str, Tensor]) -> Tensor:
            self.kinds.append(kind)
            self.each = len(more["lanes"]) // ranks
            return inner(kind, inputs, more)

        def chosen(ids: Tensor, slots: Tensor, counts: Tensor, mine: Tensor) -> Tensor:
            found = PLAIN(ids, slots, counts, mine)
            if self.kinds[-1] == "prefill":
                self.away.append(int(((found >= 0) & (found // room != rank)).sum()))
            else:
                self.lanes.append(self.each)
            return found

        executor.run = run  # type: ignore[method-assign, assignment]
        parallel.chosen_slots = chosen

    def facts(self) -> dict[str, Any]:
        """What was seen; it watches no more."""
        parallel.chosen_slots = PLAIN
        return {"away": self.away, "lanes": self.lanes, "kinds": self.kinds}


PLAIN = parallel.chosen_slots


def do(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """One job on one rank."""
    if "bundles" in job:
        return serve(job, rank, lambda executor: _act(job, rank, executor))
    files, target = read_bundle(job["bundle"]), job.get("target")
    room, native = files.manifest.experts["room"], bool(job.get("native") or target)
    found: dict[str, Any] = {}
    if "forced" in job:
        spread = Spread.of(files.manifest.experts, join(None, dist.get_world_size()), job.get("placement"))
        executor, weights = open_executor(files, target, native, spread=spread)
        assert isinstance(executor, SpreadExecutor)
        executor.allocate((8,) * len(executor.groups))
        for cache in executor.allocated.values():
            cache.fill_(float("nan") if cache.is_floating_point() else -99)
        seen = Seen(executor, room)
        ids = job["forced"][rank]
        found["logits"] = forced_logits(executor, ids, job["prompt"]) if ids else torch.zeros(0)
        executor.finish()
        found |= {**seen.facts(), "sent": vars(executor.ranks.sent), "held": _held(weights, files)}
    if "traffic" in job:
        facts, served = traffic(job, rank)
        found |= {**facts, "held": _held(served.weights, files)}
    if "prompts" in job:
        placement = job["placements"][rank] if "placements" in job else job.get("placement")
        llm = load(job["bundle"], target=target, native=native, placement=placement, **SIZES)
        assert llm.ranks is not None
        _act(job, rank, llm.ranks)
        if "place" in job:
            llm.place(job["place"])
        params = SamplingParams(temperature=0.0, max_tokens=job["count"], ignore_eos=True)
        found["tokens"] = [list(o.outputs[0].token_ids) for o in llm.generate(job["prompts"][rank], params)]
        pieces = llm.stream(job["prompts"][rank][:1], params)
        found["streamed"] = [token for item in pieces for token in item.outputs[0].token_ids]
    return found


def _held(weights: dict[str, Tensor], files: Any) -> dict[str, Tensor]:
    """The weights of experts that a rank holds, each with the bytes of memory behind it as its last row."""
    program = files.json(files.manifest.programs["decode"]["file"])
    names = [w["tensor"] for w in program["weights"].values() if "experts" in w]
    assert len(set(names)) == len(names)
    found = {name: weights[name].clone() for name in names}
    return {**found, **{f"{n}.bytes": torch.tensor(weights[n].untyped_storage().nbytes()) for n in names}}


def _fail() -> None:
    raise ValueError("a step that fails")


ACTS: dict[str, Callable[[], None]] = {
    "die": lambda: os._exit(9),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "fail": _fail,
}


def _act(job: dict[str, Any], rank: int, executor: SpreadExecutor) -> None:
    """Let a rank do in its third step what the job says."""
    for what, act in ACTS.items():
        if job.get(what) == rank:
            _in_step(executor, 3, act)


def _in_step(executor: SpreadExecutor, number: int, act: Callable[[], None]) -> None:
    """Act at the beginning of a step."""
    inner, left = executor.run, [number]

    def run(*args: Any) -> Tensor:
        left[0] -= 1
        if not left[0]:
            act()
        return inner(*args)

    executor.run = run  # type: ignore[method-assign, assignment]


def main(folder: Path, size: int, patience: float, rank: int) -> None:
    store = f"file://{folder / 'store'}"
    if torch.cuda.device_count() >= size:
        torch.cuda.set_device(rank)
    backend = BACKENDS["cuda" if torch.cuda.device_count() >= size else "cpu"]
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=patience))
    try:
        facts = []
        for i, job in enumerate(json.loads((folder / "jobs.json").read_text())):
            found = do(job, rank)
            tensors = {"logits": found.pop("logits", torch.zeros(0)), **found.pop("held", {})}
            save_file(tensors, folder / f"{rank}.{i}.safetensors")
            facts.append(found)
        (folder / f"{rank}.json").write_text(json.dumps(facts))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
