"""Experts over ranks that are threads of one process: on this CPU by the reference operations, and on one GPU by the
kernels. Where there are several GPUs, over NCCL, a process each.

fp32 logits to 1e-5 of the largest on the CPU, to 1e-4 with kernels, whose sums go in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer_compile as dc
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.eplb.layout import in_order
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.spread import Spread, SpreadExecutor
from deepinfer_compile.settings import ExpertPlan
from tests import models, v41
from tests.e2e import partitioned
from tests.e2e.forced import forced_logits
from tests.e2e.parity import prompts
from tests.e2e.partitioned import PROMPT, check_bytes, check_held, jobs_for, logits_of
from tests.e2e.test_gpu_bundle import here
from tests.plain_model import make_plain
from tests.ranks import RankThread, Together, in_threads, run_ranks

MORE = 4
MODELS: dict[str, tuple[Callable[[], Any], int, int, int]] = {
    "plain": (partial(make_plain, "loop", layers=2), 307, 5, 44),
    "deepseek_v3": (partial(models.make, "deepseek_v3"), models.VOCAB, 12, 96),
    "qwen3_moe": (partial(models.make, "qwen3_moe"), models.VOCAB, 7, 96),
    "gpt_oss": (partial(models.make, "gpt_oss"), models.VOCAB, 5, 96),
    "v41": (v41.make, 307, 7, 48),
}
"""What makes a model, its vocabulary, experts of a layer, and width."""


def simulated(bundle: Path, ids: list[list[int]], target: str | None) -> list[Tensor]:
    """Logits of a sequence for each rank, read in a prompt and then token by token; none where it has none."""
    files = read_bundle(bundle)

    def one(together: Together) -> Tensor:
        spread = Spread.of(files.manifest.experts, RankThread(together))
        executor, _ = open_executor(files, target, native=target is not None, spread=spread)
        assert isinstance(executor, SpreadExecutor)
        executor.draw = None
        executor.allocate((8,) * len(executor.groups))
        for cache in executor.allocated.values():
            cache.fill_(float("nan") if cache.is_floating_point() else -99)
        mine = ids[together.rank]
        found = forced_logits(executor, mine, PROMPT) if mine else torch.zeros(0)
        executor.finish()
        return found

    return in_threads(len(ids), one)


def check(model: Any, bundle: Path, ranks: int, vocab: int, *, target: str | None, most: float) -> None:
    """A prompt of another length on each rank; the second has nothing to do."""
    ids = [[] if rank == 1 else prompts(vocab, (PROMPT + MORE + rank,))[0] for rank in range(ranks)]
    for mine, got in zip(ids, simulated(bundle, ids, target), strict=True):
        if mine:
            want = logits_of(model, mine)[PROMPT - 1 :]
            assert got.shape == want.shape
            assert float((got.cpu() - want).abs().max()) <= most * float(want.abs().max())
            assert torch.equal(got.cpu().argmax(-1), want.argmax(-1))


def test_three_ranks_on_this_cpu(tmp_path: Path) -> None:
    model = make_plain("loop", layers=2)
    files = dc.build(model, tmp_path / "b", native=False, experts=ExpertPlan(3, 7))
    check(model, files.root, 3, 307, target=None, most=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_on_one_gpu(name: str, ranks: int, tmp_path: Path) -> None:
    """Kernels of every block, rows carried by torch; with as many copies as ranks, less one."""
    make, vocab, experts, _ = MODELS[name]
    model = make()
    files = dc.build(model, tmp_path / "b", target=here(), experts=ExpertPlan(ranks, experts + ranks - 1))
    check(model, files.root, ranks, vocab, target=here(), most=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [0, 3])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_over_nccl(name: str, copies: int, tmp_path: Path) -> None:
    """A GPU and a process for each rank: logits, greedy tokens, the rows held, and the bytes that were sent."""
    ranks = min(torch.cuda.device_count(), 8)
    if ranks < 2:
        pytest.skip("one GPU")
    make, vocab, experts, hidden = MODELS[name]
    model = make()
    files = dc.build(model, tmp_path / "b", target=here(), experts=ExpertPlan(ranks, experts + copies))
    jobs = jobs_for(files.root, ranks, vocab, target=here())
    found = run_ranks(ranks, tmp_path / "run", jobs)
    partitioned.check(model, jobs, found, most=1e-4)
    section = files.manifest.experts
    check_held(files.root, found, in_order(section["layers"], experts, experts + copies, ranks).phy2log)
    check_bytes(files.root, found, hidden)
