"""Files that hold several pages: what is in them, how they are cut and become two, and what others see of it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime import disk_files
from deepinfer_compile.runtime.disk import APART
from deepinfer_compile.runtime.disk_files import MOST, form_of, line_of, name_of, read_name
from deepinfer_compile.runtime.page_rows import Form, PageRows
from tests.runtime.folders import Folder, files, page, pages

START = 1.7e9
FORM = Form.of({"a": (torch.float32, (64, 1)), "b": (torch.uint8, (3,))})


def name(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


def content(numbers: range) -> torch.Tensor:
    """Pages whose bytes are their numbers."""
    return torch.tensor(numbers, dtype=torch.uint8)[:, None].expand(-1, FORM.size).contiguous()


def write(disk: Folder, numbers: range, until: float | None = None, parent: int = 0, group: int = 0) -> None:
    """A run of pages that hang on page `parent`, 0 for none."""
    above = name(parent) if parent else b""
    disk.write_run([name(i) for i in numbers], group, FORM, content(numbers), above, until)


def is_page(rows: PageRows | None, number: int) -> bool:
    return rows is not None and bool((rows.content == number).all()) and rows.form == FORM


@pytest.fixture
def disk(tmp_path) -> Folder:
    return Folder(tmp_path, "m", 10**6, spans=(None, 3), clock=lambda: START)


def test_any_part_of_a_run_is_read(disk, tmp_path):
    write(disk, range(1, MOST + 1))
    assert len(files(tmp_path)) == 1
    for first in range(1, MOST + 1):
        for last in range(first, MOST + 1):
            (span,) = disk.plan([(name(i), 0) for i in range(first, last + 1)])
            into = torch.full((last - first + 1, FORM.size), 99, dtype=torch.uint8)
            found = disk.read_span(span, into)
            assert [is_page(one, first + i) for i, one in enumerate(found)] == [True] * len(into)
            assert found[0].content.data_ptr() == into.data_ptr()
    assert disk.damaged == 0


def test_what_is_asked_for_in_another_order_is_read_in_parts(disk):
    write(disk, range(1, 5))
    write(disk, range(5, 8), parent=4)
    asked = [(name(i), 0) for i in (1, 2, 4, 3, 5, 6, 9)]
    assert [[int(one[1]) for one in span.digests] for span in disk.plan(asked)] == [[1, 2], [4], [3], [5, 6]]


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("ask", [range(1, 9), range(3, 6), range(5, 9)])
def test_damage_is_found_in_the_page_that_has_it_and_only_those_behind_go(at, ask, disk, tmp_path):
    write(disk, range(1, 9))
    held = page(tmp_path, name(at))
    spoiled = bytearray(held.path.read_bytes())
    spoiled[held.start + 7] ^= 1
    held.path.write_bytes(spoiled)
    (span,) = disk.plan([(name(i), 0) for i in ask])
    found = disk.read_span(span, torch.empty((len(ask), FORM.size), dtype=torch.uint8))
    # a page's checksum covers those before it
    whole = [i for i in ask if i < at]
    assert [is_page(one, i) for one, i in zip(found, whole, strict=True)] == [True] * len(whole)
    hit = [i for i in ask if i >= at]
    assert disk.damaged == bool(hit)
    assert len(disk) == len(pages(tmp_path)) == (hit[0] - 1 if hit else 8)
    assert disk.size == sum(file.stat().st_size for file in files(tmp_path))


def test_a_run_is_cut_where_its_pages_go_and_keeps_its_times(disk, tmp_path):
    write(disk, range(1, 9), START + 50)
    (path,) = files(tmp_path)
    full = path.stat().st_size
    disk.remove(name(6))
    assert (path.stat().st_size, path.stat().st_mtime) == (full - 3 * FORM.size, START + 50)
    assert [disk.has(name(i), 0) for i in range(1, 9)] == [True] * 5 + [False] * 3
    assert disk.size == path.stat().st_size
    again = Folder(tmp_path, "m", 10**6, clock=lambda: START)
    assert len(again) == 5
    assert is_page(again.read(name(5), 0), 5)
    write(again, range(6, 9), parent=5)
    assert len(files(tmp_path)) == 2
    assert is_page(again.read(name(8), 0), 8)
    disk.remove(name(1))
    assert not path.exists()
    assert disk.failures == 0


def test_what_another_process_cut_is_not_made_longer(tmp_path):
    one = Folder(tmp_path, "m", 10**6)
    write(one, range(1, 9))
    other = Folder(tmp_path, "m", 10**6)
    (path,) = files(tmp_path)
    one.remove(name(3))
    short = path.stat().st_size
    other.remove(name(7))
    assert path.stat().st_size == short
    assert other.read(name(5), 0) is None
    assert path.stat().st_size == short
    assert [other.has(name(i), 0) for i in range(1, 7)] == [True] * 4 + [False] * 2
    assert is_page(other.read(name(2), 0), 2)


def test_a_page_that_is_written_again_takes_those_behind_it_from_its_file(disk, tmp_path):
    write(disk, range(1, 9))
    write(disk, range(4, 6), parent=3)
    assert [disk.has(name(i), 0) for i in range(1, 9)] == [True] * 5 + [False] * 3
    assert len(files(tmp_path)) == 2
    assert disk.size == sum(file.stat().st_size for file in files(tmp_path))
    assert is_page(disk.read(name(5), 0), 5)


@pytest.mark.parametrize("cut", [1, 4, 7])
def test_pages_that_are_kept_for_a_shorter_time_get_a_file_of_their_own(cut, tmp_path):
    """As when others go on with the first pages of a long request."""
    now = [START]
    disk = Folder(tmp_path, "m", 10**6, longest=10 * APART, clock=lambda: now[0])
    write(disk, range(1, 9), START + 2 * APART)
    disk.touch([name(i) for i in range(1, cut + 1)], START + 2.5 * APART)
    disk.date()
    assert len(files(tmp_path)) == 1
    disk.touch([name(i) for i in range(1, cut + 1)], START + 5 * APART)
    disk.date()
    assert len(files(tmp_path)) == 2
    assert disk.size == sum(file.stat().st_size for file in files(tmp_path))
    assert [is_page(disk.read(name(i), 0), i) for i in range(1, 9)] == [True] * 8
    again = Folder(tmp_path, "m", 10**6, longest=10 * APART, clock=lambda: now[0])
    assert [is_page(again.read(name(i), 0), i) for i in range(1, 9)] == [True] * 8
    now[0] += 3 * APART
    again.expire()
    assert [again.has(name(i), 0) for i in range(1, 9)] == [i <= cut for i in range(1, 9)]
    assert len(files(tmp_path)) == 1
    disk.date()
    assert disk.failures == again.failures == 0


def test_a_damaged_run_does_not_become_two(disk, tmp_path):
    write(disk, range(1, 9), START + APART)
    (path,) = files(tmp_path)
    spoiled = bytearray(path.read_bytes())
    spoiled[spoiled.index(b"\n") + 1 + 64 * 5] ^= 1  # the sixth page's digest
    path.write_bytes(spoiled)
    disk.touch([name(i) for i in range(1, 4)], START + 5 * APART)
    disk.date()
    assert files(tmp_path) == [path]
    assert disk.read(name(6), 0) is None
    assert disk.damaged == 1


def test_runs_of_two_processes_that_overlap(tmp_path):
    """The longer one is taken; what hangs on the other's end is still found."""
    one, two = Folder(tmp_path, "m", 10**6), Folder(tmp_path, "m", 10**6)
    write(one, range(1, 9))
    write(two, range(1, 5))
    write(two, range(5, 15), parent=4)
    assert len(files(tmp_path)) == 3
    again = Folder(tmp_path, "m", 10**6)
    assert len(files(tmp_path)) == 2
    assert again.size == sum(file.stat().st_size for file in files(tmp_path))
    found = [is_page(again.read(name(i), 0), i) for i in range(1, 15)]
    assert found == [True] * 14
    assert (again.damaged, again.failures) == (0, 0)


