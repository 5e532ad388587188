"""`eplb` from the command line: a plan as data and in a picture, replanning from its own output, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer_compile.eplb import moved, rebalance
from tests.cli.conftest import Run, document


@pytest.fixture
def loads(tmp_path: Path) -> Any:
    """Three layers of 24 experts."""
    made = np.random.default_rng(0).lognormal(0, 1, (3, 24))
    (tmp_path / "loads.json").write_text(json.dumps(made.tolist()))
    return made


def test_a_plan_as_data(cli: Run, loads: Any, tmp_path: Path) -> None:
    result = cli("eplb", tmp_path / "loads.json", "--ranks", 8, "--slots", 32, "--json")
    assert result.exit_code == 0
    found, want = document(result), rebalance(loads, 32, 8)
    assert [found[n] for n in ("phy2log", "log2phy", "logcnt")] == [
        want.phy2log.tolist(), want.log2phy.tolist(), want.logcnt.tolist(),
    ]  # fmt: skip
    assert found["moved"] is None
    assert max(found["after"]["imbalance"]) < min(found["before"]["imbalance"])
    usual = np.array([*range(24), *range(8)])
    by_hand = [loads[0, usual[4 * r : 4 * r + 4]] / (1 + (usual[4 * r : 4 * r + 4] < 8)) for r in range(8)]
    assert np.allclose(found["before"]["rank_loads"][0], [part.sum() for part in by_hand])


def test_a_plan_in_words(cli: Run, loads: Any, tmp_path: Path) -> None:
    result = cli("eplb", tmp_path / "loads.json", "--ranks", 8, "--slots", 32, "--layer", 1)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "3 layers, 24 experts, 32 slots on 8 ranks, policy balanced"
    assert "Layer 1: load of each rank over the mean" in lines
    bars = [line for line in lines if "█" in line]
    assert len(bars) == 8
    assert bars[0].split()[0] == "0"
    assert "move" not in result.stdout


def test_replanning_from_its_own_output(cli: Run, loads: Any, tmp_path: Path) -> None:
    sizes = ("--ranks", 8, "--slots", 32)
    first = cli("eplb", tmp_path / "loads.json", *sizes, "--json")
    (tmp_path / "plan.json").write_text(first.stdout)
    (tmp_path / "bare.json").write_text(json.dumps(document(first)["phy2log"]))
    later = loads * np.random.default_rng(1).lognormal(0, 0.3, loads.shape)
    (tmp_path / "later.json").write_text(json.dumps(later.tolist()))
    told = [
        document(
            cli("eplb", tmp_path / "later.json", *sizes, "--current", tmp_path / name, "--json", "--policy", policy)
        )
        for name, policy in (("plan.json", "balanced"), ("bare.json", "balanced"), ("plan.json", "published"))
    ]
    assert told[0] == told[1]
    assert sum(told[0]["moved"]) < sum(told[2]["moved"]) / 2
    before, after = np.array(document(first)["phy2log"]), np.array(told[0]["phy2log"])
    assert told[0]["moved"] == moved(before, after, 8, 24).tolist()
    words = cli("eplb", tmp_path / "later.json", *sizes, "--current", tmp_path / "plan.json")
    assert f"{sum(told[0]['moved'])} of 96 weights move" in words.stdout


def test_windows_nodes_and_many_ranks(cli: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "windows.json").write_text(json.dumps(rng.lognormal(0, 1, (4, 2, 12)).tolist()))
    found = cli("eplb", tmp_path / "windows.json", "--ranks", 4, "--slots", 16, "--policy", "windowed", "--json")
    assert np.array(document(found)["phy2log"]).shape == (2, 16)
    (tmp_path / "wide.json").write_text(json.dumps(rng.lognormal(0, 1, (1, 160)).tolist()))
    sizes = ("--ranks", 80, "--slots", 160, "--nodes", 3, "--groups", 8)
    words = cli("eplb", tmp_path / "wide.json", *sizes)
    assert "8 groups do not divide by 3 nodes: planned as one node" in words.stdout
    assert "the 64 that were fullest" in words.stdout
    assert sum("█" in line for line in words.stdout.splitlines()) == 64


def test_idle_loads_are_shown(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "idle.json").write_text(json.dumps([[0] * 8]))
    result = cli("eplb", tmp_path / "idle.json", "--ranks", 4, "--slots", 12)
    assert result.exit_code == 0
    assert "1.0000" in result.stdout


@pytest.mark.parametrize(
    ("text", "options", "told"),
    [
        ("[[1, 2", (), "not JSON"),
        ("\\xff", (), "not JSON"),
        ('{"a": 1}', (), "'load'"),
        ("[[1, NaN, 3, 4]]", (), "layer 0, expert 1"),
        ("[[1, -2, 3, 4]]", (), "layer 0, expert 1"),
        ("[[1, 2], [3]]", (), "one length"),
        ("[1, 2, 3, 4]", (), "[layers, experts]"),
        ("[[1, 2, 3, 4]]", ("--slots", 7), "use 6 or 8 slots"),
        ("[[1, 2, 3, 4]]", ("--policy", "best"), "balanced, published, windowed"),
        ("[[1, 2, 3, 4]]", ("--layer", 1), "use 0 to 0"),
        ("[[1, 2, 3, 4]]", ("--ranks", 0), "from 1"),
    ],
)
def test_refused(cli: Run, tmp_path: Path, text: str, options: tuple[object, ...], told: str) -> None:
    (tmp_path / "loads.json").write_bytes(text.encode().replace(b"\\xff", b"\xff"))
    sizes = {"--ranks": 2, "--slots": 6, **dict(zip(options[::2], options[1::2]))}
    arguments = [part for pair in sizes.items() for part in pair]
    result = cli("eplb", tmp_path / "loads.json", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")
    as_data = cli("eplb", tmp_path / "loads.json", *arguments, "--json")
    assert document(as_data)["error"] == "BadOption"
    assert as_data.exit_code == 2


def test_refused_plans_name_their_file(cli: Run, loads: Any, tmp_path: Path) -> None:
    for bad in ([[0]], [[0] * 32] * 3, {"phy2log": "no"}, [[0.5] * 32] * 3):
        (tmp_path / "plan.json").write_text(json.dumps(bad))
        for policy in ("balanced", "published"):
            options = ("--ranks", 8, "--slots", 32, "--policy", policy, "--current", tmp_path / "plan.json")
            result = cli("eplb", tmp_path / "loads.json", *options)
            assert result.exit_code == 2
            assert "plan.json" in result.stderr.replace("\n", "")
    missing = cli("eplb", tmp_path / "none.json", "--ranks", 8, "--slots", 32)
    assert missing.exit_code == 1
    assert "none.json" in missing.stderr.replace("\n", "")
