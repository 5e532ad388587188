"""Many compiler processes at once: a sweep compiles for longer than it measures.

Each thread has a worker process of its own (`sweep_worker.py`), started at its first job. One that dies or takes too
long costs its job alone: the reason is the answer, and the next job gets a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from deepinfer_compile.sweep_worker import MOST

COMMAND = (sys.executable, "-m", "deepinfer_compile.sweep_worker")
LIMIT_S = 180.0
MOST_WORKERS = 16


class CompilePool:
    """size: processes at most. limit_s: seconds that one job may take."""

    def __init__(self, size: int | None = None, limit_s: float = LIMIT_S, command: Sequence[str] = COMMAND) -> None:
        self.size = size or min(MOST_WORKERS, max(1, len(os.sched_getaffinity(0))))
        self._limit_s, self._command = limit_s, tuple(command)
        self._threads = ThreadPoolExecutor(self.size)
        self._own = threading.local()
        self._workers: list[subprocess.Popen[str]] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="deepinfer-sweep-")

    def close(self) -> None:
        """End every process."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in list(self._workers):
            worker.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.kill()
            worker.communicate()
        self._workers.clear()
        self._scratch.cleanup()

    def reasons(self, jobs: Sequence[dict[str, Any]]) -> list[str]:
        """What went wrong with each job, or nothing."""
        return list(self._threads.map(self._ask, jobs))

    def _ask(self, job: dict[str, Any]) -> str:
        worker: subprocess.Popen[str] = getattr(self._own, "worker", None) or self._start()
        assert worker.stdin is not None
        assert worker.stdout is not None
        late = threading.Event()

        def stop() -> None:
            late.set()
            worker.kill()

        timer = threading.Timer(self._limit_s, stop)
        timer.start()
        try:
            worker.stdin.write(json.dumps(job) + "\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            reason: str = json.loads(line)["reason"]
            return reason
        self._own.worker = None
        code = worker.wait()
        if late.is_set():
            return f"compiling took more than {self._limit_s:g} s"
        said = [text.strip() for text in self._own.log.read_text(errors="replace").splitlines() if text.strip()]
        return f"the compiler's process ended with code {code}{': ' if said else ''}{''.join(said[-1:])}"[:MOST]

    def _start(self) -> subprocess.Popen[str]:
        self._own.log = Path(self._scratch.name, f"{threading.get_ident()}-{time.monotonic_ns()}.txt")
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipe = subprocess.PIPE
        with self._own.log.open("w") as log:
            made = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env)
        self._own.worker = made
        self._workers.append(made)
        return made
