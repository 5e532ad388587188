"""What the thread of a folder does with pages that are removed, and how it ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from deepinfer_compile.runtime import disk_thread
from deepinfer_compile.runtime.disk_thread import PART, READERS, DiskThread
from deepinfer_compile.runtime.page_rows import in_one
from tests.runtime.conftest import Slow
from tests.runtime.folders import LATER, Folder, put

NAME = b"n" * 32
HELPER = "reads for the prefix cache"


def rows(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 4), float(number))}


def test_a_page_that_is_discarded_while_it_is_read_or_waits_is_not_there(tmp_path):
    disk = Slow(tmp_path, "m", 10**6)
    work = DiskThread(disk)
    disk.write(NAME, 0, rows(0))
    disk.reads.clear()
    disk.entered.clear()
    reading = work.read([(NAME, 0)], 0.0)
    assert work.has(NAME, 0)
    assert disk.entered.wait(60)
    work.remove(NAME)
    assert not work.has(NAME, 0)
    late = work.read([(NAME, 0)], 0.0)
    put(work, NAME, 0, rows(1))  # computed anew
    assert work.has(NAME, 0)
    disk.reads.set()
    assert work.flush(60)
    assert reading.done
    assert reading.rows == {}
    assert late.done
    assert torch.equal(disk.read(NAME, 0)["a"], rows(1)["a"])
    disk.writes.clear()
    put(work, NAME, 1, rows(2))
    work.remove(NAME)
    disk.writes.set()
    assert work.flush(60)
    assert not disk.has(NAME, 1)
    assert work.queued == 0
    assert work.close(60)


def test_close_keeps_to_its_limit_and_may_come_again(tmp_path):
    disk = Slow(tmp_path, "m", 10**6)
    work = DiskThread(disk)
    disk.writes.clear()
    for i in range(3):
        put(work, NAME, i, rows(i))
    assert disk.entered.wait(60)
    assert not work.close(0.01)
    assert work.dropped == 3
    disk.writes.set()
    assert work.close(60)
    assert work.dropped == 3
    work._thread.join(60)
    put(work, NAME, 5, rows(5))
    assert not work.has(NAME, 0)
    assert (len(disk), work.queued) == (1, 0)
    assert DiskThread(disk).close(0)


class Noted(Slow):
    """seen: what is done, with how many pages; the first touch goes on when it may read."""

    seen: list[tuple[str, int]]

    def touch(self, digests, until):
        self.seen.append(("touch", len(digests)))
        self.entered.set()
        assert self.reads.wait(60)
        super().touch(digests, until)

    def read_span(self, *args):
        self.seen.append(("read", 1))
        return super().read_span(*args)

    def date(self, most=None):
        self.seen.append(("date", min(len(self.undated), most or 10**9)))
        super().date(most)


@pytest.mark.parametrize("late", [False, True])
def test_a_loop_over_many_pages_lets_a_reading_go_first_and_others_run(late, tmp_path, monkeypatch):
    disk = Noted(tmp_path, "m", 10**8)
    names = [i.to_bytes(32, "little") for i in range(3 * PART)]
    for one in names:
        disk.write(one, 0, {"a": torch.ones(1)})
    work, disk.seen = DiskThread(disk), []
    monkeypatch.setattr(disk_thread, "LATE", -1.0 if late else 1e9)
    disk.reads.clear()
    disk.entered.clear()
    work.touch((one for one in names), LATER)
    assert disk.entered.wait(60)
    reading = work.read([(names[-1], 0)], 0.0)
    disk.reads.set()
    assert work.flush(60)
    assert reading.done
    done = [each for each in disk.seen if each[1] and each[0] != "date"]
    assert done == [("touch", PART), ("read", 1), ("touch", 1), *[("touch", PART)] * 2]
    dates = [count for way, count in disk.seen if way == "date" and count]
    assert sum(dates) >= 3 * PART
    assert (dates[0] <= PART) == late
    assert not disk.undated
    work.close(60)


class Together(Folder):
    """Reads return when so many threads are in them."""

    def read_span(self, *args):
        self.meeting.wait(60)
        self.names.add(threading.current_thread().name)
        return super().read_span(*args)


def many(folder, kind, count: int):
    """A thread over a folder of `count` pages, and those pages."""
    disk = kind(folder, "m", 10**8)
    names = [i.to_bytes(32, "little") for i in range(count)]
    for i, one in enumerate(names):
        disk.write(one, 0, rows(i))
    return DiskThread(disk), [(one, 0) for one in names]


def ended(work: DiskThread, reading) -> None:
    assert work.flush(60)
    assert reading.done
    assert HELPER not in [one.name for one in threading.enumerate()]


def test_several_threads_read_many_pages(tmp_path):
    work, pages = many(tmp_path, Together, READERS * 3)
    work._disk.meeting, work._disk.names = threading.Barrier(READERS), set()
    reading = work.read(pages, 0.0)
    ended(work, reading)
    assert sorted(reading.rows) == sorted(pages)
    assert HELPER in work._disk.names
    for i, page in enumerate(pages):
        assert torch.equal(reading.rows[page]["a"], rows(i)["a"])
    contents = [reading.rows[page].content for page in pages]
    assert in_one(contents).data_ptr() == contents[0].data_ptr()
    assert torch.equal(in_one(contents), torch.stack(contents))
    work._disk.meeting = threading.Barrier(1)
    work._disk.names.clear()
    one = work.read(pages[:1], 0.0)
    ended(work, one)
    assert list(one.rows) == pages[:1]
    assert HELPER not in work._disk.names
    assert work.close(60)


class Faulty(Folder):
    def read_span(self, span, *args):
        if self.wrong & set(span.digests):
            raise ZeroDivisionError("a mistake")
        return super().read_span(span, *args)


@pytest.mark.parametrize("wrong", [[0], [40], range(64)])
def test_a_mistake_in_any_of_the_threads_is_raised_once(wrong, tmp_path):
    work, pages = many(tmp_path, Faulty, 64)
    work._disk.wrong = {pages[i][0] for i in wrong}
    reading = work.read(pages, 0.0)
    ended(work, reading)
    assert not {pages[i] for i in wrong} & set(reading.rows)
    with pytest.raises(ZeroDivisionError, match="a mistake"):
        work.check()
    work.check()
    assert work.off
    assert work.close(60)


def test_a_reading_that_is_dropped_ends_in_all_threads(tmp_path):
    work, pages = many(tmp_path, Slow, 64)
    work._disk.reads.clear()
    work._disk.entered.clear()
    reading = work.read(pages, 0.0)
    assert work._disk.entered.wait(60)
    work.drop(reading)
    work._disk.reads.set()
    ended(work, reading)
    assert len(reading.rows) <= READERS
    assert work.close(60)


EXIT = """
import sys, threading
from pathlib import Path
import torch
from deepinfer_compile.runtime import disk_thread
from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.page_rows import PageRows

class Stuck(DiskPages):
    def write_run(self, *args):
        started.set()
        if sys.argv[2] == "stuck":
            threading.Event().wait()
        super().write_run(*args)

started = threading.Event()
disk_thread.EXIT_SECONDS = 0.2 if sys.argv[2] == "stuck" else 60
work = disk_thread.DiskThread(Stuck(Path(sys.argv[1]), "m", 10**7))
for i in range(20):
    held = PageRows.of({"a": torch.full((64, 4), float(i))})
    work.write([b"n" * 32], i, held.form, held.content[None], b"", 1e11)
assert started.wait(60)
print("end")
"""


@pytest.mark.parametrize(("way", "count"), [("fine", 20), ("stuck", 0)])
def test_the_interpreter_writes_what_waits_and_does_not_hang(way, count, tmp_path):
    command = [sys.executable, "-c", EXIT, str(tmp_path), way]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
    assert len(Folder(tmp_path, "m", 10**7)) == count
