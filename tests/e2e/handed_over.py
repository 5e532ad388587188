"""What a rank of a test does in a job of two units: see `units` of `rank_worker`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_compile import CompileError, SamplingParams, load
from deepinfer_compile.runtime.unit import UnitExecutor
from tests.e2e.parity import prompts

SIZES = {"max_model_len": 200, "max_num_batched_tokens": 96}


def serve(job: dict[str, Any], rank: int) -> dict[str, Any]:
    """Load a bundle and complete prompts. Of the job: `bundles`, one a rank; `prompts`, lists of a rank; `params`, one
    for each of its prompts; `options` of load, of a rank. An error is a fact too: its name and text."""
    try:
        llm = load(job["bundles"][rank], native=bool(job.get("native")), **{**SIZES, **job.get("options", {}).get(str(rank), {})})
    except CompileError as error:
        return {"error": type(error).__name__, "text": str(error)}
    executor = llm.ranks
    assert isinstance(executor, UnitExecutor)
    kinds: list[str] = []
    inner = executor.run

    def run(kind: str, *args: Any) -> Tensor:
        kinds.append(kind)
        return inner(kind, *args)

    executor.run = run  # type: ignore[method-assign, assignment]
    for cache in executor.allocated.values():
        cache.fill_(float("nan") if cache.is_floating_point() else -99)
    given = job["prompts"][rank]
    params = [SamplingParams(**one) for one in job["params"]][: len(given)]
    found = llm.generate(given, params)
    streamed: dict[str, list[int]] = {}
    with llm.stream(given[:2], params[:2]) as pieces:
        for item in pieces:
            streamed.setdefault(item.request_id, []).extend(item.outputs[0].token_ids)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in found],
        "ends": [o.outputs[0].finish_reason for o in found],
        "streamed": list(streamed.values()),
        "sent": vars(executor.ranks.sent),
        "kinds": sorted(set(kinds)),
        "decodes": llm.decodes,
        "used": list(llm.engine.pages_used),
        "preemptions": llm.engine.scheduler.preemptions,
        "page_bytes": [group.bytes_per_page for group in executor.groups],
    }
