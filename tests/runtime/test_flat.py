"""What the host does for a conversation that goes on does not grow with its length: work is counted, not timed."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from types import FrameType
from typing import Any

import numpy as np
import pytest

from deepinfer_compile.runtime import prefix
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.idle import SLACK, IdlePages
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.prefix_nodes import MOST_PATHS, MOST_TOKENS, Node, NodePages, Trails
from tests.runtime import test_prefix_disk
from tests.runtime.fakes import FULL, NARROW, WIDE
from tests.runtime.sharing import PLENTY, assert_right, engine, ids, run

ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
GROWTH = 300
"""Lines that a conversation with 992 pages more may run more: for what takes its logarithm of steps."""


class Count:
    """Lines of Python that this package runs in this thread, each round of a loop anew, within a `with`."""

    lines = 0

    def __enter__(self) -> Count:
        self.before = sys.gettrace()
        sys.settrace(self._frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def _frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        if "deepinfer_compile/runtime" not in frame.f_code.co_filename:
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        self.lines += event == "line"
        return self._line


def resumed(tokens: int, **options: Any) -> int:
    """Lines for a conversation of so many tokens that goes on, from its arrival to its end."""
    target = engine((FULL, WIDE), limit=tokens + 100, max_num_batched_tokens=8192, max_num_seqs=2, **options)
    whole, counts = ids(tokens), []
    run(target, whole[:-32], params=ONE)
    for seed in range(3):
        request = target.make("r", [*whole[:-32], *ids(32, seed + 1)], ONE)
        with Count() as count:
            target.add(request)
            while target.alive:
                target.step()
        assert request.cached == (tokens - 32) // PAGE_SIZE * PAGE_SIZE
        assert target.flush(60)
        counts.append(count.lines)
    target.close(60)
    return min(counts)


@pytest.mark.parametrize("disk", [False, True])
def test_a_long_conversation_runs_no_more_lines_than_a_short_one(disk, tmp_path):
    few, many = (
        resumed(tokens, **({"prefix_cache_folder": tmp_path / str(tokens)} if disk else {})) for tokens in (2048, 65536)
    )
    assert many < few + GROWTH, (few, many)


class Checked(Trails):
    """Paths of all lengths, each of which is looked up page by page. followed: pages found by them."""

    followed = 0

    def __init__(self) -> None:
        super().__init__(shortest=1)

    def follow(self, tokens, first):
        nodes = super().follow(tokens, first)
        assert nodes[0] is first
        for page, (above, node) in enumerate(pairwise(nodes), start=1):
            assert above.children[node.key] is node
            assert node.key[0] == tokens[page * PAGE_SIZE :][:PAGE_SIZE].tobytes()
        Checked.followed += len(nodes) - 1
        return nodes


@pytest.mark.parametrize(("groups", "memory"), [((FULL, WIDE), PLENTY), ((FULL, WIDE), 40_000), ((NARROW,), 3_000)])
def test_paths_of_earlier_requests_are_what_a_lookup_finds(groups, memory, monkeypatch):
    monkeypatch.setattr(prefix, "Trails", Checked)
    monkeypatch.setattr(Checked, "followed", 0)
    target, rng = engine(groups, limit=1000, memory_bytes=memory, max_num_seqs=3), random.Random(1)
    said: list[list[int]] = [[]]
    for turn in range(20):
        prompts = [
            [*one[: rng.choice([len(one), rng.randrange(950)])], *ids(rng.randrange(200), turn), 1]
            for one in rng.choices(said, k=2)
        ]
        for request in run(target, *[prompt[:950] for prompt in prompts]):
            assert_right(request, target)
            said.append(request.tokens.tolist())
    assert Checked.followed > 40


def test_paths_of_earlier_requests_go_on_over_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(prefix, "Trails", Checked)
    test_prefix_disk.test_random_runs_over_one_folder(5, tmp_path)


@pytest.mark.parametrize("prompt", [0, 1, 64, 100, 128, 320])
def test_a_path_ends_where_tokens_differ_or_nodes_are_gone(prompt):
    tokens, table = np.arange(320), NodePages(1)
    nodes = [Node(None, (b"", 0), table, b"") for _ in range(5)]
    trails = Trails(shortest=1)
    trails.add(tokens[:prompt], tokens[prompt:], nodes)
    assert trails.follow(tokens, nodes[0]) == nodes
    assert trails.follow(tokens[:130], nodes[0]) == nodes[:2]
    other = Node(None, (b"", 0), table, b"")
    assert trails.follow(tokens, other) == [other]
    for at in range(64, 320, 17):
        changed = tokens.copy()
        changed[at] = -1
        assert trails.follow(changed, nodes[0]) == nodes[: at // PAGE_SIZE]
    for left in (4, 3, 2, 1):
        nodes[left].leave()
        assert trails.follow(tokens, nodes[0]) == nodes[:left]
        assert (nodes[left].pages == -1).all()


def test_paths_are_bounded_and_longer_ones_replace_their_beginnings():
    table, trails, none = NodePages(1), Trails(), np.zeros(0, dtype=np.int64)

    def made(count: int) -> list[Node]:
        return [Node(None, (b"", 0), table, b"") for _ in range(count)]

    def kept() -> list[int]:
        return [len(one.nodes) for one in trails._kept]

    half, first = np.zeros(MOST_TOKENS // 2, dtype=np.int64), made(1000)
    trails.add(half, (), first[:31])
    assert kept() == []
    for end in (100, 500, 40, 1000, 300):
        trails.add(half, (), first[:end])
        assert len(kept()) == 1
    assert kept() == [1000]
    trails.add(half, (), made(100))
    assert kept() == [100, 1000]
    trails.add(half, (), made(50))
    assert kept() == [50, 100]
    trails.add(half, range(MOST_TOKENS), made(60))
    assert kept() == [60]
    for count in range(40, 41 + MOST_PATHS):
        trails.add(none, (), made(count))
    assert sorted(kept()) == list(range(41, 41 + MOST_PATHS))
    gone = made(200)
    trails.add(none, (), gone)
    gone[0].leave()
    trails.add(none, (), made(300))
    assert kept()[0] == 300
    assert 200 not in kept()


@pytest.mark.parametrize("seed", range(5))
def test_idle_pages_keep_their_order_however_they_come_and_go(seed):
    rng, count = random.Random(seed), 300
    pages, want, now = IdlePages(count), dict[int, float](), 0.0
    for _ in range(600):
        way, now = rng.random(), now + 1
        if way < 0.45:
            others = [page for page in range(count) if page not in want]
            new = rng.sample(others, rng.randrange(min(9, len(others) + 1)))
            pages.add(np.array(new, dtype=np.int32), now)
            want |= dict.fromkeys(new, now)
        elif way < 0.8:
            gone = rng.sample(range(count), rng.randrange(12))
            assert pages.remove(np.array(gone, dtype=np.int32)) == sum(page in want for page in gone)
            want = {page: since for page, since in want.items() if page not in gone}
        elif want:
            first = next(iter(want))
            assert pages.first() == first
            assert pages.before(want[first]) is None
            assert pages.before(want[first] + 1) == first
        assert list(pages) == list(want)
        assert len(pages) == len(want)
        assert pages._places <= 2 * len(want) + SLACK + 300
        assert all((page in pages) == (page in want) for page in rng.sample(range(count), 5))
    with pytest.raises(LookupError):
        IdlePages(3).first()
    assert IdlePages(3).before(1e9) is None
