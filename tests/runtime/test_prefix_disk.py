"""Pages on disk: another process finds them, and a damaged one is a miss."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime import prefix_disk
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.engine import Engine, EngineOptions
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime import folders
from tests.runtime.fakes import FULL, GROUPS, NARROW, WIDE, HashExecutor
from tests.runtime.folders import Folder, files, pages
from tests.runtime.sharing import GREEDY, PLENTY, assert_pages, assert_right, assert_tree, engine, ids, run
from tests.runtime.test_ahead import Flying
from tests.runtime.test_prefix_runs import play

NAME = b"n" * 32


@pytest.mark.parametrize("groups", [(FULL,), (NARROW,), GROUPS])
@pytest.mark.parametrize("length", [64, 65, 300])
def test_a_new_engine_goes_on_where_an_old_one_ended(groups, length, tmp_path):
    prompt = ids(length)
    (first,) = run(engine(groups, prefix_cache_folder=tmp_path), prompt)
    target = engine(groups, prefix_cache_folder=tmp_path)
    (again,) = run(target, prompt)
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE
    assert again.cached == shared
    assert target._executor.steps[0] == (1, length - shared)
    (onward,) = run(target, [*prompt, *first.output_ids, 3])
    for request in (again, onward):
        assert_right(request, target)
    longer = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True)
    (answer,) = run(target, prompt, params=longer)
    third = engine(groups, prefix_cache_folder=tmp_path)
    (onward,) = run(third, [*prompt, *answer.output_ids, 3])
    assert onward.cached == (length + 79) // PAGE_SIZE * PAGE_SIZE
    assert_right(onward, third)


def test_a_window_keeps_only_what_is_needed_to_go_on(tmp_path):
    run(engine((NARROW,), prefix_cache_folder=tmp_path), ids(400))
    assert len(pages(tmp_path)) == 1
    run(engine((WIDE,), prefix_cache_folder=tmp_path), ids(400))
    assert len(pages(tmp_path)) == 1 + 3 - 1  # page 5 of the first group has that name too


def test_the_same_question_is_found_although_its_answer_was_long(tmp_path):
    long = SamplingParams(temperature=0, max_tokens=180, ignore_eos=True)
    run(engine((FULL, NARROW), prefix_cache_folder=tmp_path), ids(130), params=long)
    target = engine((FULL, NARROW), prefix_cache_folder=tmp_path)
    (request,) = run(target, ids(130))
    assert request.cached == 128
    assert_right(request, target)


def test_rows_that_depend_on_the_prompt_length_keep_to_it_on_disk(tmp_path):
    cached = []
    for length in (150, 160, 150):
        target = engine(hint=True, prefix_cache_folder=tmp_path)
        (request,) = run(target, ids(160)[:length])
        cached.append(request.cached)
        assert_right(request, target)
    assert cached == [0, 0, 128]


def chain_of(target) -> list[bytes]:
    """Names of the pages of the only request so far."""
    node, chain = target.scheduler.prefix.root, []
    while node.children:
        (node,) = node.children.values()
        chain.append(node.digest)
    return chain


def spoil(damage: str, at: folders.Held, other: folders.Held) -> None:
    """Damage a page, in the way of another one where that is asked for."""
    content = bytearray(at.path.read_bytes())
    content[at.start + 100] ^= 4
    if damage == "other":
        content[at.start : at.end] = other.path.read_bytes()[other.start : other.end]
    new = {"cut": content[: at.end - 8], "empty": b"", "head": b"x" + content[1:]}
    at.path.unlink() if damage == "gone" else at.path.write_bytes(new.get(damage, content))


@pytest.mark.parametrize("damage", ["flip", "cut", "other", "empty", "head", "gone"])
@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("together", [1, 2, 16])
def test_a_damaged_page_is_a_miss(damage, at, together, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", together * 1024)
    first = engine((FULL,), prefix_cache_folder=tmp_path)
    run(first, ids(330))
    chain = [folders.page(tmp_path, digest) for digest in chain_of(first)]
    assert len({held.path for held in chain}) == -(-5 // together)
    target = engine((FULL,), prefix_cache_folder=tmp_path, max_num_batched_tokens=80)
    spoil(damage, chain[at], chain[at - 1])
    (request,) = run(target, ids(330))
    whole = at // together * together if damage in ("empty", "head", "gone") else at
    assert request.cached == whole * PAGE_SIZE
    assert target.prefix_stats.damaged == (damage != "gone")
    assert_right(request, target)
    # written anew when the request ended
    assert run(engine((FULL,), prefix_cache_folder=tmp_path), ids(330))[0].cached == 320


LONG = 40 * PAGE_SIZE + 9


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WIDE), (WIDE, FULL, NARROW)])
def test_pages_from_disk_are_copied_together(groups, tmp_path):
    run(engine(groups, limit=4096, prefix_cache_folder=tmp_path), ids(LONG))
    target = engine(groups, limit=4096, prefix_cache_folder=tmp_path)
    (request,) = run(target, ids(LONG))
    assert request.cached == 40 * PAGE_SIZE
    counts = {FULL: 40, WIDE: 3, NARROW: 1}
    assert target._executor.writes == [(i, counts[group]) for i, group in enumerate(groups)]
    assert target.prefix_stats.restored == sum(counts[group] for group in groups)
    assert_right(request, target)


@pytest.mark.parametrize("damage", ["flip", "form"])
@pytest.mark.parametrize("at", [[1], [20], [39], [30, 17]])
def test_damage_amid_many_pages_is_a_miss_from_there_on(damage, at, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_disk, "FILE", 1 if damage == "form" else prefix_disk.FILE)
    first = engine((FULL,), limit=4096, prefix_cache_folder=tmp_path)
    run(first, ids(LONG))
    chain = chain_of(first)
    target = engine((FULL,), limit=4096, prefix_cache_folder=tmp_path)
    disk = Folder(tmp_path, "hash", 10**9)
    for page in at:
        if damage == "form":
            disk.write(chain[page], 0, {"rows": torch.zeros(128, dtype=torch.int64)}, chain[page - 1])
        else:
            spoil(damage, folders.page(tmp_path, chain[page]), folders.page(tmp_path, chain[0]))
    request = target.make("a", ids(LONG), GREEDY)
    target.add(request)
    while not target._executor.writes:
        target.step()
    assert target.flush(60)  # what hangs on a page that was discarded is gone
    run(target)
    whole = min(at)
    assert request.cached == whole * PAGE_SIZE
    assert target.prefix_stats.restored == whole
    assert 1 <= target.prefix_stats.damaged <= len(at)
    assert target._executor.writes == [(0, 40 if damage == "form" else whole)]
    assert_right(request, target)
    # what follows was written anew when the request ended
    (again,) = run(engine((FULL,), limit=4096, prefix_cache_folder=tmp_path), ids(LONG))
    assert again.cached == 40 * PAGE_SIZE


def test_another_model_finds_nothing(tmp_path):
    run(engine(prefix_cache_folder=tmp_path), ids(200))
    executor = HashExecutor(hint=False)
    executor.identity = "other"
    target = Engine(executor, EngineOptions(memory_bytes=PLENTY, prefix_cache_folder=tmp_path))
    assert run(target, ids(200))[0].cached == 0
    target.forget_prefixes("hash")
    assert run(target, ids(200))[0].cached == 192
    executor.identity = ""
    with pytest.raises(BadOption, match="prefix_cache_folder"):
        Engine(executor, EngineOptions(memory_bytes=PLENTY, prefix_cache_folder=tmp_path))


def test_a_reset_deletes_and_a_failed_request_leaves_nothing(tmp_path):
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    prompt = [t for t in ids(300) if t != 90][:200]
    run(target, prompt)
    assert len(pages(tmp_path)) == 3
    target._executor.poison = 90
    run(target, [*prompt, 90])
    assert files(tmp_path) == []
    run(target, prompt)
    target.forget_prefixes()
    run(target, [1])
    assert files(tmp_path) == []
    assert target.prefix_stats.disk_bytes == 0


def test_too_few_free_pages_take_nothing_from_disk(tmp_path):
    run(engine((FULL,), prefix_cache_folder=tmp_path), ids(400, 1))
    target = engine((FULL,), prefix_cache_folder=tmp_path, memory_bytes=9 * FULL.bytes_per_page, max_num_seqs=2)
    long = target.make("long", ids(300), SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    target.add(long)
    target.step()
    (other,) = run(target, ids(400, 1))
    for request in (long, other):
        assert_right(request, target)


def page(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((64, 3), number, dtype=torch.bfloat16), "b": torch.full((5,), number, dtype=torch.uint8)}


def name(number: int) -> bytes:
    return bytes([number]) * 32


def test_the_folder_stays_within_its_capacity(tmp_path):
    now = [1e9]

    def opened(identity: str, capacity: int) -> Folder:
        return Folder(tmp_path, identity, capacity, clock=lambda: now[0])

    disk = opened("m", 10**6)
    disk.write(name(0), 0, page(0))
    size = disk.size
    disk = opened("m", 3 * size)
    for i in range(1, 3):
        now[0] += 1
        disk.write(name(i), 0, page(i))
    now[0] += 1
    disk.touch([name(0)], 0)
    disk.date()
    disk.write(name(3), 0, page(3))
    assert [disk.has(name(i), 0) for i in range(4)] == [True, False, True, True]
    assert (disk.evictions, disk.size) == (1, 3 * size)
    assert sum(f.stat().st_size for f in files(tmp_path)) == disk.size
    now[0] += 1
    disk.touch([name(3)], 0)
    disk.date()
    other = opened("another", 2 * size)
    assert [len(files(tmp_path)), len(other)] == [2, 2]
    found = disk.read(name(3), 0)
    assert found is not None
    assert all(torch.equal(held, page(3)[key]) for key, held in found.items())
    assert disk.read(name(2), 0) is None
    assert (disk.damaged, disk.failures) == (0, 0)
    opened("m", 0)
    assert files(tmp_path) == []


def test_half_written_files_of_killed_processes_go(tmp_path):
    Folder(tmp_path, "m", 10**6).write(NAME, 0, page(0))
    old, new = (files(tmp_path)[0].with_name(f"{n * 32}.pages.tmp") for n in "ab")
    for draft in (old, new):
        draft.write_bytes(b"x")
    os.utime(old, (0, 0))
    assert len(Folder(tmp_path, "m", 10**6)) == 1
    assert (old.exists(), new.exists()) == (False, True)


def test_a_draft_has_a_name_of_its_own(tmp_path, monkeypatch):
    """Two engines of a process, or of two containers with equal process numbers, may write one page at once."""
    drafts = []
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda path, to: drafts.append(path) or replace(path, to))
    for disk in (Folder(tmp_path, "m", 10**6), Folder(tmp_path, "m", 10**6)):
        disk.write(NAME, 0, page(0))
    assert len({draft.name for draft in drafts}) == 2


def test_files_that_are_no_pages_are_left_alone(tmp_path):
    """As in a folder that holds models too."""
    others = [tmp_path / "model" / "model.safetensors", tmp_path / ("a" * 32) / "model-1.0.pages"]
    others += [tmp_path / "model" / "bm5ubm5ubm4.0.80.40...pages", tmp_path / "model" / "x.tmp"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_bytes(b"weights")
        os.utime(other, (0, 0))
    disk = Folder(tmp_path, "m", 0)
    disk.write(NAME, 0, page(0))
    disk.clear()
    assert (len(disk), disk.size) == (0, 0)
    assert all(other.exists() for other in others)


def test_a_file_that_goes_while_the_folder_is_read_is_not_there(tmp_path, monkeypatch):
    disk = Folder(tmp_path, "m", 10**6)
    disk.write(NAME, 0, page(0))
    there = files(tmp_path)
    monkeypatch.setattr(Path, "glob", lambda *_: [*there, there[0].with_name("bm5ubm5ubm4.7.80.40...pages")])
    assert len(Folder(tmp_path, "m", 10**6)) == 1


def test_a_reset_deletes_what_another_process_wrote_meanwhile(tmp_path):
    first, other = Folder(tmp_path, "m", 10**6), Folder(tmp_path, "m", 10**6)
    stranger = Folder(tmp_path, "another", 10**6)
    for disk in (other, stranger):
        disk.write(NAME, 0, page(0))
    first.clear()
    assert other.read(NAME, 0) is None
    assert stranger.read(NAME, 0) is not None


def test_a_folder_that_cannot_be_used_is_refused_and_a_failed_write_counted(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(BadOption, match="prefix_cache_folder"):
        Folder(tmp_path / "file", "m", 10**6)
    disk = Folder(tmp_path / "there", "m", 10**6)
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o700
    (home,) = (tmp_path / "there").iterdir()
    assert home.stat().st_mode & 0o777 == 0o700
    home.rmdir()
    disk.write(NAME, 0, page(0))
    assert (disk.failures, len(disk)) == (0, 1)
    shutil.rmtree(home)
    home.write_text("")
    disk.write(NAME, 1, page(1))
    assert (disk.failures, disk.has(NAME, 1)) == (1, False)
    disk.clear()


def test_a_file_that_cannot_be_deleted_or_touched_stops_no_one(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("read-only")

    disk = Folder(tmp_path, "m", 10**6)
    for i in range(2):
        disk.write(name(i), 0, page(i))
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    assert disk.read(name(0), 0) is not None
    files(tmp_path)[1].write_bytes(b"")
    assert disk.read(name(1), 0) is None
    assert (disk.damaged, disk.failures, disk.has(name(1), 0)) == (1, 1, False)
    disk.clear()
    assert (len(disk), disk.size) == (0, 0)


def test_one_wrong_bit_anywhere_is_found(tmp_path):
    disk = Folder(tmp_path, "m", 10**6)
    small = {"a": torch.ones(2, 3, dtype=torch.bfloat16)}
    disk.write(NAME, 0, small)
    content = files(tmp_path)[0].read_bytes()
    spare = range(content.index(b"\n") + 33, folders.page(tmp_path, NAME).start)
    for at in range(len(content)):
        wrong = bytearray(content)
        wrong[at] ^= 1 << at % 8
        disk.write(NAME, 0, small)
        files(tmp_path)[0].write_bytes(bytes(wrong))
        found = disk.read(NAME, 0)
        assert found is None or (at in spare and torch.equal(found["a"], small["a"]))


def test_a_page_read_from_disk_is_found_although_its_place_was_a_branch(tmp_path):
    """The page that goes for it is the only one below its own node, which must not go with it."""
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    start, one, two, other = (ids(PAGE_SIZE, seed) for seed in range(4))
    for prompt in ([*start, *one, 1], [*start, *two, 1], [*other, 1]):
        run(target, prompt)
    cache, pool = target.scheduler.prefix, target.scheduler.pages.groups[0].pool
    (node,) = (child for child in cache.root.children.values() if child.children)
    lost = [node, *(child for child in node.children.values() if child.key[0] == np.array(two).tobytes())]
    for one_lost in lost[::-1]:
        cache._drop(0, one_lost.pages[0])
    pool.take(pool._unused)
    request = target.make("again", [*start, *two, 1], GREEDY)
    assert not cache.ready(request)
    assert target.flush(60)
    assert cache.ready(request)
    assert cache.find(request).tokens == 2 * PAGE_SIZE
    assert target.prefix_stats.restored == 2
    assert_tree(cache)


def assert_folder(target, folder: Path) -> None:
    """What is on disk is what is known of it, and every page can be found."""
    stats, there = target.prefix_stats, pages(folder)
    assert stats.disk_pages == len(there)
    assert stats.disk_bytes == sum(file.stat().st_size for file in files(folder))
    whole = {digest for digest, group in there if group == 0}
    assert all(held.parent in whole for held in there.values() if held.parent)
    assert (stats.damaged, stats.disk_failures) == (0, 0)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))])
def test_random_runs_over_one_folder(seed, tmp_path):
    rng = random.Random(seed)
    for groups in ((FULL, WIDE), (FULL, WIDE), (FULL, NARROW)):
        target = engine(
            groups,
            kind=rng.choice([HashExecutor, Flying]),
            limit=256,
            max_num_seqs=3,
            max_num_batched_tokens=90,
            memory_bytes=9_000,
            prefix_cache_folder=tmp_path / str(groups[1].window),
            prefix_cache_bytes=50_000,
        )
        target.scheduler.prefix.disk.work.most = rng.choice([2000, 10_000, 10**9])
        for request in play(target, rng, 25):
            assert_right(request, target)
        assert_pages(target)
        assert target.flush(60)
        assert_folder(target, tmp_path / str(groups[1].window))
        assert target.prefix_stats.disk_bytes <= 50_000
        assert target.prefix_stats.damaged == 0
