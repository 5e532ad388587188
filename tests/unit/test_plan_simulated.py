"""Closed forms against steps that are simulated choice by choice, up to thousands of ranks.

Tolerances: the fullest rank and slots hit 1%, seconds of a step 1.5% (the start and the end of the schedule, and that
the mean of a maximum is not the maximum of means).
"""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_compile.eplb import windowed_imbalance
from deepinfer_compile.plan.checking import check_decode
from deepinfer_compile.plan.hardware import read_hardware
from deepinfer_compile.plan.load import drawn, in_order, peaks, placed, recorded
from deepinfer_compile.plan.reading import shape_of
from deepinfer_compile.plan.shape import Shape
from deepinfer_compile.plan.simulate import count_steps
from tests.plans import unit


@pytest.fixture(scope="module")
def released() -> Shape:
    return shape_of({"model_type": "deepseek_v41"}, "config.json")


@pytest.mark.parametrize("batch", [1, 16, 128])
@pytest.mark.parametrize(("ranks", "redundant"), [(8, 0), (8, 32), (64, 64), (128, 64), (1024, 640), (4096, 3712)])
def test_a_step(released: Shape, ranks: int, redundant: int, batch: int) -> None:
    chip = read_hardware("h800")
    steps = 24 if ranks < 1000 else 4
    made = unit(ranks=ranks, model=released, hardware=chip, redundant_decode=redundant, context=4096)
    found = check_decode(made, batch, steps, seed=1)
    closed, drawn_ = found["closed"], found["simulated"]
    assert closed["fullest"] == pytest.approx(drawn_["fullest"], rel=0.01)
    assert closed["touched"] == pytest.approx(drawn_["touched"], rel=0.01)
    assert closed["seconds"] == pytest.approx(drawn_["seconds"], rel=0.015)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_domain_without_published_times(released: Shape, microbatches: int) -> None:
    more = {"model": released, "hardware": read_hardware("gb200"), "microbatches": microbatches}
    for ranks, batch in ((8, 3), (64, 100)):
        found = check_decode(unit(ranks=ranks, redundant_decode=64, **more), batch, 16, seed=2)
        assert found["closed"]["seconds"] == pytest.approx(found["simulated"]["seconds"], rel=0.015)


def test_tokens_choose_distinct_experts() -> None:
    """Choices are taken as independent; a token's are not. Drawn token by token, the fullest rank is 1% from it."""
    experts, ranks, tokens, top = 96, 8, 512, 6
    load = drawn(1, experts, 0.3, 3)
    plan = placed(load, ranks, 0, "published")
    rng = np.random.default_rng(0)
    keys = np.log(load.shares[0]) + rng.gumbel(size=(60, tokens, experts))
    chosen = np.argpartition(-keys, top, axis=-1)[..., :top]
    counts = np.stack([np.bincount(step.ravel(), minlength=experts) for step in chosen])
    home = np.empty(experts, np.int64)
    home[plan.phy2log[0]] = np.arange(experts) // plan.slots
    by_rank = np.stack([np.bincount(home, weights=step, minlength=ranks) for step in counts])
    # what a token-by-token draw gives each expert on average, not its raw share
    share = recorded(counts.sum(0)[None].tolist(), 1, experts, "drawn")
    closed = peaks(plan, share, np.array([tokens * top])).fullest[0]
    assert closed == pytest.approx(by_rank.max(1).mean(), rel=0.01)


def test_a_recorded_trace_is_taken_as_it_is() -> None:
    rng = np.random.default_rng(4)
    counts = rng.poisson(rng.lognormal(3, 1, (12, 3, 30)))
    load = recorded(counts.tolist(), 3, 30, "trace.json")
    for plan in (in_order(load, 10), placed(load, 10, 20, "published")):
        padded = np.stack([plan.padded(step) for step in load.windows])  # type: ignore[union-attr]
        assert np.allclose(plan.imbalance(load), windowed_imbalance(padded, plan.phy2log, 10))
        choices = np.array([700.0, 900.0, 50.0])
        closed = peaks(plan, load, choices)
        seen = count_steps(plan, load, choices, 12, rng)
        assert np.allclose(closed.fullest, seen.fullest.mean(0))
        assert np.allclose(closed.touched, seen.touched.mean(0))
        assert np.allclose(closed.fullest / closed.mean, plan.imbalance(load))
    flat = recorded(counts.sum(0).tolist(), 3, 30, "trace.json")
    assert flat.windows is None
    assert np.allclose(flat.shares, load.shares, atol=0.05)
