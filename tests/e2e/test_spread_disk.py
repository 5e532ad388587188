"""A rank whose requests wait for pages from disk does not hold up the others."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import deepinfer_compile as dc
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.runtime import options
from deepinfer_compile.runtime.bundled import BundleLLM
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.settings import ExpertPlan
from tests.e2e.parity import prompts
from tests.e2e.partitioned import COUNT, eager
from tests.plain_model import make_plain
from tests.ranks import RankThread, Together, in_threads

GREEDY = dc.SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)


class Blocked(DiskPages):
    """Reads wait until the other rank has its tokens."""

    free = threading.Event()

    def read(self, *args: Any) -> Any:
        assert Blocked.free.wait(60)
        return super().read(*args)


def test_others_generate_while_one_rank_waits_for_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_plain("loop", layers=2)
    files = read_bundle(dc.build(model, tmp_path / "b", native=False, experts=ExpertPlan(2, 5)).root)
    long, short = prompts(307, (150, 9))
    monkeypatch.setattr(options, "DiskPages", Blocked)
    Blocked.free.set()

    def one(together: Together) -> list[list[int]]:
        found = []
        for _ in range(2):
            ranks = RankThread(together)
            executor, _ = open_executor(files, native=False, spread=Spread.of(files.manifest.experts, ranks))
            assert isinstance(executor, SpreadExecutor)
            llm = BundleLLM(executor, None, max_num_seqs=2, prefix_cache_folder=tmp_path / f"rows{ranks.rank}")
            llm.ranks = executor
            for _, out in llm.as_completed([long if ranks.rank == 0 else short], GREEDY):
                assert isinstance(out, dc.RequestOutput)
                found.append(list(out.outputs[0].token_ids))
                Blocked.free.set()  # the call itself ends on both at once
            assert out.metrics is not None
            hits.setdefault(ranks.rank, []).append(out.metrics.disk_rows)
            llm.close()
            together.meeting.wait(60)
            Blocked.free.clear()
            together.meeting.wait(60)
        return found

    hits: dict[int, list[int]] = {}
    first, second = in_threads(2, one)
    assert first == [eager(model, long)] * 2
    assert second == [eager(model, short)] * 2
    assert hits == {0: [0, 128], 1: [0, 0]}
