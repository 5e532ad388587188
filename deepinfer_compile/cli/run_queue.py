"""`run --queue`: complete the requests of a file, go on after any end, and say on stderr what was done."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_compile.cli.boundary import print_json, usage
from deepinfer_compile.cli.show import plural, stderr

if TYPE_CHECKING:
    from deepinfer_compile.runtime.params import SamplingParams
    from deepinfer_compile.runtime.queued import QueueStats


def run_files(
    bundle: Path,
    queue: Path | None,
    results: Path | None,
    params: SamplingParams,
    options: Mapping[str, Any],
    as_json: bool,
    others: Mapping[str, Any],
) -> None:
    """Run a queue. options: of `load`. others: values of options that must not be given beside it. Raises BadOption."""
    if queue is None or results is None:
        name, other = ("--queue", "--results") if results is None else ("--results", "--queue")
        raise usage(name, str(queue or results), f"it needs {other}", "give both")
    for name, value in others.items():
        if value not in (None, False):
            reason, fix = "a queue says it line by line", "write it into the queue, or leave it out"
            raise usage(f"--{name}", str(value), reason, fix)
    import deepinfer_compile

    begin = time.perf_counter()
    llm = deepinfer_compile.load(bundle, **options)
    loaded = time.perf_counter() - begin
    stats = deepinfer_compile.run_queue(llm, queue, results, params)
    llm.close()
    if as_json:
        print_json({**asdict(stats), "load_seconds": round(loaded, 3)})
    who = f"rank {llm.ranks.ranks.rank}: " if llm.ranks is not None and llm.ranks.ranks.size > 1 else ""
    stderr().print(f"{who}loaded in {loaded:.2f} s; {_in_words(stats)}", soft_wrap=True)


def _in_words(stats: QueueStats) -> str:
    rate = f" ({stats.tokens / stats.seconds:.1f} tokens/s)" if stats.tokens and stats.seconds else ""
    words = f"{plural(stats.requests, 'request')}, {stats.before} of them done before; {stats.done} done now, "
    words += f"{stats.failed} of them refused; {plural(stats.tokens, 'token')} in {stats.seconds:.2f} s{rate}"
    return words + f", {plural(stats.shared, 'token')} shared, {plural(stats.pages, 'page')} from disk"


__all__ = ["run_files"]
