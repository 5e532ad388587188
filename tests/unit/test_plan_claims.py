"""Claims about a deployment come out of their formulas; which load is the most at a speed, and what links change."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from deepinfer_compile.models import own
from deepinfer_compile.plan.claims import FILE, NEAR, claims, fastest
from deepinfer_compile.plan.hardware import read_hardware
from deepinfer_compile.plan.ledger import LINKS, links
from deepinfer_compile.plan.load import drawn
from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.shape import Shape
from tests.plans import plain, shape, unit

FULL = {"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text", "num_hidden_layers": 40}}


@pytest.fixture(scope="module")
def released() -> Shape:
    return own.traffic(FULL)  # type: ignore[return-value]


def rows(released: Shape, **more: Any) -> dict[str, dict[str, Any]]:
    request = Request(policy="published", **more)
    load = drawn(len(released.routed_layers), released.experts, request.skew, request.seed)
    found = claims(released, read_hardware("gb200"), request, load)
    assert found is not None
    return {row["what"]: row for row in found["rows"]}


def test_arithmetic_is_reproduced_or_is_not(released: Shape) -> None:
    found = rows(released)
    wanted = {
        "experts of a layer on a GPU, 8 GPUs": ((384 + 32) / 8, "reproduced"),
        "experts of a layer on a GPU, 64 GPUs": ((384 + 64) / 64, "reproduced"),
        "experts of a layer on a GPU, 128 GPUs": (6.0, "inconsistent"),
        "fewer bytes of experts read a GPU, 64 GPUs for 8": (1 - 6 / 48, "reproduced"),
        "times the tokens taken in at 96% cache hits": (25.0, "reproduced"),
        "dollars a GPU-hour": (14.79 / 0.38, "reproduced"),
        "GPUs by tokens a day, and by disk over cache a GPU": (155e12 * 0.38 / 1e9 / 24, "inconsistent"),
    }
    for what, (value, verdict) in wanted.items():
        assert found[what]["found"] == pytest.approx(value)
        assert found[what]["verdict"] == verdict
    assert "= 6,944" in found["GPUs by tokens a day, and by disk over cache a GPU"]["formula"]
    assert len(found) == len(json.loads(FILE.read_text())["claims"])


def test_a_predicted_speed_is_judged_by_its_factor(released: Shape) -> None:
    """What a step gains by drafts decides: with none, 8 ranks are too slow; the formula names what was assumed."""
    few, many = (f"tokens/s a GPU at 240 a user, {n} GPUs" for n in (8, 64))
    for accepted in (1.0, 2.0, 3.0):
        found = rows(released, rows=6, accepted=accepted)
        for what in (few, many):
            row = found[what]
            assert f"{accepted:g} tokens a step" in row["formula"]
            near = row["found"] is not None and 1 / NEAR <= row["found"] / row["published"] <= NEAR
            assert row["verdict"] == ("plausible" if near else "inconsistent")
    assert rows(released, rows=6, accepted=0.01)[few]["found"] is None


@pytest.mark.parametrize("user", [1.0, 2e3, 2e4, 6e4, 1e9])
def test_the_most_requests_at_a_speed(user: float) -> None:
    found = unit()
    batch, rate = fastest(found, user)
    room = found.memory()["requests"]
    speeds = {n: 1 / found.decode_costs(n).stages.seconds for n in (max(batch, 1), batch + 1)}
    assert (batch == 0) == (speeds[max(batch, 1)] < user)
    assert batch == min(room, 1 << 14) or speeds[batch + 1] < user
    assert rate == (pytest.approx(batch * speeds[batch]) if batch else 0.0)


def test_other_models_have_no_claims() -> None:
    model = shape()
    assert claims(model, plain(), Request(policy="published"), drawn(3, 30, 0.25, 0)) is None


def test_links_change_exchanges_and_nothing_else() -> None:
    model, chip, request = shape(), plain(latency=0.0), Request(policy="published", decode=8, batch=64)
    found = {r["factor"]: r for r in links(model, chip, request, drawn(3, 30, 0.25, 0))}
    assert tuple(found) == LINKS
    for factor, row in found.items():
        assert row["exchanges"] == pytest.approx(found[1.0]["exchanges"] / factor)
        assert row["seconds"] >= found[4.0]["seconds"]
    speeds = [row["rate"] for row in found.values()]
    assert speeds == sorted(speeds)


def test_published_exchanges_follow_their_links_too() -> None:
    chip = read_hardware("h200")
    assert chip.small is not None
    assert chip.large is not None
    faster = chip.links(2.0)
    latency = chip["latency"]
    for (n, *times), (m, *fast) in zip(chip.small.points, faster.small.points, strict=True):  # type: ignore[union-attr]
        assert n == m
        assert fast == pytest.approx([latency + (t - latency) / 2 for t in times])
    assert [p[1:] for p in faster.large.points] == [(2 * a, 2 * b) for _, a, b in chip.large.points]  # type: ignore[union-attr]
    assert faster["network_bytes"] == 2 * chip["network_bytes"]
    assert chip.links(1.0).small == replace(chip).small
