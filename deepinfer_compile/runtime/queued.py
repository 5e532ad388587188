"""A queue of requests that goes on where it was after any end: of this process, of one rank, of all of them.

Each rank takes every n-th request of the file, whatever is done already, and leaves out what has a result; so a restart
may have another number of ranks. A result is on the disk as soon as its request has ended (`queue_files.py`). What was
under way when a rank ended is computed again; with a prefix cache on disk, from the rows that were written before.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import BadOption, CompileError
from deepinfer_compile.runtime.bundled import BundleLLM
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.outputs import RequestOutput
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.queue_files import Queue, Request, Results
from deepinfer_compile.runtime.ranks import IDLE, Ranks

AT_ONCE = 1024
"""Requests that a rank gives to the engine in one call, which ends on all ranks together."""


@dataclass(frozen=True)
class QueueStats:
    """What a run of a queue did on this rank. requests: in the file. before: had a result when it began, of any rank.
    done: got one from this rank now; failed: of these, requests that cannot run, whose result is an error. tokens: new
    ones. shared: tokens of prompts that were not computed because their cache rows were there; pages: of the cache,
    that came from disk."""

    requests: int
    before: int
    done: int = 0
    failed: int = 0
    tokens: int = 0
    shared: int = 0
    pages: int = 0
    seconds: float = 0.0


def run_queue(
    llm: LLM, queue: str | Path, results: str | Path, params: SamplingParams | None = None, *, at_once: int = AT_ONCE
) -> QueueStats:
    """Complete the requests of a file of JSON lines, and write a file with a line for each, in the same order.

    A line has a `custom_id`, `prompt` (text or ids) or `messages`, and may have SamplingParams of its own beside those
    of `params`, by default llm.default_params. A result has the id, `request` (a hash of the prompt and parameters),
    `prompt_tokens`, `cached_tokens` and `outputs` (index, text, token_ids, finish_reason, stop_reason), or `error`.
    Called again with the same files after it ended early, it goes on; results of another queue are refused. All ranks
    call it at the same time, with files that all of them see.

    Raises BadRequest for a line that is no request, BadOption for other parameters, results or ranks that differ,
    OSError, RankLost.
    """
    if isinstance(llm, BundleLLM) and llm.role:
        fix = "build with experts=ExpertPlan(ranks=...) alone"
        raise BadOption(name="queue", value=str(queue), reason="units take prompts in one call", fix=fix)
    spread = llm.ranks if isinstance(llm, BundleLLM) else None
    ranks = spread.ranks if spread is not None else Ranks()
    begin = time.perf_counter()
    jobs = Queue(Path(queue), params or llm.default_params)
    with Results(Path(results), jobs, ranks.rank, ranks.size) as files:
        # only now does every rank hold its part, so that no earlier run still writes
        if not ranks.alike(jobs.digest + str(Path(results).resolve()).encode()):
            fix = "give all of them the same files and parameters"
            raise BadOption(name="queue", value=str(queue), reason="the ranks have different ones", fix=fix)
        files.read()
        was = llm.prefix_stats
        counts = {"before": len(files.done), "done": 0, "failed": 0, "tokens": 0}
        mine = (p for i, p in jobs.ids.items() if p % ranks.size == ranks.rank and i not in files.done)
        while True:
            batch = [jobs.request(place) for place in islice(mine, at_once)]
            if not ranks.agree(IDLE, len(batch))[1]:
                break
            _complete(llm, batch, files, counts)
        if ranks.rank == 0:
            files.finish()
        ranks.agree(IDLE, 0)  # so that it is there when any rank's call ends
    now = llm.prefix_stats
    shared, pages = now.hit_tokens - was.hit_tokens, now.restored - was.restored
    return QueueStats(len(jobs), **counts, shared=shared, pages=pages, seconds=time.perf_counter() - begin)


def _complete(llm: LLM, batch: list[Request], files: Results, counts: dict[str, int]) -> None:
    """One call of all ranks. A request that somebody cancelled has no result."""
    for number, found in llm.as_completed([r.prompt for r in batch], [r.params for r in batch]):
        result: dict[str, Any] = {"custom_id": batch[number].custom_id, "request": batch[number].digest}
        if isinstance(found, CompileError):
            counts["failed"] += 1
            result["error"] = found.as_json()
        elif any(output.finish_reason == "abort" for output in found.outputs):
            continue
        else:
            counts["tokens"] += sum(len(output.token_ids) for output in found.outputs)
            result |= _answer(found)
        files.own.append(result)
        counts["done"] += 1


def _answer(found: RequestOutput) -> dict[str, Any]:
    names = ("index", "text", "token_ids", "finish_reason", "stop_reason")
    outputs = [{name: asdict(output)[name] for name in names} for output in found.outputs]
    return {"prompt_tokens": len(found.prompt_token_ids), "cached_tokens": found.num_cached_tokens, "outputs": outputs}


__all__ = ["AT_ONCE", "QueueStats", "run_queue"]
