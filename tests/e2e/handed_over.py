"""Both units of a bundle: in one process, a rank each, and what a rank of a job does (`bundles` of `rank_worker`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

import deepinfer_compile as dc
from deepinfer_compile import CompileError, SamplingParams, load
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.runtime import shares
from deepinfer_compile.runtime.bundled import BundleLLM
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.outputs import RequestOutput
from deepinfer_compile.runtime.ranks import Ranks
from deepinfer_compile.runtime.roles import DECODE, PREFILL, plans_of
from deepinfer_compile.runtime.spread import Spread
from deepinfer_compile.runtime.unit import Unit, UnitExecutor
from deepinfer_compile.settings import ExpertPlan
from tests.e2e.partitioned import eager
from tests.runtime.units import Box

SIZES: dict[str, Any] = {"max_model_len": 200, "max_num_batched_tokens": 96}


def poison(executor: Any) -> None:
    """Let caches hold what no step has written."""
    for cache in executor.allocated.values():
        cache.fill_(float("nan") if cache.is_floating_point() else -99)


def in_one_process(bundle: Path, **options: Any) -> tuple[BundleLLM, BundleLLM]:
    """A rank that reads prompts, and one that decodes while the first waits."""
    boxes: dict[int, Box] = {}
    first, second = (
        opened(bundle, role, Unit(role, Box(rank, (1 - rank,), boxes), 2), **options)
        for role, rank in ((PREFILL, 0), (DECODE, 1))
    )
    boxes[0].wait = second.engine.step
    return first, second


def opened(bundle: Path, role: str, unit: Unit | None, **options: Any) -> BundleLLM:
    """The only rank of a unit; without one, a process that runs all programs."""
    files = read_bundle(bundle)
    spread = Spread.of(plans_of(files.manifest.experts)[role], Ranks())
    executor, _ = open_executor(files, native=False, spread=spread, unit=unit)
    made = BundleLLM(executor, **{**SIZES, **options})
    made.ranks = executor
    poison(executor)
    return made


def check_one_process(model: Any, folder: Path, given: list[list[int]], **build: Any) -> list[int]:
    """A rank of each unit gives what a process alone gives; greedy tokens of it are the eager model's, but where the
    build is an approximation. The bytes of rows that travelled."""
    dc.build(model, folder / "b", native=False, **build, experts=ExpertPlan(1, decode=ExpertPlan(1)))
    first, second = in_one_process(folder / "b", max_num_seqs=2)
    assert set(first.ranks.programs) == {"prefill"}
    assert set(second.ranks.programs) == {"decode", "verify"}
    plain = opened(folder / "b", PREFILL, None)
    params = [SamplingParams(temperature=t, seed=7, max_tokens=6, ignore_eos=True, logprobs=2) for t in (0.0, 9.0)]
    several = [params[i % 2] for i in range(len(given))]
    found = first.generate(given, several)
    alike(found, plain.generate(given, several))
    for result, prompt in list(zip(found, given))[::2] if not build.get("keep") else ():
        assert result.outputs[0].token_ids == eager(model, prompt, 6)
    assert not any(second.engine.pages_used)
    return [size for kind, _, size in first.ranks.mail.sent if kind == "rows"]


def alike(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    """The same tokens with the same log-probabilities, but for rounding."""
    for one, other in zip(found, wanted, strict=True):
        (mine,), (its) = one.outputs, other.outputs[0]
        assert mine.token_ids == its.token_ids
        assert mine.finish_reason == its.finish_reason
        for got, want in zip(mine.logprobs or (), its.logprobs or (), strict=True):
            assert got.keys() == want.keys()
            assert all(abs(got[t].logprob - want[t].logprob) < 1e-4 for t in want)


def serve(job: dict[str, Any], rank: int, prepare: Callable[[UnitExecutor], None]) -> dict[str, Any]:
    """Load a bundle, prepare it and complete prompts. Of the job: `bundles`, one a rank; `prompts`, lists of a rank;
    `params`, one for each of its prompts; `options` of load, of a rank; `place`, of each rank the placement that its
    unit takes between two calls. An error of load is a fact too: its name and text, and whether there was anything to
    send rows with."""
    options = {**SIZES, **job.get("options", {}).get(str(rank), {})}
    try:
        with mock.patch.object(shares, "GroupMail", wraps=shares.GroupMail) as mail:
            llm = load(job["bundles"][rank], native=False, **options)
    except CompileError as error:
        return {"error": type(error).__name__, "text": str(error), "mail": mail.call_count}
    executor = llm.ranks
    assert isinstance(executor, UnitExecutor)
    poison(executor)
    prepare(executor)
    kinds: list[str] = []
    inner = executor.run

    def run(kind: str, *args: Any) -> Tensor:
        kinds.append(kind)
        return inner(kind, *args)

    executor.run = run  # type: ignore[method-assign, assignment]
    given = job["prompts"][rank]
    params = [SamplingParams(**one) for one in job["params"]][: len(given)]
    found = llm.generate(given, params)
    if "place" in job:
        llm.place(job["place"][rank])
        found = llm.generate(given, params)
    handed = executor.ranks.sent.handed
    streamed: dict[str, list[int]] = {}
    with llm.stream(given[:2], params[:2]) as pieces:
        for item in pieces:
            streamed.setdefault(item.request_id, []).extend(item.outputs[0].token_ids)
    return {
        "tokens": [list(o.outputs[0].token_ids) for o in found],
        "streamed": list(streamed.values()),
        "handed": handed,
        "sent": vars(executor.ranks.sent),
        "kinds": sorted(set(kinds)),
        "decodes": llm.decodes,
        "used": list(llm.engine.pages_used),
        "preemptions": llm.engine.scheduler.preemptions,
        "held": {n: w for n, w in llm.weights.items() if n in llm.parts},
    }
