"""What is predicted of the system whose figures are published: recomputed by hand, and how far off it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_compile.errors import MissingExtra
from deepinfer_compile.plan import published
from deepinfer_compile.plan.economy import HITS, keeps_up, pays
from deepinfer_compile.plan.published import FILE, compared
from deepinfer_compile.plan.request import Request
from tests.plans import unit

RATIOS = {"prefill": 2.67, "decode": 1.34}
"""Predicted over published, as they come out of constants with sources; nothing is fitted. A change of the model of
time or of a constant changes them, and has to be read before they are changed here."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return compared(Request())


def test_ratios_to_published_figures(found: dict[str, Any]) -> None:
    assert found["note"] == ""
    points = {(p["unit"].split(",")[0], p["what"]): p for p in found["points"]}
    assert len(points) == 4
    for (kind, _), point in points.items():
        assert point["ratio"] == pytest.approx(RATIOS[kind], rel=0.01)
        assert point["ratio"] == point["predicted"] / point["published"]
    assert points["prefill", "tokens in, a GPU and second"]["published"] == 73700 / 8
    assert points["prefill", "of them computed"]["published"] == pytest.approx(73700 / 8 * 0.437)
    assert points["decode", "tokens out, a GPU and second"]["published"] == 1850
    assert points["decode", "tokens out, a user and second"]["published"] == 21


def test_the_decode_step_by_hand(found: dict[str, Any]) -> None:
    """88 requests of 4,989 tokens on each of 144 ranks; two micro-batches, so that weights are read twice."""
    batch, tokens, layers, routed = 88, 4989, 61, 58
    core = batch * layers * 2 * 128 * tokens * (2 * 512 + 64) / 660e12
    attention = (7168 * (1536 + 576) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168) * layers
    shared = routed * 3 * 7168 * 2048
    dense = 2 * (attention + shared + 3 * 3 * 7168 * 18432 + 2 * routed * 256 * 7168) / 3e12
    experts = 2 * routed * 2 * 3 * 7168 * 2048 / 3e12
    head = 2 * 129280 * 7168 / 3e12
    kernels = core + dense + experts + head
    point = next(p for p in found["points"] if "a user" in p["what"])
    step = 1 / point["predicted"]
    # exchanges do not hide behind kernels altogether: the fullest rank of a layer gets more than its share
    exchanges = routed * batch / 128 * (192e-6 + 369e-6)
    assert kernels == pytest.approx(25.6e-3, rel=0.01)
    assert kernels < step < kernels + exchanges
    assert step == pytest.approx(35.5e-3, rel=0.01)


def test_the_file_names_its_sources() -> None:
    known = json.loads(FILE.read_text())
    assert known["source"].startswith("https://")
    assert known["config"]["source"].startswith("https://")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*args: Any) -> Any:
        raise MissingExtra(package="transformers", purpose="capturing a Hugging Face model", extra="hf")

    monkeypatch.setattr(published, "_points", missing)
    told = compared(Request())
    assert told["points"] == []
    assert "deepinfer-compile[hf]" in told["note"]


def test_break_even_of_keeping_up() -> None:
    """The rate at which prefill takes in just what is asked, found again by asking the unit there."""
    made = unit("prefill", 4, prompt=4000, prompt_tokens=8000)
    wanted = made.input_rate(0.7) * 4
    at = keeps_up([1 / made.input_rate(h) for h in HITS], 4, wanted)
    assert at == pytest.approx(0.7, abs=1e-9)
    between = keeps_up([1 / made.input_rate(h) for h in HITS], 4, made.input_rate(0.75) * 4)
    assert between == pytest.approx(0.75, abs=0.01)
    slow = [1 / made.input_rate(h) for h in HITS]
    assert keeps_up(slow, 4, 4 / slow[0] * 0.9) == 0.0
    assert keeps_up(slow, 4, 4 / slow[-1] * 1.1) is None


def test_break_even_of_paying() -> None:
    """Cost 2 + 1 * (1 - h) against revenue 1 + h * 0 + (1 - h) * 2: pays up to no hits at all, or up to a half."""
    cost = [1 - h for h in HITS]
    lost = pays(Request(ratio=1, prices=(0.0, 2.0, 0.5)), 2.0, cost)
    assert lost["from"] is None
    half = pays(Request(ratio=1, prices=(0.0, 2.0, 1.5)), 2.0, cost)
    assert (half["from"], half["to"]) == pytest.approx((0.0, 0.5), abs=2e-3)
    dear = pays(Request(ratio=1, prices=(1.0, 0.0, 1.5)), 2.0, cost)
    assert (dear["from"], dear["to"]) == pytest.approx((0.75, 0.99), abs=2e-3)
