"""Steps made from the one before are what they would be made anew."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.batch import CacheGroup, StepInput
from deepinfer_compile.runtime.scheduler import Batch, Scheduler
from tests.runtime.test_scheduler import FULL, WINDOW, request, scheduler

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 150)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("run"), st.integers(1, 90)),
    ),
    min_size=2,
    max_size=9,
)


def tensors(inputs: StepInput) -> dict[str, torch.Tensor]:
    plain = {f.name: getattr(inputs, f.name) for f in fields(inputs) if f.name != "groups"}
    for i, meta in enumerate(inputs.groups):
        plain |= {f"table {i}": meta.block_table, f"slot {i}": meta.slot}
    return plain


def equal(one: Batch, other: Batch) -> None:
    first, second = tensors(one.inputs), tensors(other.inputs)
    for name, held in first.items():
        assert held.dtype == second[name].dtype, name
        assert torch.equal(held, second[name]), name
    assert one.sampled.tolist() == other.sampled.tolist()
    assert one.sampled_rows.tolist() == other.sampled_rows.tolist()
    assert [(seat, rows.tolist()) for seat, rows in one.scored] == [(s, r.tolist()) for s, r in other.scored]


def step(target: Scheduler, count: int) -> Batch | None:
    plan = target.schedule()
    if plan is None:
        return None
    batch = target.batch(plan)
    target.advance(plan)
    tokens = np.arange(len(batch.sampled)) + count
    target.append(batch.sampled, tokens)
    for seat, token in zip(batch.sampled.tolist(), tokens.tolist()):
        held = target.request(seat)
        held.output_ids.append(token)
        if held.length >= 600:
            target.remove(held)
    return batch


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.booleans(), st.integers(9, 30))
def test_kept_steps_equal_new_ones(events: list[tuple[str, int]], scored: bool, pages: int) -> None:
    """Requests that come and go, pages that run out, windows that move on: the same inputs, pages and owners."""
    groups: tuple[CacheGroup, ...] = (FULL, WINDOW)
    kept, anew = (scheduler((pages, pages), groups, seats=3, budget=64) for _ in range(2))
    names = 0
    for kind, number in events:
        if kind == "add":
            params = {"prompt_logprobs": 0} if scored and number % 3 == 0 else {}
            for target in (kept, anew):
                target.add(request(str(names), number, **params))
            names += 1
        elif kind == "remove":
            for target in (kept, anew):
                owners = [target.request(seat) for seat in target._running.tolist()]
                if number < len(owners):
                    target.remove(owners[number])
        for i in range(number if kind == "run" else 1):
            anew._kept = None
            one, other = step(kept, i), step(anew, i)
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                equal(one, other)
            assert kept.pages.used == anew.pages.used
            assert kept.preemptions == anew.preemptions


def test_most_steps_of_a_quiet_batch_are_kept() -> None:
    target = scheduler((30, 30), (FULL, WINDOW), seats=2)
    target.add(request("a", 10))
    target.add(request("b", 33))
    plans = []
    for i in range(200):
        step(target, i)
        plans.append(target._kept)
    made = len({id(p) for p in plans})
    # two requests, two borders of pages each in 64 steps, and the first
    assert made <= 1 + 1 + 4 * 4


def test_steps_are_kept_while_the_queue_waits_for_a_seat() -> None:
    target = scheduler(seats=2)
    for name in "abc":
        target.add(request(name, 10))
    for i in range(2):
        step(target, i)
    kept = target._kept
    assert kept is not None
    step(target, 2)
    assert target._kept is kept
    assert len(target.waiting) == 1


@pytest.mark.parametrize("dropped", [1, 3, 70])
def test_dropped_tokens_are_made_anew(dropped: int) -> None:
    """The newest tokens taken back across the border of a page, as callers with `backtrack` may."""
    kept, anew = (scheduler(seats=2) for _ in range(2))
    for target in (kept, anew):
        target.add(request("a", 128))
        target.add(request("b", 150))
    for i in range(4):
        for target in (kept, anew):
            step(target, i)
    assert kept._kept is not None
    for target in (kept, anew):
        target._done[:2] -= dropped
        target._length[:2] -= dropped
    anew._kept = None
    one, other = step(kept, 4), step(anew, 4)
    assert one is not None
    assert other is not None
    equal(one, other)
