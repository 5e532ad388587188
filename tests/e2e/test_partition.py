"""DeepSeek-V3's form over two processes: with copies of experts, and with another placement of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import deepinfer_compile as dc
from deepinfer_compile.eplb import rebalance
from deepinfer_compile.eplb.layout import in_order
from deepinfer_compile.errors import BadOption
from deepinfer_compile.settings import ExpertPlan
from tests import models
from tests.e2e.partitioned import check, check_bytes, check_held, jobs_for
from tests.ranks import run_ranks


def test_deepseek_on_two_ranks_with_replicas(tmp_path: Path) -> None:
    """15 slots of 12 experts, so that one of the 16 places is empty; a second placement needs no other bundle."""
    model = models.make("deepseek_v3", num_hidden_layers=3, first_k_dense_replace=1)
    bundle = dc.build(model, tmp_path / "b", native=False, experts=ExpertPlan(ranks=2, slots=15))
    load = np.random.default_rng(0).integers(1, 100, (2, 12))
    other = rebalance(load, 16, 2, policy="published").phy2log
    jobs = jobs_for(bundle.root, 2, models.VOCAB)
    moved = jobs_for(bundle.root, 2, models.VOCAB, placement=other.tolist())
    del moved[1]["placement"]
    moved[1]["place"] = other.tolist()
    found = run_ranks(2, tmp_path / "run", [*jobs, *moved])
    check(model, jobs, [f[:2] for f in found])
    check(model, moved, [f[2:] for f in found])
    check_held(bundle.root, [f[:2] for f in found], in_order(2, 12, 15, 2).phy2log)
    check_held(bundle.root, [f[2:] for f in found], other)
    check_bytes(bundle.root, [f[:2] for f in found], 96)


def test_plans_that_are_none_are_refused(tmp_path: Path) -> None:
    model = models.make("llama")
    with pytest.raises(BadOption, match="it is no plan"):
        dc.build(model, tmp_path / "x", experts=2)
    for wrong in ({"ranks": 0}, {"ranks": 2, "slots": 0}, {"ranks": 1.5}):
        with pytest.raises(BadOption, match="not a positive number"):
            ExpertPlan(**wrong)