def test_windows_hang_on_whole_contexts(disk, tmp_path):
    write(disk, range(1, 9))
    write(disk, range(6, 9), parent=5, group=1)
    again = Folder(tmp_path, "m", 10**6, spans=(None, 3), clock=lambda: START)
    assert (len(again), len(files(tmp_path))) == (11, 2)
    again.discard(name(7), 1)
    assert [again.has(name(i), 1) for i in range(6, 9)] == [True, False, False]
    assert again.has(name(8), 0)
    again.trim(name(8))  # nobody can start behind a page without its windows
    assert len(again) == 0
    assert files(tmp_path) == []


@pytest.mark.parametrize("size", [0, 5, -1, 1, 77])
def test_a_file_of_another_size_is_cut_to_whole_pages(size, disk, tmp_path):
    write(disk, range(1, 4))
    (path,) = files(tmp_path)
    full = path.read_bytes()
    path.write_bytes(full[:size] if size <= 0 or size == 5 else full + bytes(size))
    again = Folder(tmp_path, "m", 10**6, spans=(None,), clock=lambda: START)
    assert len(again) == len(pages(tmp_path)) == {0: 0, 5: 0, -1: 2, 1: 3, 77: 3}[size]
    assert again.size == sum(file.stat().st_size for file in files(tmp_path))


