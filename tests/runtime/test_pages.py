"""Page tables against a plain model of which positions each request holds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.errors import BadOption, OutOfMemory
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup
from deepinfer_compile.runtime.pages import PagePool, Pages, available_bytes, caches_in_words, demand, plan_pages

FULL = CacheGroup("full", 0, 1000)
SEATS, LENGTH = 4, 640


def pages_of(*groups: CacheGroup, count: int = 100, backtrack: int = 0) -> Pages:
    return Pages(groups, (count,) * len(groups), seats=SEATS, max_model_len=LENGTH, backtrack=backtrack)


def grow(pages: Pages, seat: int, tokens: int) -> bool:
    return pages.try_grow(np.array([seat]), np.array([tokens]))


def trim(pages: Pages, seat: int, start: int) -> None:
    pages.trim(np.array([seat]), np.array([start]))


def test_a_pool_hands_out_each_page_once():
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted([*first, *second]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 pages asked for, 0 free"):
        pool.take(1)
    pool.give(first)
    assert sorted(pool.take(3)) == sorted(first)
    for wrong in ([0, 1, 2, 3, 4, 5], [-1]):
        with pytest.raises(ValueError, match="given back"):
            pool.give(np.array(wrong, dtype=np.int32))


@pytest.mark.parametrize(("tokens", "count"), [(1, 1), (63, 1), (64, 1), (65, 2), (640, 10)])
def test_growing_takes_whole_pages(tokens, count):
    pages = pages_of(FULL)
    assert grow(pages, 2, tokens)
    assert pages.used == (count,)
    assert (pages.groups[0].table[2, :count] >= 0).all()
    assert (pages.groups[0].table[2, count:] == -1).all()
    assert (pages.groups[0].table[[0, 1, 3]] == -1).all()
    assert grow(pages, 2, tokens)
    assert pages.used == (count,)


def test_growth_is_all_or_nothing():
    pages = Pages((FULL, CacheGroup("w", 8, 1)), (10, 3), seats=SEATS, max_model_len=LENGTH, backtrack=0)
    assert not pages.try_grow(np.array([0, 1]), np.array([128, 128]))
    assert pages.used == (0, 0)
    assert pages.try_grow(np.array([0, 1]), np.array([128, 64]))
    assert pages.used == (3, 3)
    assert not pages.promise(64, 64, [0, 0])
    pages.clear(0)
    assert pages.used == (1, 1)
    assert pages.promise(576, 128, promised := [0, 0])
    assert promised == [2, 2]
    assert not pages.promise(577, 128, [0, 0])
    assert not pages.promise(576, 128, [1, 0])
    assert not pages.promise(64, 129, [0, 0])
    assert not pages.promise(64, 64, promised)
    pages.reset()
    assert pages.used == (0, 0)


@pytest.mark.parametrize("backtrack", [0, 1, 70])
@pytest.mark.parametrize("window", [1, 2, 64, 65, 100])
def test_a_window_keeps_exactly_what_can_be_read(window, backtrack):
    pages = pages_of(CacheGroup("w", window, 1), backtrack=backtrack)
    grow(pages, 1, LENGTH)
    for start in range(LENGTH):
        trim(pages, 1, start)
        first = max(0, start - window + 1 - backtrack) // PAGE_SIZE
        held = np.flatnonzero(pages.groups[0].table[1] >= 0)
        assert held.tolist() == list(range(first, LENGTH // PAGE_SIZE))
    pages.clear(1)
    assert pages.used == (0,)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_page_is_lost_or_shared(data):
    groups = (FULL, CacheGroup("w", data.draw(st.integers(1, 150)), 1))
    pages = pages_of(*groups, count=data.draw(st.integers(10, 30)), backtrack=data.draw(st.integers(0, 9)))
    done = [0] * SEATS
    for _ in range(data.draw(st.integers(1, 25))):
        seat = data.draw(st.integers(0, SEATS - 1))
        if data.draw(st.booleans()):
            more = np.array([data.draw(st.integers(0, LENGTH - n)) for n in done])
            seats = np.arange(SEATS)[more > 0]
            pages.trim(seats, np.array(done)[seats])
            if pages.try_grow(seats, np.array(done)[seats] + more[seats]):
                done = [n + int(k) for n, k in zip(done, more)]
        else:
            pages.clear(seat)
            done[seat] = 0
        for group, table in zip(groups, pages.groups):
            held = table.table[table.table >= 0].tolist()
            free = table.pool.take(table.pool.free)
            assert sorted([*held, *free]) == list(range(table.pool.count))
            table.pool.give(free)
            if not group.window:
                assert len(held) == sum(-(-n // PAGE_SIZE) for n in done)
    for seat in range(SEATS):
        pages.clear(seat)
    assert pages.used == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_demand_is_enough_for_one_and_for_all(data):
    group = CacheGroup("g", data.draw(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200])), 1)
    backtrack, chunk = data.draw(st.integers(0, 70)), data.draw(st.integers(SEATS, 2 * LENGTH))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    need = demand(group, seats=SEATS, max_model_len=LENGTH, chunk=chunk, backtrack=backtrack)
    for seats, count in ((1, need.one), (SEATS, need.all)):
        pages = Pages((group,), (count,), seats=SEATS, max_model_len=LENGTH, backtrack=backtrack)
        done = np.zeros(seats, dtype=np.int64)
        everyone = np.arange(seats)
        while (done < LENGTH).any():
            cuts = np.sort(rng.integers(0, chunk - seats + 1, seats - 1))
            step = np.diff(cuts, prepend=0, append=chunk - seats) + 1
            assert step.sum() == chunk
            pages.trim(everyone, done)
            done += np.minimum(step, LENGTH - done)
            assert pages.try_grow(everyone, done)


BOTH = (FULL, CacheGroup("w", 65, 10))


def plan(memory, groups=BOTH):
    return plan_pages(groups, seats=4, max_model_len=640, chunk=64, backtrack=0, memory_bytes=memory)


def test_pages_follow_memory():
    everything = plan(10**9)
    assert everything == (40, 4 * (2 + 1) + 1)
    one = plan(10 * 1000 + 3 * 10)
    assert one == (10, 3)
    for memory in range(10_030, 41_000, 777):
        got = plan(memory)
        assert got[0] * 1000 + got[1] * 10 <= memory
        assert one <= got <= everything
    assert plan(25_000)[0] > 20
    assert plan(0, groups=()) == ()


def test_refused_with_the_arithmetic():
    with pytest.raises(OutOfMemory) as caught:
        plan(10_029)
    text = str(caught.value)
    assert "one request of 640 tokens" in text
    assert "10 pages of full x 1,000 + 3 pages of w x 10 = 10,030 bytes" in text
    assert "memory_bytes is 10,029" in text


def test_the_default_is_half_of_the_available_memory(tmp_path, monkeypatch):
    info = tmp_path / "meminfo"
    info.write_text("MemTotal:  999 kB\nMemAvailable:     40 kB\n")
    assert available_bytes(info) == 40 * 1024
    monkeypatch.setattr("deepinfer_compile.runtime.pages.available_bytes", lambda: available_bytes(info))
    assert plan(None) == plan(20 * 1024)
    info.write_text("MemAvailable: 4 kB\n")
    with pytest.raises(OutOfMemory, match="half of the available memory is 2,048"):
        plan(None)
    with pytest.raises(BadOption, match="memory_bytes"):
        available_bytes(tmp_path / "none")


def test_what_the_caches_take_is_said_with_its_arithmetic() -> None:
    groups = (CacheGroup("full", 0, 1_000), CacheGroup("window7", 7, 300))
    assert caches_in_words(groups, (4, 2), 9_000) == (
        "caches of 4 pages of full x 1,000 bytes + 2 pages of window7 x 300 bytes = 4,600 bytes, 9,000 bytes allowed"
    )
    assert caches_in_words(groups[:1], (1,), None).endswith("= 1,000 bytes, half of the available memory allowed")
    assert caches_in_words((), (), 5) == "no caches"
