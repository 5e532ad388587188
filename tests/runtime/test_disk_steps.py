"""Disks that are slow, full or broken: steps go on, and requests end as they would without."""

from __future__ import annotations

import gc
import threading
import warnings
from contextlib import contextmanager

import pytest

from deepinfer_compile.runtime import prefix_disk
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.disk_thread import SILENCE
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import FULL, WIDE, HashExecutor
from tests.runtime.sharing import GREEDY, PLENTY, assert_pages, assert_right, engine, ids, run

LONG = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def on_disk(target) -> int:
    return target.prefix_stats.disk_pages


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WIDE)])
def test_others_run_and_start_while_pages_come_from_disk(groups, slow, tmp_path):
    run(engine(groups, prefix_cache_folder=tmp_path), ids(200))
    target = engine(groups, prefix_cache_folder=tmp_path)
    slow[-1].reads.clear()
    running, other = target.make("a", ids(70, 1), LONG), target.make("c", ids(90, 2), LONG)
    stored = target.make("b", ids(200), LONG)
    target.add(running)
    target.step()
    target.add(stored)
    target.add(other)
    for _ in range(20):
        target.step()
        assert_pages(target)
    assert (len(running.output_ids), len(stored.output_ids), len(other.output_ids)) == (21, 0, 20)
    slow[-1].reads.set()
    assert target.flush(60)
    target.step()
    assert stored.cached == 192
    assert len(stored.output_ids) == 1
    run(target)
    for request in (running, stored, other):
        assert_right(request, target)


def test_a_step_with_nothing_else_to_do_waits(slow, tmp_path, monkeypatch):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    slow[-1].reads.clear()
    work, waits = target.scheduler.prefix.disk.work, []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        slow[-1].reads.set()
        assert target.flush(60)

    monkeypatch.setattr(work, "wait", wait)
    target.add(target.make("a", ids(200), GREEDY))
    target.step()
    target.step()
    assert (waits, target._executor.steps) == ([1.0], [(1, 8)])