KEYS = st.binary(min_size=8, max_size=8).map(lambda key: f"{'a' * 32}/{key.hex()}")


@given(
    shown=st.lists(KEYS, min_size=1, max_size=MOST),
    parent=KEYS | st.just(""),
    group=st.integers(0, 9999),
    head=st.integers(1, 2**24 - 1),
    stride=st.integers(1, 2**40 - 1),
)
def test_a_name_says_what_a_file_holds(shown, parent, group, head, stride):
    given_name = name_of("a" * 32, group, head, stride, parent, shown)
    assert len(given_name.partition("/")[2]) <= 255
    file = read_name(given_name)
    assert file is not None
    assert (file.name, file.group, file.head, file.stride) == (given_name, group, head, stride)
    assert (file.parent, file.pages) == (parent, shown)


@pytest.mark.parametrize(
    "wrong",
    [
        "bm5ubm5ubm4.0.80.40.../x.pages",
        "bm5ubm5ubm4.0.80.0...pages",
        "bm5ubm5ubm4.0.0.40...pages",
        "bm5ubm5ubm5.0.80.40...pages",  # bits to spare
        "bm5ubm5ubm4.0.080.40...pages",
        "bm5ubm5ubm4.0.80.40.." + "bm5ubm5ubm4" * MOST + ".pages",
        "../bm5ubm5ubm4.0.80.40...pages",
        "b" * 32 + ".pages.tmp",
    ],
)
def test_other_names_are_no_files_of_pages(wrong):
    assert read_name(f"{'a' * 32}/{wrong}") is None
    assert read_name(f"{'A' * 32}/bm5ubm5ubm4.0.80.40...pages") is None
    assert read_name(f"{'a' * 32}/bm5ubm5ubm4.0.80.40...pages") is not None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}\n",
        b"[1]\n",
        b'{"version": 2, "tensors": {}}\n',
        b'{"version": 1, "tensors": {"a": ["float32", [64, -1]]}}\n',
        b'{"version": 1, "tensors": {"a": ["float32", [64.0]]}}\n',
        b'{"version": 1, "tensors": {"a": ["float32", [true]]}}\n',
        b'{"version": 1, "tensors": {"a": ["nothing", [64]]}}\n',
        b'{"version": 1, "tensors": {"a": ["float32"]}}\n',
        b'{"version": 1, "tensors": {"a": ["float32", [65]]}}\n',
        b"[" * 5000 + b"\n",
        b"\xff\n",
    ],
)
def test_a_first_line_is_not_believed(line):
    assert form_of(line, 256) is None
    assert form_of(line_of(FORM), FORM.size) == FORM
    assert form_of(line_of(FORM), FORM.size + 64) is None


