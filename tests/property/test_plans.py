"""What holds for every plan: sums, bounds, monotony, and that the closed forms are what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.plan.alltoall import distinct, few_tokens, many_tokens
from deepinfer_compile.plan.hardware import read_hardware
from deepinfer_compile.plan.load import drawn, in_order, largest_poisson, most_touched, peaks, placed
from deepinfer_compile.plan.simulate import run_schedule
from deepinfer_compile.plan.step import Stages
from tests.plans import plain, shape, unit

RANKS = st.integers(1, 40)
FEW = settings(max_examples=40, deadline=None)


@FEW
@given(RANKS, st.integers(0, 50), st.integers(0, 5000))
def test_memory_adds_up(ranks: int, redundant: int, context: int) -> None:
    found = unit(ranks=ranks, redundant_decode=redundant, context=context + 1).memory()
    assert found["weights_total"] == pytest.approx(sum(found["weights"].values()))
    assert found["room"] == pytest.approx(found["usable"] - found["weights_total"])
    assert found["requests"] * found["request"] <= found["room"] < (found["requests"] + 1) * found["request"]


@FEW
@given(RANKS, st.integers(0, 50), st.sampled_from(["published", "balanced"]))
def test_every_expert_has_a_place(ranks: int, redundant: int, policy: str) -> None:
    load = drawn(3, 30, 0.5, 1)
    plan = placed(load, ranks, redundant, policy)
    assert plan.phy2log.shape[1] == plan.slots * ranks
    assert 0 <= plan.empty < ranks
    for row in plan.phy2log:
        copies = np.bincount(row, minlength=30 + plan.empty)
        assert copies[:30].sum() == 30 + redundant
        assert (copies > 0).all()
    assert np.allclose(plan.shares(load.shares).sum(-1), 1)
    assert (plan.imbalance(load) >= 1 - 1e-9).all()


@FEW
@given(RANKS, st.integers(1, 40))
def test_replicas_do_not_hurt(ranks: int, redundant: int) -> None:
    load = drawn(3, 30, 0.8, 2)
    redundant = -(-(30 + redundant) // ranks) * ranks - 30
    with_, without = (placed(load, ranks, n, "balanced").imbalance(load).mean() for n in (redundant, 0))
    assert with_ <= without * 1.001


@FEW
@given(
    st.sampled_from(["read_bytes", "bf16_flops", "fp8_flops", "attention_flops", "domain_bytes", "network_bytes"]),
    st.floats(1.0, 1e3),
    st.sampled_from(["decode", "prefill"]),
    st.integers(1, 2),
)
def test_faster_parts_never_slow_a_step(name: str, times: float, kind: str, microbatches: int) -> None:
    slow, fast = plain(), plain(**{name: plain()[name] * times})
    seconds = [unit(kind, 16, hardware=h, microbatches=microbatches).data()["step"]["seconds"] for h in (slow, fast)]
    assert seconds[1] <= seconds[0] * (1 + 1e-12)


@FEW
@given(st.integers(1, 200), RANKS)
def test_more_requests_take_longer_and_give_more(batch: int, ranks: int) -> None:
    one, two = (unit(ranks=ranks, batch=n).data()["step"] for n in (batch, batch + 1))
    assert two["seconds"] >= one["seconds"]
    assert two["user"] <= one["user"]
    assert sum(one["phases"].values()) == pytest.approx(one["seconds"])
    assert all(part >= -1e-12 for part in one["phases"].values())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.0, 10.0), min_size=4, max_size=4))
def test_the_time_of_a_layer_is_that_of_the_schedule(stages: list[float]) -> None:
    """After a start, each more layer takes what the closed form says."""
    layers = 64
    one = [np.full((2, 1, layers), t) for t in stages]
    ends = [run_schedule(*(s[:, :, :n] for s in one))[0] for n in (layers // 2, layers)]
    row = [np.full(layers, t) for t in stages]
    closed = Stages(np.zeros(layers), *row, 0.0, 0.0, 2).layers()[0]
    assert (ends[1] - ends[0]) / (layers // 2) == pytest.approx(closed, rel=1e-9, abs=1e-9)
    # the start and the end cost less than two layers
    assert abs(ends[1] - layers * closed) <= 2 * sum(stages) + 1e-9


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.0, 400.0), min_size=1, max_size=40))
def test_the_largest_of_poisson_numbers(rates: list[float]) -> None:
    found = largest_poisson(np.array(rates))
    draws = np.random.default_rng(0).poisson(rates, (4000, len(rates))).max(1)
    near = 5 * draws.std() / 4000**0.5 + 0.02
    assert abs(found - draws.mean()) <= near
    assert found >= max(rates) - 1e-6


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 30), st.floats(0.0, 1.0))
def test_the_most_slots_that_are_hit(slots: int, ranks: int, chance: float) -> None:
    rng = np.random.default_rng(1)
    odds = rng.uniform(0, chance, (1, ranks, slots))
    draws = (rng.random((4000, ranks, slots)) < odds).sum(-1).max(-1)
    assert most_touched(odds)[0] == pytest.approx(draws.mean(), abs=5 * draws.std() / 4000**0.5 + 0.01)


@FEW
@given(st.integers(2, 300), st.floats(1.0, 512.0), st.floats(1.0, 4.0))
def test_exchanges_grow_with_tokens(ranks: int, tokens: float, times: float) -> None:
    for chip in (read_hardware("h800"), plain()):
        for way in (few_tokens, many_tokens):
            less, more = (way(chip, ranks, n, 5120, 6) for n in (tokens, tokens * times))
            assert more.out >= less.out >= chip["latency"]
            assert more.back >= less.back
            assert more.out_bytes == pytest.approx(less.out_bytes * times)


@FEW
@given(st.integers(1, 64), st.integers(1, 16))
def test_distinct_places(places: int, picks: int) -> None:
    draws = np.random.default_rng(2).integers(0, places, (3000, picks))
    hit = np.array([len(set(row)) for row in draws.tolist()])
    assert distinct(places, picks) == pytest.approx(hit.mean(), abs=6 * hit.std() / 3000**0.5 + 0.005)
    assert distinct(places, picks, 2) <= 2


def test_no_tokens_and_one_rank() -> None:
    model = shape()
    load = drawn(3, 30, 0.2, 0)
    none = peaks(in_order(load, 4), load, np.zeros(3))
    assert none.fullest.tolist() == [0, 0, 0]
    assert none.touched.tolist() == [0, 0, 0]
    alone = unit(ranks=1, model=model).data()["step"]
    assert alone["exchanges"] == 0
    assert alone == unit(ranks=1, model=model, microbatches=1).data()["step"]
    assert alone["fullest"] == pytest.approx(1, abs=0.2)