def test_reading_begins_when_a_request_is_queued(slow, tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    target = engine((FULL,), prefix_cache_folder=tmp_path, max_num_seqs=1)
    running, stored = target.make("a", ids(70, 1), LONG), target.make("b", ids(200), GREEDY)
    for request in (running, stored):
        target.add(request)
    target.step()
    assert slow[-1].entered.wait(60)
    assert target.flush(60)
    assert stored.seat == -1
    run(target)
    assert stored.cached == 192
    assert_right(stored, target)


def test_a_long_queue_is_read_as_far_as_it_will_be_seated_next(slow, tmp_path):
    first = engine((FULL,), prefix_cache_folder=tmp_path)
    for seed in range(5):
        run(first, ids(70, seed))
    target = engine((FULL,), prefix_cache_folder=tmp_path, max_num_seqs=2)
    requests = [target.make(str(seed), ids(70, seed), GREEDY) for seed in range(5)]
    for request in requests:
        target.add(request)
    target.reap()
    tier = target.scheduler.prefix.disk
    assert list(tier._readings) == requests[:2]
    assert target.flush(60)
    target.step()
    assert list(tier._readings) == requests[2:4]
    run(target)
    assert [request.cached for request in requests] == [64] * 5
    assert target.prefix_stats.restored == 5


def test_a_failed_step_reads_again_what_was_read_for_requests_that_wait(slow, tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    target = engine((FULL,), prefix_cache_folder=tmp_path, memory_bytes=10 * FULL.bytes_per_page)
    long, stored = target.make("a", ids(300, 1), LONG), target.make("b", ids(200), GREEDY)
    for request in (long, stored):
        target.add(request)
    target.reap()
    assert target.flush(60)
    target.step()
    assert target.prefix_stats.restored == 3
    target._executor.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        target.step()
    target._executor.allocate(target._executor.pages)
    run(target)
    assert target.prefix_stats.restored == 6
    for request in (long, stored):
        assert_right(request, target)


def test_nothing_waits_for_writes_and_what_waits_is_there_already(slow, tmp_path):
    target = engine((FULL, WIDE), prefix_cache_folder=tmp_path, prefix_cache_ttl=10)
    now = [100.0]
    for group in target.scheduler.pages.groups:
        group.pool.clock = lambda: now[0]
    slow[-1].writes.clear()
    request = target.make("a", ids(200), GREEDY)
    target.add(request)
    while target.alive:
        target.step()
    assert not target.flush(0)
    assert on_disk(target) == 0
    second = target.make("b", ids(200), GREEDY)
    now[0] += 11
    target.scheduler.prefix._expire()
    target.add(second)
    while target.alive:
        target.step()
        slow[-1].writes.set()  # reads go first, but for the write that has begun
    assert second.cached == 192
    assert_right(second, target)
    assert target.flush(60)
    assert on_disk(target) == 3 + 3


@pytest.mark.parametrize("fit", [0, 1, 2])
def test_a_full_queue_drops_the_end_of_a_request_and_counts_it(fit, slow, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", 1)
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    target.scheduler.prefix.disk.work.most = fit * PAGE_SIZE * 2 * 8
    slow[-1].writes.clear()
    request = target.make("a", ids(300), GREEDY)
    target.add(request)
    while target.alive:
        target.step()
    assert target.prefix_stats.disk_dropped == 4 - fit
    slow[-1].writes.set()
    assert target.flush(60)
    assert on_disk(target) == fit
    again = engine((FULL,), prefix_cache_folder=tmp_path)
    assert run(again, ids(300))[0].cached == fit * PAGE_SIZE


@pytest.mark.parametrize("together", [1, 16])
def test_a_start_without_the_windows_of_its_end_is_not_kept(together, slow, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", together * 1024)
    target = engine((FULL, WIDE), prefix_cache_folder=tmp_path)
    target.scheduler.prefix.disk.work.most = 3 * PAGE_SIZE * 2 * 8
    slow[-1].writes.clear()
    request = target.make("a", ids(300), GREEDY)
    target.add(request)
    while target.alive:
        target.step()
    slow[-1].writes.set()
    assert target.flush(60)
    assert target.prefix_stats.disk_dropped == (2 if together == 1 else 4)
    assert on_disk(target) == 0


@pytest.mark.parametrize("evicted", [None, 0, 2, 3])
def test_what_a_request_leaves_is_copied_over_several_steps_while_others_run(evicted, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "COPIED", 1)
    monkeypatch.setattr(prefix_disk, "FILE", 1)
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    ended, running = target.make("a", ids(300), GREEDY), target.make("b", ids(30, 1), LONG)
    for request in (ended, running):
        target.add(request)
    while ended.finish_reason is None:
        target.step()
    assert on_disk(target) == 0
    if evicted is not None:
        cache = target.scheduler.prefix
        cache._forget_below(cache.walk(target.make("c", ids(300), GREEDY))[evicted])
    there = []
    for _ in range(5):
        target.step()
        assert target.flush(60)
        there.append(on_disk(target))
    left = 4 if evicted is None else evicted
    assert there == [min(i, left) for i in range(1, 6)]
    assert target.prefix_stats.disk_dropped == 4 - left
    run(target)
    assert on_disk(target) == left + 2
    again = engine((FULL,), prefix_cache_folder=tmp_path)
    assert run(again, ids(300))[0].cached == left * PAGE_SIZE


def test_the_last_request_that_waits_may_be_cancelled_and_all_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "COPIED", 1)
    monkeypatch.setattr(prefix_disk, "FILE", 1)
    target = engine((FULL,), prefix_cache_folder=tmp_path, max_num_seqs=1)
    ended, waiting = target.make("a", ids(300), GREEDY), target.make("b", ids(30, 1), LONG)
    for request in (ended, waiting):
        target.add(request)
    while ended.finish_reason is None:
        target.step()
    target.cancel("b")
    target.reap()
    assert target.flush(60)
    assert on_disk(target) == 4


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_disk_that_fails_is_left_with_one_warning_and_requests_go_on(way, slow, tmp_path, monkeypatch):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    target = engine((FULL,), prefix_cache_folder=tmp_path)

    def fail(*_, **__):
        raise OSError(5, "Input/output error")

    if way == "read":
        monkeypatch.setattr("os.preadv", fail)
    else:
        monkeypatch.setattr("pathlib.Path.open", fail)
    first, second = target.make("a", ids(200), GREEDY), target.make("b", ids(150, 1), GREEDY)
    target.add(first)
    target.add(second)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        while target.alive:
            target.step()
        target.flush(60)
        third = run(target, ids(200))[0]
    (warning,) = [str(one.message) for one in seen]
    assert "goes on without its folder" in warning
    assert "Input/output error" in warning
    assert first.cached == (0 if way == "read" else 192)
    assert target.prefix_stats.disk_failures == 1
    assert third.cached == 192
    for request in (first, second, third):
        assert_right(request, target)
    with no_warning():
        run(target, ids(170, 5))
        assert target.close(60)


def test_another_error_of_the_thread_comes_to_the_caller_once(slow, tmp_path):
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    slow[-1].error_to_raise = ZeroDivisionError("a mistake")
    run(target, ids(200))
    request = target.make("a", ids(200), GREEDY)
    target.add(request)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        target.step()
    run(target)
    assert_right(request, target)


def test_a_silent_disk_is_not_waited_for(slow, tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    slow[-1].reads.clear()
    request = target.make("a", ids(200), GREEDY)
    target.add(request)
    target.reap()
    assert slow[-1].entered.wait(60)
    work = target.scheduler.prefix.disk.work
    (reading,) = work._live
    work.check(reading.heard + SILENCE - 1)
    assert not work.off
    with pytest.warns(RuntimeWarning, match="does not answer"):
        work.check(reading.heard + SILENCE + 1)
    while target.alive:
        target.step()
    assert request.cached == 0
    assert_right(request, target)


def test_what_is_read_ahead_in_memory_is_bounded(slow, tmp_path, monkeypatch):
    first = engine((FULL,), prefix_cache_folder=tmp_path)
    for seed in range(3):
        run(first, ids(200, seed))
    monkeypatch.setattr(prefix_disk, "STAGED", 1)
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    slow[-1].reads.clear()
    requests = [target.make(str(seed), ids(200, seed), GREEDY) for seed in range(4)]
    for request in requests:
        target.add(request)
    for _ in range(3):
        target.step()
    tier = target.scheduler.prefix.disk
    assert list(tier._readings) == requests[:1]
    assert tier._hungry == set(requests[1:3])
    assert len(requests[3].output_ids) == 3
    slow[-1].reads.set()
    run(target)
    assert [request.cached for request in requests] == [192, 192, 192, 0]
    for request in requests:
        assert_right(request, target)


def test_the_thread_of_an_engine_that_is_gone_ends(tmp_path):
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    run(target, ids(200))
    thread = target.scheduler.prefix.disk.work._thread
    assert thread.is_alive()
    del target
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize("way", ["cancel", "arrive", "close"])
def test_a_note_ends_the_wait_for_a_disk(way, slow, tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(200))
    llm = LLM(HashExecutor((FULL,), hint=False), memory_bytes=PLENTY, prefix_cache_folder=tmp_path)
    slow[-1].reads.clear()
    found = []
    thread = threading.Thread(target=lambda: found.extend(llm.generate([ids(200)], GREEDY)))
    thread.start()
    assert slow[-1].entered.wait(60)
    if way == "cancel":
        llm.cancel()
    elif way == "arrive":
        assert llm.generate([ids(30, 1)], GREEDY)[0].finished
        assert not found
        slow[-1].reads.set()
    else:
        assert not llm.close(0.01)
    thread.join(60)
    assert found[0].outputs[0].finish_reason == ("abort" if way == "cancel" else "length")
    assert found[0].num_cached_tokens == {"cancel": None, "arrive": 192, "close": 0}[way]
