"""Where the time and the rows before a first token came from."""

from __future__ import annotations

import dataclasses
import threading
from functools import partial

import pytest

from deepinfer_compile.runtime import options
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.outputs import RequestMetrics
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import FULL, NARROW, WIDE, HashExecutor
from tests.runtime.sharing import GREEDY, PLENTY, engine, ids, run

PAGE_BYTES = PAGE_SIZE * 2 * 8
"""Of the hash model, in every group."""


def rows(found: RequestMetrics) -> tuple[int, int, int]:
    return found.ram_rows, found.disk_rows, found.recomputed_rows


def assert_sum(found: RequestMetrics) -> None:
    parts = (found.queued, found.index, found.transfer, found.recompute)
    assert sum(parts) == pytest.approx(found.first_token, abs=1e-12)
    assert min(parts) >= 0
    assert found.index > 0
    assert found.recompute > 0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WIDE), (NARROW,)])
@pytest.mark.parametrize("length", [1, 64, 65, 129, 300, 460])
def test_a_resumed_conversation_says_where_its_rows_were(groups, length, tmp_path):
    prompt, end = ids(length), ids(20, 1)
    first = engine(groups, prefix_cache_folder=tmp_path)
    (request,) = run(first, prompt)
    assert rows(request.metrics) == (0, 0, length)
    assert_sum(request.metrics)
    longer = [*prompt, *request.output_ids, *end]
    shared = (length + 4) // PAGE_SIZE * PAGE_SIZE  # the last answered token has no row
    pages = [min(shared // PAGE_SIZE, {0: 99, 7: 1, 130: 3}[group.window]) for group in groups]
    (cold,) = run(engine(groups, prefix_cache_folder=tmp_path), longer)
    assert rows(cold.metrics) == ((0, shared, len(longer) - shared) if shared else (0, 0, len(longer)))
    assert cold.metrics.disk_bytes == sum(pages) * PAGE_BYTES
    assert cold.metrics.ram_bytes == 0
    assert (cold.metrics.transfer > 0) == (shared > 0)
    (warm,) = run(first, longer)
    assert rows(warm.metrics) == (shared, 0, len(longer) - shared)
    assert warm.metrics.ram_bytes == sum(n * group.bytes_per_page for n, group in zip(pages, groups))
    assert (warm.metrics.disk_bytes, warm.metrics.transfer) == (0, 0.0)
    for one in (warm, cold):
        assert_sum(one.metrics)


def test_rows_of_both_tiers(tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(400))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    run(target, [*ids(400)[:130], 1])
    (request,) = run(target, ids(400))
    assert rows(request.metrics) == (128, 256, 16)
    assert (request.metrics.ram_bytes, request.metrics.disk_bytes) == (2 * FULL.bytes_per_page, 4 * PAGE_BYTES)
    assert_sum(request.metrics)


def test_the_time_that_a_disk_takes_is_transfer_and_a_wait_for_a_seat_is_none(tmp_path, monkeypatch):
    """Clocks are made: a read of a file takes 100 seconds, a step 10, and nothing else takes time."""
    now, lock = [0.0], threading.Lock()

    def later(seconds: float) -> None:
        with lock:
            now[0] += seconds

    class Timed(DiskPages):
        def read_span(self, *args):
            later(100.0)
            return super().read_span(*args)

    class Stepping(HashExecutor):
        def step(self, inputs):
            later(10.0)
            return super().step(inputs)

    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    monkeypatch.setattr(options, "DiskPages", partial(Timed))
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    target = engine((FULL,), kind=Stepping, prefix_cache_folder=tmp_path, max_num_seqs=1)
    one = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    running, stored = target.make("a", ids(30, 1), one), target.make("b", ids(200), one)
    target.add(running)
    target.step()
    target.add(stored)
    target.reap()
    assert target.flush(60)
    while target.alive:
        target.step()
    assert dataclasses.astuple(running.metrics)[:5] == (10, 0, 0, 0, 10)
    assert dataclasses.astuple(stored.metrics)[:5] == (130, 20, 0, 100, 10)
    assert rows(stored.metrics) == (0, 192, 8)


def test_a_request_that_was_preempted_tells_of_its_last_start():
    target = engine((FULL,), memory_bytes=9 * FULL.bytes_per_page, max_num_seqs=3, max_num_batched_tokens=70)
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [target.make(str(i), ids(250, i), long) for i in range(3)]
    for request in requests:
        target.add(request)
    run(target)
    assert target.scheduler.preemptions > 0
    for request in requests:
        assert_sum(request.metrics)
        assert sum(rows(request.metrics)) == 250


def test_the_offline_door_gives_metrics_and_without_the_cache_none():
    llm = LLM(HashExecutor((FULL,), hint=False), memory_bytes=PLENTY)
    scored = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    for params, shared in ((GREEDY, 0), (GREEDY, 192), (scored, 0)):
        (out,) = llm.generate([ids(200)], params)
        assert rows(out.metrics) == (shared, 0, 200 - shared)
    (piece, *_) = llm.stream([ids(200)], GREEDY)
    assert rows(piece.metrics) == (192, 0, 8)
    llm.cancel()
    off = LLM(HashExecutor((FULL,), hint=False), memory_bytes=PLENTY, enable_prefix_caching=False)
    request = off.engine.make("r", [1, 2], GREEDY)
    off.engine.add(request)
    assert request.timing is None
    assert off.generate([ids(200)], GREEDY)[0].metrics is None
