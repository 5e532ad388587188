"""A queue over ranks of which one, or all, are killed at any moment.

`pytest -m slow tests/runtime/test_queue_ranks.py` takes some minutes.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from tests.plain_model import VOCAB, make_plain
from tests.ranks import ROOT, ended

pytestmark = pytest.mark.slow
COUNT = 36
LOST = r"RankLost: rank {lost} of {size} is gone \(no sign of life for \d+ s\); rank {rank} of {size} cannot go on"


class Work:
    """A queue, its bundle, and what an undisturbed run of one rank gives."""

    def __init__(self, folder: Path) -> None:
        self.bundles = {n: self._bundle(folder / f"b{n}", n) for n in (1, 3)}
        drawn = random.Random(1)
        shared = drawn.choices(range(VOCAB), k=64)
        prompts = [shared + drawn.choices(range(VOCAB), k=drawn.randrange(1, 40)) for _ in range(COUNT)]
        lines = [{"custom_id": f"q{i}", "prompt": p, "max_tokens": 3 + i % 20} for i, p in enumerate(prompts)]
        self.queue = folder / "q.jsonl"
        self.queue.write_text("".join(json.dumps(line) + "\n" for line in lines))
        params = dc.SamplingParams(temperature=0.0, ignore_eos=True)
        llm = dc.load(self.bundles[1], native=False, max_model_len=200, max_num_seqs=4, max_num_batched_tokens=96)
        dc.run_queue(llm, self.queue, folder / "whole", params)
        self.tokens = self.read(folder / "whole")

    def _bundle(self, path: Path, ranks: int) -> str:
        model = make_plain("loop", layers=1)
        return str(dc.build(model, path, native=False, experts=dc.ExpertPlan(ranks=ranks)).root)

    @staticmethod
    def read(path: Path) -> dict[str, list[int]]:
        """Tokens by id, in the order of the file; each id is there once."""
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert [f["custom_id"] for f in found] == [f"q{i}" for i in range(COUNT)]
        return {f["custom_id"]: f["outputs"][0]["token_ids"] for f in found}

    def start(self, folder: Path, size: int, **job: Any) -> list[Any]:
        """The ranks of a run with all files in one folder."""
        files = {"bundle": self.bundles[size], "queue": str(self.queue), "results": str(folder / "r.jsonl")}
        folder.mkdir(exist_ok=True)
        (folder / "job.json").write_text(json.dumps({**files, "cache": str(folder / "cache"), "count": 16, **job}))
        store = f"store{len(list(folder.glob('store*')))}"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.e2e.queue_worker", str(folder), str(size)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return [subprocess.Popen([*command, str(r), store], cwd=ROOT, env=env, **pipes) for r in range(size)]

    def again(self, folder: Path, size: int) -> list[dict[str, Any]]:
        """Run to the end; what each rank did. The results are those of an undisturbed run."""
        for code, err in ended(self.start(folder, size), 200):
            assert code == 0, err[-3000:]
        assert self.read(folder / "r.jsonl") == self.tokens
        assert not list(folder.glob("*.part"))
        return [json.loads((folder / f"{rank}.stats.json").read_text()) for rank in range(size)]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Work:
    return Work(tmp_path_factory.mktemp("work"))


def results(folder: Path) -> int:
    return sum(part.read_bytes().count(b"\n") for part in folder.glob("*.part"))


def killed(work: Work, folder: Path, lost: int, **job: Any) -> None:
    """A run of three ranks of which one is killed; the others say which, within 30 s of that."""
    processes = work.start(folder, 3, kill=lost, **job)
    assert processes[lost].wait(120) == -9
    for rank, (code, err) in enumerate(ended(processes, 30)):
        if rank != lost:
            assert code == 1
            assert len(re.findall(LOST.format(lost=lost, size=3, rank=rank), err)) == 1, err[-3000:]


@pytest.mark.parametrize("torn", [False, True])
def test_a_rank_is_killed_and_the_queue_goes_on(work: Work, tmp_path: Path, torn: bool) -> None:
    """Nothing is lost and nothing is twice; rows that were on disk are not computed again."""
    killed(work, tmp_path, 1, after=4, torn=torn)
    done = results(tmp_path)
    assert 4 <= done < COUNT
    found = work.again(tmp_path, 3)
    assert [f["before"] for f in found] == [done] * 3
    assert sum(f["done"] for f in found) == COUNT - done
    assert sum(f["pages"] for f in found) > 0
    assert sum(f["shared"] for f in found) >= 64


def test_other_ranks_take_it_over(work: Work, tmp_path: Path) -> None:
    """Also one alone."""
    killed(work, tmp_path, 0, after=2)
    done = results(tmp_path)
    (found,) = work.again(tmp_path, 1)
    assert (found["before"], found["done"]) == (done, COUNT - done)


def test_killed_while_the_files_are_put_together(work: Work, tmp_path: Path) -> None:
    killed(work, tmp_path, 0, finish=True)
    assert results(tmp_path) == COUNT
    assert not (tmp_path / "r.jsonl").exists()
    assert [f["done"] for f in work.again(tmp_path, 3)] == [0] * 3


@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_moment(work: Work, tmp_path: Path, seed: int) -> None:
    """All of them, again and again, until one run comes to its end."""
    drawn = random.Random(seed)
    done = 0
    for _ in range(3):
        processes = work.start(tmp_path, 3)
        wanted, begin = done + drawn.randrange(1, 8), time.monotonic()
        while results(tmp_path) < wanted and time.monotonic() - begin < 120:
            time.sleep(0.01)
        time.sleep(drawn.random() * 0.1)
        for process in drawn.sample(processes, 3):
            process.kill()
        ended(processes, 30)
        assert results(tmp_path) >= done
        done = results(tmp_path)
    found = work.again(tmp_path, 3)
    assert found[0]["before"] >= 3
    assert sum(f["done"] for f in found) == COUNT - found[0]["before"]
