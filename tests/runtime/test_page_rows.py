"""Pages as bytes: what comes from a file, and that many go into the caches in few copies."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_compile.runtime import executor as executing
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.kernel_blocks import StepState
from deepinfer_compile.runtime.page_rows import ALIGN, PageRows
from deepinfer_compile.runtime.prefix_keys import Asked, digest_of, page_key
from tests.runtime.fakes import FULL, GROUPS, NARROW, WIDE
from tests.runtime.folders import Folder
from tests.runtime.sharing import GREEDY, engine, ids

CACHES = [
    {"name": "odd", "group": 1, "shape": [5], "dtype": "uint8"},
    {"name": "keys", "group": 1, "shape": [64, 2, 8], "dtype": "bfloat16"},
    {"name": "other", "group": 0, "shape": [64, 3], "dtype": "float32"},
    {"name": "small", "group": 1, "shape": [64, 3], "dtype": "float8_e4m3fn"},
    {"name": "one", "group": 1, "shape": [], "dtype": "int32"},
]


class Program:
    keep, place, caches = 0, (), CACHES

    def bind(self, name: str, held: torch.Tensor) -> None:
        pass


class Copies(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def target(pages: int = 40) -> BundleExecutor:
    made = BundleExecutor(
        {"decode": Program()}, [0, 7], 9, 64, 1.0, torch.device("cpu"), StepState.__new__(StepState), identity="m"
    )
    made.allocate((pages, pages))
    noise = torch.Generator().manual_seed(3)
    for held in made.allocated.values():
        content = torch.randint(0, 256, (held.nbytes,), dtype=torch.uint8, generator=noise)
        held.copy_(content.view(held.dtype).view(held.shape))
    return made


def rows_of(source: BundleExecutor, page: int) -> dict[str, torch.Tensor]:
    """What a page of group 1 holds, as its executor gives it."""
    form, (content,) = source.page_form(1), source.read_pages(1, [page])
    return dict(PageRows(form, content))


def equal(one: dict, other: dict) -> bool:
    """To the bit, since random bytes hold NaN."""
    same = [
        torch.equal(one[name].reshape(-1).view(torch.uint8), other[name].reshape(-1).view(torch.uint8)) for name in one
    ]
    return set(one) == set(other) and all(same)


@pytest.fixture
def stored(tmp_path):
    """Pages 0..24 of group 1 as a disk gives them, but for two that wait in memory."""
    source, disk = target(), Folder(tmp_path, "m", 10**8)
    want = [rows_of(source, page) for page in range(25)]
    for page, rows in enumerate(want):
        disk.write(bytes([page]) * 32, 0, rows)
    came = [disk.read(bytes([page]) * 32, 0) for page in range(25)]
    came[7:9] = [PageRows.of(rows) for rows in want[7:9]]
    return want, came


def test_a_page_from_a_file_is_what_was_written(stored):
    for want, came in zip(*stored):
        assert equal(want, came)
        assert {name: (held.dtype, held.shape) for name, held in came.items()} == {
            name: (held.dtype, held.shape) for name, held in want.items()
        }
        assert came.nbytes == sum(held.nbytes for held in want.values())
        assert came.content.nbytes % ALIGN == 0
    with pytest.raises(KeyError):
        stored[1][0]["other"]


@pytest.mark.parametrize(("staged", "batches"), [(1000, 1), (8, 4), (0.5, 25)])
def test_pages_go_into_the_caches_with_a_copy_a_cache_and_batch(staged, batches, stored, monkeypatch):
    """Those from files and those that wait have one form, and go together, at most `staged` of them."""
    want, came = stored
    monkeypatch.setattr(executing, "STAGING", int(staged * came[0].content.nbytes))
    made, before = target(), target()
    places = np.random.default_rng(5).permutation(40)[:25].tolist()
    with Copies() as counted:
        assert made.write_pages(1, places, came) == 25
    assert counted.calls["aten::index_copy_"] == 4 * batches
    assert counted.calls["aten::copy_"] == counted.calls["aten::_to_copy"] == 0
    for page, rows in zip(places, want):
        assert equal(rows, rows_of(made, page))
    for page in set(range(40)) - set(places):
        assert equal(rows_of(before, page), rows_of(made, page))
    assert torch.equal(before.allocated["other"].view(torch.int32), made.allocated["other"].view(torch.int32))


@pytest.mark.parametrize("change", ["dtype", "shape", "name", "more", "fewer"])
@pytest.mark.parametrize("at", [0, 8, 24])
def test_those_before_a_page_of_another_form_are_taken(change, at, stored):
    want, came = stored
    rows = dict(want[at])
    keys = rows.pop("keys")
    if change == "more":
        rows |= {"keys": keys, "yet": keys}
    elif change != "fewer":
        made = {"dtype": keys.view(torch.float16), "shape": keys.reshape(64, 16), "name": keys}
        rows["keyz" if change == "name" else "keys"] = made[change]
    came[at] = PageRows.of(rows)
    made, before = target(), target()
    for held in made.allocated.values():
        held.view(-1).view(torch.uint8).fill_(77)
    assert made.write_pages(1, range(10, 35), came) == at
    for page, one in enumerate(want[:at]):
        assert equal(one, rows_of(made, 10 + page))
    for page in range(10 + at, 40):
        assert all((held.reshape(-1).view(torch.uint8) == 77).all() for held in rows_of(made, page).values())
    assert before.write_pages(1, [], []) == 0


@pytest.mark.parametrize("hint", [True, False])
@pytest.mark.parametrize(("prompt", "output"), [(1, 0), (64, 0), (65, 0), (200, 0), (100, 40), (128, 130), (130, 200)])
def test_keys_made_together_are_those_made_one_by_one(hint, prompt, output):
    request = engine().make("a", ids(prompt), GREEDY)
    request.output_ids = ids(output, 1)
    tokens = np.array([*request.prompt, *request.output_ids])
    asked = Asked.of(request, hint)
    keys = [asked.key(page) for page in range(asked.count)]
    assert len(keys) == (prompt + output - 1) // 64
    for page, key in enumerate(keys):
        assert key == (tokens[page * 64 :][:64].tobytes(), max(prompt, page * 64 + 1) if hint else 0)
        assert key == page_key(request, page, hint)


def test_names_follow_from_those_that_are_known():
    cache = engine().scheduler.prefix
    request = engine().make("a", ids(500), GREEDY)
    asked = cache.asked(request)
    assert cache.asked(request) is asked
    digest, want = b"r" * 32, []
    for page in range(asked.count):
        digest = digest_of(digest, asked.key(page))
        want.append(digest)
    assert asked.names(5, want[:3], b"r" * 32) == want[:5]
    assert asked.names(7, [], b"") == want
    assert asked.names(2, [], b"") == want
    request.output_ids = ids(90, 1)
    longer = cache.asked(request)
    assert longer.tokens[: 7 * 64].tolist() == asked.tokens.tolist()
    assert longer.count == 9
    cache.reset()
    assert cache.asked(request) is not longer


@pytest.mark.parametrize("groups", [(FULL,), (NARROW,), GROUPS, (WIDE, FULL, FULL)])
def test_a_hit_ends_where_every_group_has_what_it_needs(groups):
    cache = engine(groups).scheduler.prefix
    for seed in range(60):
        random = np.random.default_rng(seed)
        there = random.random((int(random.integers(0, 12)), len(groups))) < (0.5, 0.9, 1.0)[seed % 3]
        usable = known = 0
        for end in range(1, len(there) + 1):
            fits = [there[group.first(end * 64) : end, i].all() for i, group in enumerate(cache.groups)]
            usable = end if all(fits) else usable
            whole = [fit for fit, group in zip(fits, cache.groups) if group.reach is None]
            known = end if all(whole) else known
        assert cache.reach(there) == (usable, known)
