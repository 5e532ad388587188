"""One rank that runs a queue: `python -m tests.e2e.queue_worker FOLDER SIZE RANK STORE` does FOLDER/job.json.

The job names bundle, queue, results, most new tokens, and the folder of the prefix cache. `kill` names a rank, and
after how many results of its own it is killed, `torn` that this happens in the middle of the next one, `finish` in the
middle of putting the files together. FOLDER/RANK.stats.json gets what `run_queue` gave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepinfer_compile import SamplingParams, load, run_queue
from deepinfer_compile.runtime import queue_files

SIZES = {"max_model_len": 200, "max_num_seqs": 4, "max_num_batched_tokens": 96}
_write, _replace = os.write, os.replace


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(results: int, torn: bool) -> None:
    """Kill this process in place of its next result but so many, or when half of it is written."""
    left = [results]

    def write(fd: int, data: Any) -> int:
        if not bytes(data[:13]).startswith(b'{"custom_id"'):
            return _write(fd, data)
        if not left[0]:
            if torn:
                _write(fd, data[: len(data) // 2])
            _die()
        left[0] -= 1
        return _write(fd, data)

    queue_files.os.write = write  # type: ignore[attr-defined]


def die_before(results: str) -> Any:
    """A file takes its place, but not these."""

    def replace(source: Any, target: Any) -> None:
        if str(target) == results:
            _die()
        _replace(source, target)

    return replace


def main(folder: Path, size: int, rank: int, store: str) -> None:
    job = json.loads((folder / "job.json").read_text())
    if size > 1:
        init = f"file://{folder / store}"
        patience = timedelta(seconds=3600)
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size, timeout=patience)
    llm = load(job["bundle"], native=False, prefix_cache_folder=job.get("cache"), **SIZES)
    if job.get("kill") == rank:
        if job.get("finish"):
            queue_files.os.replace = die_before(job["results"])  # type: ignore[attr-defined]
        else:
            die_after(job["after"], job.get("torn", False))
    params = SamplingParams(temperature=0.0, max_tokens=job["count"], ignore_eos=True)
    stats = run_queue(llm, job["queue"], job["results"], params)
    llm.close()
    (folder / f"{rank}.stats.json").write_text(json.dumps(asdict(stats)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
