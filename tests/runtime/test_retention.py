"""How long pages stay on disk, by the classes of the requests that use them, and which go first for their place."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.errors import BadOption, BadRequest
from deepinfer_compile.runtime import options, prefix_disk
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.disk_files import name_of
from deepinfer_compile.runtime.disk_index import DiskIndex, PageFile
from deepinfer_compile.runtime.engine import Engine
from deepinfer_compile.runtime.options import DAY, EngineOptions
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request
from tests.runtime.fakes import FULL, NARROW, WIDE
from tests.runtime.folders import Folder, files, pages
from tests.runtime.sharing import assert_right, engine, ids, run

START = 1.7e9
FILE = 400
"""More than a small page's file takes, and less than two."""


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time that folders of engines go by."""
    time = [START]
    monkeypatch.setattr(options, "DiskPages", partial(Folder, clock=lambda: time[0]))
    return time


def ask(folder: Path, prompt: list[int], retention: str = "chat", groups=(FULL,), **sizes) -> tuple[Request, Engine]:
    """A request in a process of its own."""
    target = engine(groups, prefix_cache_folder=folder, **sizes)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, retention=retention)
    (request,) = run(target, prompt, params=params)
    assert_right(request, target)
    assert target.close(60)
    return request, target


@pytest.mark.parametrize(("retention", "days"), [("chat", 7), ("agent", 3)])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WIDE), (NARROW,)])
def test_a_class_is_kept_for_its_days_after_the_last_use(retention, days, groups, now, tmp_path):
    cached = []
    for wait in (0, days * DAY - 1, days * DAY - 1, days * DAY, 1):
        now[0] += wait
        cached.append(ask(tmp_path, ids(200), retention, groups)[0].cached)
    assert cached == [0, 192, 192, 0, 192]


def test_what_two_classes_share_is_kept_for_the_longer_one(now, tmp_path):
    shared = ids(128)
    for seed, retention in ((1, "chat"), (2, "agent")):
        ask(tmp_path, [*shared, *ids(80, seed)], retention)
    assert len(pages(tmp_path)) == 4
    now[0] += 3 * DAY
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    assert len(pages(tmp_path)) == 3
    assert target.prefix_stats.disk_expired == 1
    assert ask(tmp_path, [*shared, *ids(80, 2)], "agent")[0].cached == 128
    now[0] += 4 * DAY - 1  # the agent's last use was for three days, the chat's ends in a second
    assert ask(tmp_path, [*shared, *ids(80, 1)], "agent")[0].cached == 192
    now[0] += 3 * DAY - 1
    assert ask(tmp_path, [*shared, *ids(80, 1)], "agent")[0].cached == 192


def test_the_last_use_of_a_shorter_class_may_be_the_one_that_counts(now, tmp_path):
    ask(tmp_path, ids(200))
    now[0] += 6 * DAY
    ask(tmp_path, ids(200), "agent")
    now[0] += 3 * DAY - 1
    assert engine((FULL,), prefix_cache_folder=tmp_path).prefix_stats.disk_pages == 3
    now[0] += 1
    assert engine((FULL,), prefix_cache_folder=tmp_path).prefix_stats.disk_pages == 0


def test_a_hit_in_memory_is_a_use_too(now, tmp_path):
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    run(target, ids(200))
    now[0] += 6 * DAY
    assert run(target, ids(200))[0].metrics.disk_rows == 0
    now[0] += 7 * DAY - 1
    assert ask(tmp_path, ids(200))[0].cached == 192


def test_a_new_end_of_a_shorter_class_takes_no_time_from_what_it_hangs_on(now, tmp_path):
    """The end at 256 adds files of WIDE to pages of a longer chat."""
    ask(tmp_path, ids(400), "chat", (FULL, WIDE))
    before = len(pages(tmp_path))
    ask(tmp_path, ids(270), "agent", (FULL, WIDE))
    assert len(pages(tmp_path)) > before
    now[0] += 7 * DAY - 1
    assert ask(tmp_path, ids(400), "chat", (FULL, WIDE))[0].cached == 384


def test_pages_expire_in_a_process_that_runs_on(now, tmp_path):
    target = engine((FULL,), prefix_cache_folder=tmp_path, prefix_cache_ttl=0)
    run(target, ids(200))
    now[0] += 7 * DAY
    disk = target.scheduler.prefix.disk
    assert not disk.work.has(target.scheduler.prefix.root.digest, 0)
    assert disk.work._pause() == 3600
    assert files(tmp_path) == []
    assert run(target, ids(200))[0].output_ids


def test_classes_are_set_where_the_bundle_is_loaded(now, tmp_path):
    sizes = {"prefix_cache_retention": {"batch": 60.0, "agent": 0}}
    assert EngineOptions(**sizes).retention == {"chat": 7 * DAY, "agent": 0, "batch": 60.0}
    ask(tmp_path, ids(200), "agent", **sizes)
    assert files(tmp_path) == []
    ask(tmp_path, ids(200), "batch", **sizes)
    now[0] += 59
    assert ask(tmp_path, ids(200), "agent", **sizes)[0].cached == 192
    now[0] += 1
    assert ask(tmp_path, ids(200), "batch", **sizes)[0].cached == 0
    with pytest.raises(BadRequest, match="class 'night' is not known"):
        engine().make("r", [1], SamplingParams(retention="night"))
    with pytest.raises(BadOption, match="retention"):
        SamplingParams(retention=3)
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(BadOption, match="prefix_cache_retention"):
            EngineOptions(prefix_cache_retention={"chat": wrong})


@pytest.mark.parametrize(("claim", "wait", "cached"), [(90 * DAY, 7 * DAY, 0), (90 * DAY, DAY, 192), (0, 0, 0)])
def test_no_file_is_believed_beyond_the_longest_class(claim, wait, cached, now, tmp_path):
    ask(tmp_path, ids(200))
    for file in files(tmp_path):
        os.utime(file, (now[0], now[0] + claim))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    now[0] += wait
    assert run(target, ids(200))[0].cached == cached


@pytest.mark.parametrize("together", [1, 2, 16])
def test_pages_that_nothing_leads_to_are_deleted_when_a_folder_is_opened(together, now, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", together * 1024)
    ask(tmp_path, ids(400))
    before = pages(tmp_path)
    chain = [name for (name, _), held in before.items() if not held.parent]
    while len(chain) < len(before):
        chain += [name for (name, _), held in before.items() if held.parent == chain[-1]]
    lost = before[chain[3], 0].path
    kept = {name for name in chain[:3] if before[name, 0].path != lost}
    lost.unlink()
    home = f"{lost.parent.name}/"
    a, b, c, d, e = (home + letter * 16 for letter in "abcde")
    # two that lead to each other, one to itself, and one with a page twice
    for shown, above in (([a], b), ([b], a), ([e], e), ([d, c, d], "")):
        file = tmp_path / name_of(home[:-1], 0, 64, 64, above, shown)
        file.write_bytes(bytes(64 + 64 * len(shown)))
        os.utime(file, (now[0], now[0] + 1))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    assert {name for name, _ in pages(tmp_path)} == {*kept, "d" * 16, "c" * 16}
    assert target.prefix_stats.disk_bytes == sum(file.stat().st_size for file in files(tmp_path))
    assert run(target, ids(400))[0].cached == len(kept) * PAGE_SIZE


def test_a_damaged_page_takes_what_hangs_on_it(now, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", 1)
    ask(tmp_path, ids(400))
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    (first,) = (held.path for held in pages(tmp_path).values() if not held.parent)
    first.write_bytes(b"")
    request = target.make("r", ids(400), SamplingParams())
    target.add(request)
    target.step()
    assert target.flush(60)
    assert files(tmp_path) == []
    assert target.prefix_stats.disk_bytes == 0


def small(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 1), float(number))}


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_expired_pages_go_before_the_longest_unused(tmp_path):
    time = [START]
    disk = Folder(tmp_path, "m", 3 * FILE, clock=lambda: time[0])
    disk.write(name(1), 0, small(1), b"", START + 100)
    disk.write(name(2), 0, small(2), b"", START + 10)
    disk.write(name(3), 0, small(3), b"", START + 100)
    time[0] += 10
    disk.write(name(4), 0, small(4), b"", START + 100)
    assert [disk.has(name(i), 0) for i in range(1, 5)] == [True, False, True, True]
    disk.write(name(5), 0, small(5), b"", START + 100)
    assert [disk.has(name(i), 0) for i in range(1, 6)] == [False, False, True, True, True]
    assert (disk.expired, disk.evictions) == (1, 1)


def test_ends_go_before_what_they_hang_on_and_no_page_for_its_own_end(tmp_path):
    disk = Folder(tmp_path, "m", 4 * FILE, clock=lambda: START)
    for i in (1, 2, 3):
        disk.write(name(i), 0, small(i), name(i - 1) if i > 1 else b"")
    disk.touch([name(3)], 0)  # later than those above it, which another process may not have read
    disk.date()
    disk.write(name(7), 0, small(7))
    disk.write(name(8), 0, small(8))
    assert [disk.has(name(i), 0) for i in (1, 2, 3, 7, 8)] == [True, True, False, True, True]
    disk.touch([name(2), name(1)], 0)
    disk.date()
    for i in (3, 4, 5):
        disk.write(name(i), 0, small(i), name(i - 1))
    assert [disk.has(name(i), 0) for i in (1, 2, 3, 4, 5, 7, 8)] == [True] * 4 + [False] * 3
    assert not disk.failures


@pytest.mark.parametrize("room", range(1, 12))
def test_with_windows_whole_ends_go(room, now, tmp_path, monkeypatch):
    """Of 330 tokens and 60 more pages 0 to 5 are on disk, and of WIDE those before 320 and 384: 2, 3, 4, 5."""
    monkeypatch.setattr(prefix_disk, "FILE", 1)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    run(engine((FULL, WIDE), prefix_cache_folder=tmp_path), ids(330), params=long)
    size = max(file.stat().st_size for file in files(tmp_path))
    assert len(files(tmp_path)) == len(pages(tmp_path)) == 6 + 4
    target = engine((FULL, WIDE), prefix_cache_folder=tmp_path, prefix_cache_bytes=room * size + 10)
    kept = {10: 10, 11: 10}.get(room, 8 if room >= 8 else 0)
    assert len(pages(tmp_path)) == kept
    assert target.prefix_stats.disk_bytes == sum(file.stat().st_size for file in files(tmp_path))
    (request,) = run(target, ids(330))
    assert request.cached == (320 if kept else 0)


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "touch", "remove", "damage", "wait", "reopen"]), st.integers(1, 15)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, capacity=st.integers(0, 6))
def test_no_page_is_left_that_nobody_finds_and_the_bound_holds(steps, capacity):
    """Node i hangs on node i // 2."""
    with tempfile.TemporaryDirectory() as folder:
        time, root = [START], Path(folder)

        def opened() -> Folder:
            return Folder(root, "m", capacity * FILE, longest=50, clock=lambda: time[0])

        disk = opened()
        for what, i in steps:
            time[0] += 1
            held_there = pages(root).get((name(i)[:8].hex(), 0)) if what in ("read", "damage") else None
            path = held_there.path if held_there else None
            if what == "write":
                disk.write(name(i), 0, small(i), name(i // 2) if i > 1 else b"", time[0] + 3 * i)
            elif what == "read":
                held, there = disk.read(name(i), 0), path is not None and path.stat().st_size > 0
                disk.touch([name(i)] if held is not None else [], time[0] + 20)
                disk.date()
                assert (held is not None) == there
                assert held is None or torch.equal(held["a"], small(i)["a"])
            elif what == "touch":
                disk.touch([name(i)], time[0] + 20)
                disk.date()
            elif what == "remove":
                disk.remove(name(i))
            elif what == "damage" and path is not None:
                path.write_bytes(b"")
                disk.read(name(i), 0)
            elif what == "wait":
                time[0] += i
                disk.expire()
            elif what == "reopen":
                disk = opened()
            check(disk, root, capacity * FILE)


def check(disk: Folder, root: Path, capacity: int) -> None:
    there = {int(name[:2], 16) for name, _ in pages(root)}
    assert disk.size == sum(file.stat().st_size for file in files(root)) <= capacity
    assert len(disk) == len(there)
    assert all(number == 1 or number // 2 in there for number in there)
    assert not disk.failures


def test_an_index_finds_the_expired_however_often_they_were_kept_longer():
    index = DiskIndex()
    for i, until in enumerate((5.0, 1.0, 3.0)):
        index.add(PageFile(str(i), 0, "", 2, 8, [str(i)]), until)
    assert (index.pages, index.size) == (3, 30)
    index.touch("1", 9.0)
    index.touch("2", 2.0)
    assert index.expired(2.9) == ""
    assert index.expired(3.0) == "2"
    assert index.remove("2")
    assert index.expired(8.9) == "0"
    index.remove("0")
    assert index.deadline() == 9.0
    assert index.expired(8.9) == ""
    assert index.expired(9.0) == "1"
    assert [len(index.remove("1")), index.pages, index.size] == [1, 0, 0]