def test_a_read_that_gives_less_than_all_goes_on(disk, monkeypatch):
    write(disk, range(1, 9))
    whole = os.preadv
    calls = []

    def some(handle, buffers, at):
        calls.append(at)
        if len(buffers) == 1:
            return whole(handle, [buffers[0][:100]], at)
        return whole(handle, [buffers[0], *[memoryview(one)[:50] for one in buffers[1:] if len(one)]], at)

    monkeypatch.setattr(os, "preadv", some)
    (span,) = disk.plan([(name(i), 0) for i in range(1, 9)])
    found = disk.read_span(span, torch.empty((8, FORM.size), dtype=torch.uint8))
    assert [is_page(one, i + 1) for i, one in enumerate(found)] == [True] * 8
    assert len(calls) > 8


STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "read", "touch", "remove", "damage", "wait", "reopen"]), st.integers(1, 30)),
    max_size=30,
)
WAYS = {1: (range(1, 6), 0), 2: (range(6, 12), 5), 3: (range(12, 15), 3), 4: (range(20, 30), 8), 5: (range(15, 18), 14)}
"""Runs, each of which hangs on a page of another one, by the number of a step."""


@settings(max_examples=80, deadline=None)
@given(steps=STEPS, capacity=st.sampled_from([0, 1500, 4000, 10**6]))
def test_whatever_happens_to_runs_what_is_known_is_what_is_there(steps, capacity):
    above = {i: first if i == run.start else i - 1 for run, first in WAYS.values() for i in run}
    with tempfile.TemporaryDirectory() as folder:
        time, root = [START], Path(folder)

        def opened() -> Folder:
            return Folder(root, "m", capacity, longest=20 * APART, spans=(None,), clock=lambda: time[0])

        disk = opened()
        for what, i in steps:
            time[0] += 1
            run, parent = WAYS[i % 5 + 1]
            if what == "write" and not disk.has(name(run.start), 0):
                write(disk, run, time[0] + i * APART / 3, parent)
            elif what == "read":
                known = disk.has(name(i), 0)
                assert is_page(disk.read(name(i), 0), i) == known
            elif what == "touch":
                disk.touch([name(one) for one in run[: i % 4 + 1]], time[0] + i * APART)
                disk.date()
            elif what == "remove":
                disk.remove(name(i))
            elif what == "damage" and disk.has(name(i), 0):
                held = page(root, name(i))
                spoiled = bytearray(held.path.read_bytes())
                spoiled[held.start] ^= 1
                held.path.write_bytes(spoiled)
                assert disk.read(name(i), 0) is None
            elif what == "wait":
                time[0] += i * APART / 4
                disk.expire()
            elif what == "reopen":
                disk = opened()
            there = {int(key[:4], 16) for key, _ in pages(root)}
            assert disk.size == sum(file.stat().st_size for file in files(root)) <= capacity
            assert len(disk) == len(there)
            assert all(above[one] in there for one in there if above[one])
            assert not disk.failures
        assert all(is_page(disk.read(name(one), 0), one) for one in range(1, 31) if disk.has(name(one), 0))


def test_what_files_hold_is_what_their_pages_should_be(disk, tmp_path):
    """The format, said once more."""
    write(disk, range(1, 4))
    (path,) = files(tmp_path)
    line, _, rest = path.read_bytes().partition(b"\n")
    assert line == b'{"version": 1, "tensors": {"a": ["float32", [64, 1]], "b": ["uint8", [3]]}}'
    assert [rest[64 * i :][:32] for i in range(3)] == [name(i) for i in (1, 2, 3)]
    assert path.read_bytes()[-3 * FORM.size :] == bytes(content(range(1, 4)).flatten().tolist())
    assert disk_files.fits(FORM, 10 * FORM.size) == 10
    assert disk_files.fits(FORM, 1) == 1
    assert disk_files.fits(FORM, 10**9) == MOST
