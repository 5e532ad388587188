"""Ranks for tests: threads of this process that exchange rows, and processes that run `tests.e2e.rank_worker`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_compile.runtime.ranks import KINDS, Ranks

ROOT = Path(__file__).parent.parent
T = TypeVar("T")


class Together:
    """`Peers` of `size` threads. sent: bytes that a rank gave to others."""

    def __init__(self, meeting: threading.Barrier, table: list[Any], rank: int) -> None:
        self.meeting, self.table, self.rank, self.size = meeting, table, rank, len(table)
        self.sent = 0

    def exchange(self, rows: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        assert sum(give) == len(rows)
        self.table[self.rank] = rows.split(list(give))
        self.meeting.wait()
        found = [self.table[r][self.rank].clone() for r in range(self.size)]
        self.meeting.wait()
        assert [len(f) for f in found] == list(take)
        width = rows.new_empty((1, *rows.shape[1:]))
        self.sent += (len(rows) - give[self.rank]) * width.numel() * width.element_size()
        return torch.cat(found)


class RankThread(Ranks):
    """`Ranks` of which each is a thread of this process."""

    def __init__(self, inner: Together) -> None:
        self.inner = inner
        super().__init__()
        self.rank, self.size = inner.rank, inner.size

    def exchange(self, rows: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        return self.inner.exchange(rows, give, take)

    def agree(self, kind: str, tokens: int) -> tuple[str, int]:
        most = self._all([KINDS.index(kind), tokens]).amax(0).tolist()
        return KINDS[most[0]], int(most[1])

    def alike(self, data: bytes) -> bool:
        found = self._all(list(hashlib.sha256(data).digest()))
        return bool((found == found[0]).all())

    def total(self, counts: Tensor) -> Tensor:
        return self._all(counts.tolist()).sum(0)

    def _all(self, numbers: list[Any]) -> Tensor:
        one = [1] * self.size
        return self.inner.exchange(torch.tensor([numbers] * self.size), one, one)


def in_threads(size: int, work: Callable[[Together], T]) -> list[T]:
    """What `work` gives on each rank; the first error of one is raised."""
    meeting, table = threading.Barrier(size), [None] * size
    found: list[Any] = [None] * size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            found[rank] = work(Together(meeting, table, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # of any kind: it is raised where the ranks were started
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def start(size: int, folder: Path, jobs: Sequence[dict[str, Any]], patience: float = 60.0) -> list[Any]:
    """Processes of a gloo group that do the jobs of `rank_worker`, one behind the other."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(list(jobs)))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.e2e.rank_worker", str(folder), str(size), str(patience)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return [subprocess.Popen([*command, str(rank)], cwd=ROOT, env=env, **pipes) for rank in range(size)]


def ended(processes: Sequence[Any], seconds: float) -> list[tuple[int, str]]:
    """Exit code and what was said on stderr, of processes that must end within so many seconds."""
    begin = time.monotonic()
    found = []
    try:
        for process in processes:
            _, err = process.communicate(timeout=max(0.1, seconds - (time.monotonic() - begin)))
            found.append((process.returncode, err))
    finally:
        for process in processes:
            process.kill()
    return found


def run_ranks(size: int, folder: Path, jobs: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """For each rank, what each job gave."""
    found = []
    processes = start(size, folder, jobs)
    try:
        for rank, process in enumerate(processes):
            out, err = process.communicate(timeout=200)
            assert process.returncode == 0, f"rank {rank}: {out[-2000:]}\n{err[-4000:]}"
            facts = json.loads((folder / f"{rank}.json").read_text())
            found.append([{**f, "held": load_file(folder / f"{rank}.{i}.safetensors")} for i, f in enumerate(facts)])
    finally:
        for process in processes:
            process.kill()
    return found
