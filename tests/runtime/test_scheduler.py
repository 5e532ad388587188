"""Which requests run, in which order, with how many tokens, and who gives way when pages run out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup
from deepinfer_compile.runtime.pages import Pages, plan_pages
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.scheduler import SCORING_TOKENS, Scheduler

FULL = CacheGroup("full", 0, 1)
WINDOW = CacheGroup("window", 100, 1)
LENGTH = 640


def scheduler(pages=(1000,), groups=(FULL,), *, seats=4, budget=100) -> Scheduler:
    table = Pages(groups, pages, seats=seats, max_model_len=LENGTH, backtrack=0)
    return Scheduler(table, max_num_seqs=seats, max_num_batched_tokens=budget)


def request(name: str, length: int, **params) -> Request:
    return Request(
        id=name,
        prompt=np.arange(length, dtype=np.int64) % 50,
        params=SamplingParams(temperature=0, max_tokens=None, **params),
        limit=LENGTH,
        end_ids=frozenset(),
        eos_ids=frozenset(),
        seed=0,
    )


def step(target: Scheduler, token: int = 7) -> dict[str, int]:
    """Run a step as the engine does; return how many tokens each request got."""
    plan = target.schedule()
    if plan is None:
        return {}
    batch = target.batch(plan)
    names = [target.request(seat).id for seat in plan.seats.tolist()]
    target.advance(plan)
    target.append(batch.sampled, np.full(len(batch.sampled), token))
    for seat in batch.sampled.tolist():
        target.request(seat).output_ids.append(token)
    return dict(zip(names, plan.count.tolist()))


def queue(target: Scheduler, *requests: Request) -> None:
    for one in requests:
        target.add(one)


def test_first_come_first_served_under_the_budget():
    target = scheduler()
    queue(target, request("a", 30), request("b", 250), request("c", 5))
    assert step(target) == {"a": 30, "b": 70}
    assert step(target) == {"a": 1, "b": 99}
    assert step(target) == {"a": 1, "b": 81, "c": 5}
    assert step(target) == {"a": 1, "b": 1, "c": 1}


def test_no_more_requests_than_seats():
    target = scheduler(seats=2, budget=50)
    queue(target, *(request(str(i), 3) for i in range(4)))
    assert step(target) == {"0": 3, "1": 3}
    target.remove(target.request(0))
    assert step(target) == {"1": 1, "2": 3}
    assert (target.running, len(target.waiting)) == (2, 1)


def test_nothing_to_do():
    assert scheduler().schedule() is None


def test_a_batch_is_packed_as_the_contract_says():
    target = scheduler((50, 50), (FULL, WINDOW), budget=140)
    queue(target, request("a", 70), request("b", 130))
    step(target, token=9)
    plan = target.schedule()
    inputs = target.batch(plan).inputs
    assert inputs.query_start.tolist() == [0, 1, 61]
    assert inputs.seq_len.tolist() == [71, 130]
    assert inputs.input_ids.tolist() == [9, *(i % 50 for i in range(70, 130))]
    assert inputs.position_ids.tolist() == [70, *range(70, 130)]
    assert inputs.context_hint.tolist() == [71, *[130] * 60]
    assert inputs.rows.tolist() == [0, 60]
    for meta in inputs.groups:
        table = meta.block_table.tolist()
        assert [len(row) for row in table] == [3, 3]
        assert table[0][2] == -1
        assert len({*table[0][:2], *table[1]}) == 5
        assert meta.slot.tolist() == [
            table[0][1] * PAGE_SIZE + 6,
            *(table[1][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(70, 130)),
        ]


def test_a_step_may_want_no_logits():
    target = scheduler(budget=10, seats=1)
    queue(target, request("a", 25))
    batch = target.batch(target.schedule())
    assert batch.inputs.rows.tolist() == []
    assert len(batch.sampled) == 0


def test_context_hint_survives_preemption():
    target = scheduler((3,), seats=2, budget=200)
    queue(target, request("old", 60), request("young", 60))
    while not target.preemptions:
        step(target)
    assert [r.id for r in target.waiting] == ["young"]
    target.remove(target.request(0))
    plan = target.schedule()
    made = len(target.request(int(plan.seats[0])).output_ids)
    assert made > 1
    hints = target.batch(plan).inputs.context_hint.tolist()
    assert hints == [60] * 60 + list(range(61, 61 + made))


def test_the_youngest_gives_way_and_comes_back_first():
    target = scheduler((4,), seats=4, budget=300)
    queue(target, *(request(name, 60) for name in "abcd"), request("e", 1))
    assert step(target) == {"a": 60, "b": 60, "c": 60, "d": 60}
    for _ in range(4):
        step(target)
    # 64 tokens each: the next one needs a page, and only d's and c's can be had.
    assert step(target) == {"a": 1, "b": 1}
    assert [r.id for r in target.waiting] == ["c", "d", "e"]
    assert target.pages.used == (4,)
    assert all(r.seat == -1 for r in target.waiting)
    target.remove(target.request(0))
    # a's two pages serve c, which must be read again with the tokens it had put out.
    assert step(target) == {"b": 1, "c": 65}


def test_a_request_that_finds_no_page_keeps_its_own():
    target = scheduler((3,), seats=2, budget=200)
    queue(target, request("a", 100), request("b", 64))
    assert step(target) == {"a": 100, "b": 64}
    assert step(target) == {"a": 1}
    assert (target.preemptions, target.pages.used) == (0, (3,))
    target.remove(target.request(0))
    assert step(target) == {"b": 1}


def test_no_one_overtakes_a_request_that_waits_for_pages():
    target = scheduler((5,), seats=3, budget=130)
    queue(target, request("a", 64), request("b", 250), request("c", 1))
    assert step(target) == {"a": 64, "b": 66}
    assert step(target) == {"a": 1}
    assert target.pages.used == (4,)
    target.remove(target.request(0))
    assert step(target) == {"b": 130}
    assert step(target) == {"b": 54, "c": 1}


def test_no_one_is_admitted_without_pages_for_the_whole_prompt():
    target = scheduler((5,), seats=3, budget=64)
    queue(target, request("a", 64), request("b", 300), request("c", 1))
    assert step(target) == {"a": 64}
    assert step(target) == {"a": 1}
    assert [r.id for r in target.waiting] == ["b", "c"]


def test_scoring_prompts_share_a_row_budget():
    target = scheduler(seats=4, budget=2000)
    scored = [request(name, length, prompt_logprobs=1) for name, length in (("a", 200), ("b", 400))]
    queue(target, *scored, request("c", 200))
    assert step(target) == {"a": 200, "b": SCORING_TOKENS - 200, "c": 200}
    assert step(target) == {"a": 1, "b": SCORING_TOKENS, "c": 1}
    assert step(target) == {"a": 1, "b": 600 - 2 * SCORING_TOKENS, "c": 1}
    assert step(target) == {"a": 1, "b": 1, "c": 1}


def test_rows_of_scored_prompts():
    target = scheduler(budget=6)
    one = request("a", 9, prompt_logprobs=0)
    queue(target, one)
    batch = target.batch(plan := target.schedule())
    assert batch.inputs.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert [(seat, rows.tolist()) for seat, rows in batch.scored] == [(0, [0, 1, 2, 3, 4, 5])]
    target.advance(plan)
    one.prompt_logprobs = [None] * 6
    batch = target.batch(target.schedule())
    assert batch.inputs.rows.tolist() == [0, 1, 2]
    assert [(seat, rows.tolist()) for seat, rows in batch.scored] == [(0, [0, 1])]
    assert (batch.sampled.tolist(), batch.sampled_rows.tolist()) == ([0], [2])


def test_restart_forgets_seats_but_not_requests():
    target = scheduler(seats=2)
    requests = [request(name, 20) for name in "abc"]
    queue(target, *requests)
    step(target)
    step(target)
    target.restart(requests)
    assert (target.running, target.pages.used) == (0, (0,))
    assert step(target) == {"a": 22, "b": 22}


def test_an_empty_seat_has_no_request():
    with pytest.raises(LookupError, match="seat 1"):
        scheduler().request(1)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_every_request_ends_and_nothing_leaks(data):
    seats = data.draw(st.integers(1, 5))
    budget = seats + data.draw(st.integers(0, 200))
    groups = (FULL, WINDOW)
    sizes = {"seats": seats, "max_model_len": LENGTH, "chunk": budget, "backtrack": 0}
    least = sum(plan_pages((g,), memory_bytes=None, **{**sizes, "seats": 1})[0] for g in groups)
    pages = plan_pages(groups, memory_bytes=least + data.draw(st.integers(0, 20)), **sizes)
    target = scheduler(pages, groups, seats=seats, budget=budget)
    sizes = st.tuples(st.integers(1, LENGTH - 1), st.integers(1, 100), st.booleans())
    todo = data.draw(st.lists(sizes, min_size=1, max_size=8))
    goals, alive = {}, {}
    for i, (length, more, scores) in enumerate(todo):
        one = request(str(i), length, prompt_logprobs=0 if scores else None)
        goals[one.id], alive[one.id] = min(more, LENGTH - length), one
        target.add(one)
    for _ in range(5000):
        if not alive:
            break
        oldest = next(iter(alive.values()))
        before = (oldest.seat, len(oldest.output_ids))
        got = step(target)
        assert 0 < sum(got.values()) <= budget
        assert len(got) <= seats
        assert oldest.id in got or before[0] == -1
        for name in [n for n, one in alive.items() if len(one.output_ids) == goals[n]]:
            target.remove(alive.pop(name))
    assert not alive
    assert target.pages.used == (0, 0)
    assert (target.running, len(target.waiting)) == (0, 0)
