"""Experts that move while a bundle serves: loads even out, tokens stay what they were, nothing is loaded again.

Loads are rows that ranks were given, counted where they are sent, in a round of the same prompts after the move.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deepinfer_compile as dc
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.eplb.layout import in_order
from tests.e2e.partitioned import check_held, eager
from tests.e2e.rebalanced import rank_imbalance
from tests.e2e.skewed import CHOSEN, skewed, some_prompts
from tests.plain_model import make_plain
from tests.ranks import ended, run_ranks, start

EXPERT = (2 * 40 * 96 + 96 * 40) * 4
"""Bytes of the weights of an expert of a layer."""
LAYERS = 2


def serve(folder: Path, model: Any, ranks: int, experts: int, *more: dict[str, Any], **build: Any) -> Any:
    """A bundle with a quarter more slots than experts, and what each rank gave for each job, plain traffic first."""
    plan = dc.ExpertPlan(ranks=ranks, slots=experts * 5 // 4)
    bundle = dc.build(model, folder / "b", experts=plan, **build).root
    given = {"bundle": str(bundle), "native": build["native"], "traffic": some_prompts(ranks, 6), "count": 12}
    plain = {**given, "rounds": 1, "rebalance": None}
    return bundle, given, run_ranks(ranks, folder / "run", [plain, *({**given, **job} for job in more)])


def check(bundle: Path, model: Any, prompts: list[list[list[int]]], found: list[list[dict[str, Any]]]) -> None:
    """The second job rebalanced what the first one did not."""
    section, ranks = read_bundle(bundle).manifest.experts, len(found)
    off, on = [f[0] for f in found], [f[1] for f in found]
    assert rank_imbalance(off, 0) >= 1.5
    assert rank_imbalance(on, 1) <= 1.1
    assert rank_imbalance(on, 1) == rank_imbalance(on, 2)
    for rank in range(ranks):
        assert on[rank]["rounds"] == off[rank]["rounds"] * 3
        assert on[rank]["same"]
    assert off[0]["rounds"][0][:2] == [eager(model, p, 12) for p in prompts[0][:2]]
    first, last = on[0]["stats"][0], on[0]["stats"][-1]
    assert first["rebalanced"] == last["rebalanced"] == 1
    assert last["skipped"] >= 2
    assert first["before"] >= 1.5
    assert first["after"] <= 1.1
    assert last["before"] == last["after"] <= 1.1
    check_moved(bundle, section, on)


def check_moved(bundle: Path, section: dict[str, int], on: list[dict[str, Any]]) -> None:
    """Slots whose expert changed were read, each once and no other, and all hold what the placement says."""
    old = in_order(section["layers"], section["experts"], section["slots"], section["ranks"]).phy2log
    new = np.array(on[0]["plans"][0])
    assert all(plan == new.tolist() for f in on for plan in f["plans"])
    by_rank = (old != new).reshape(len(old), section["ranks"], -1).sum((0, 2)).tolist()
    assert [f["stats"][-1]["slots_moved"] for f in on] == by_rank
    assert [f["stats"][-1]["bytes_moved"] for f in on] == [n * EXPERT for n in by_rank]
    assert 0 < sum(by_rank) < old.size // 2
    check_held(bundle, [[f, {}] for f in on], new)


REBALANCE = {"rounds": 3, "rebalance": {"interval": 9, "window": 8}}


def test_two_ranks_even_out(tmp_path: Path) -> None:
    """And an idle rank, whose tokens nobody sent or counted: 50 tokens of a prompt, and 3 that were read alone."""
    model = skewed(16)
    idle = {"traffic": [[[5] * 50], []], "count": 4, "rounds": 1, "rebalance": {"interval": 4, "window": 4}}
    none = {"traffic": [[], []], "rounds": 1, "rebalance": {"interval": 1, "window": 1}}
    bundle, given, found = serve(tmp_path, model, 2, 16, REBALANCE, idle, none, native=False)
    check(bundle, model, given["traffic"], found)
    for busy, alone in (f[2:] for f in found):
        assert busy["stats"][0]["choices"] == np.sum([f[2]["rows"][0] for f in found]) == 53 * CHOSEN * LAYERS
        assert alone["stats"][0] == vars(dc.ExpertStats())
    assert found[0][2]["sent"]["loads"] == 2 * 16 * LAYERS * 8 // 2
    assert np.sum(found[1][2]["rows"]) == 0


@pytest.mark.slow
def test_four_ranks_even_out(tmp_path: Path) -> None:
    model = skewed(32)
    bundle, given, found = serve(tmp_path, model, 4, 32, REBALANCE, native=False)
    check(bundle, model, given["traffic"], found)


@pytest.mark.slow
def test_two_ranks_of_native_code_even_out(tmp_path: Path) -> None:
    """Compiled blocks read weights where they always were."""
    model = skewed(16)
    bundle, given, found = serve(tmp_path, model, 2, 16, REBALANCE, native=True)
    check(bundle, model, given["traffic"], found)


@pytest.mark.slow
def test_ranks_with_different_options_are_refused(tmp_path: Path) -> None:
    model = make_plain("loop", layers=1)
    bundle = dc.build(model, tmp_path / "b", native=False, experts=dc.ExpertPlan(ranks=2)).root
    job = {"bundle": str(bundle), "traffic": [[], []], "count": 1, "rounds": 1}
    for i, options in enumerate(([{"threshold": 1.5}, {}], [None, {"interval": 5, "window": 5}])):
        for code, err in ended(start(2, tmp_path / f"run{i}", [{**job, "rebalance": options}]), 60.0):
            assert code == 1
            assert "BadOption: option 'rebalance'" in err, err[-3000:]
            assert "the ranks have different ones" in err
