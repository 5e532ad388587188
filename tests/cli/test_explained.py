"""A reader of `explain` and `dump` learns what was done to each layer, what was not, why, and from which line."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepinfer_compile.builder import Compiled
from deepinfer_compile.cli import app, opening
from deepinfer_compile.presets import PHASES, default
from tests import models

EVERY_LAYER = {
    "canonicalize": None,
    "raise-rms-norm": None,
    "raise-rope": 2,
    "cache-attention": 1,
    "fuse-add-norm": 1,
}
LATENT = {"raise-latent-attention": 1, "decode/choose-latent-form": 1, "verify/choose-latent-form": 1}
# model -> layers of a kind -> pass -> how often it applied; a pass that is not named must not have applied
WANTED: dict[str, dict[tuple[int, ...], dict[str, int | None]]] = {
    "deepseek_v3": {
        (0, 1): {**EVERY_LAYER, **LATENT, "raise-activation": 1},
        (2, 3): {**EVERY_LAYER, **LATENT, "raise-activation": 1, "raise-router": 1},
    },
    "gpt_oss": {
        (0, 2): {**EVERY_LAYER, "raise-router": 1},
        (1, 3): {**EVERY_LAYER, "raise-router": 1},
    },
}
OF_VERSION = "fuse-linear-casts"
"""Applies where this Transformers keeps the router's weight in bf16; later ones keep it in fp32."""
REASONS = {
    "deepseek_v3": ("latent cache, window none", "sigmoid router, top 4 of 12", "latent 24, rope 8, 6 heads"),
    "gpt_oss": ("kv cache, window 16", "kv cache, window none", "softmax_topk router, top 2 of 5"),
}


@dataclass(frozen=True)
class Shown:
    """What the commands say of a model."""

    data: dict[str, Any]
    text: str
    dump: Path


@pytest.fixture(scope="module", params=list(WANTED))
def shown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Shown]:
    """The commands on a folder with config.json only; the model is compiled by `dump`, the others explain the same."""
    name, root = request.param, tmp_path_factory.mktemp("explained")
    models.config(name).save_pretrained(root / "model")
    made: list[Compiled] = []
    run = CliRunner().invoke
    honest = opening.compile_source
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "compile_source", lambda *a, **k: made.append(honest(*a, **k)) or made[0])
        assert run(app, ["dump", str(root / "model"), str(root / "d")]).exit_code == 0
        patch.setattr(opening, "compile_source", lambda *a, **k: made[0])
        data = json.loads(run(app, ["explain", str(root / "model"), "--json"]).stdout)
        return name, Shown(data, run(app, ["explain", str(root / "model")]).stdout, root / "d")


def test_every_layer_is_explained(shown: tuple[str, Shown]) -> None:
    name, found = shown[0], shown[1].data
    kinds = {tuple(k["layers"]): k["passes"] for k in found["kinds"] if k["layers"]}
    assert kinds.keys() == WANTED[name].keys()
    for layers, wanted in WANTED[name].items():
        applied = {label(p): p["applied"] for p in kinds[layers] if p["applied"] and label(p) != OF_VERSION}
        assert applied.keys() == wanted.keys(), layers
        assert all(wanted[k] in (None, count) for k, count in applied.items()), layers
        assert all(sum(p["reasons"].values()) == p["applied"] for p in kinds[layers])
    told = {label(p) for k in found["kinds"] for p in k["passes"]} | {short(q) for q in found["quiet"]}
    assert {p.name for p in default().passes} <= told
    assert {f"{phase}/{p.name}" for phase, passes in PHASES.items() for p in passes} <= told


def label(p: dict[str, Any]) -> str:
    return short(f"{p['program']}/{p['pass']}")


def short(path: str) -> str:
    return path.removeprefix("packed/")


def test_in_words(shown: tuple[str, Shown]) -> None:
    name, text = shown[0], shown[1].text
    for layers in WANTED[name]:
        assert re.search(rf"^layers {layers[0]}[-,] ?{layers[1]} \(2\), layer\d$", text, re.MULTILINE), layers
    for reason in REASONS[name]:
        assert reason in text
    assert "found no candidate: " in text
    missed = [line for line in text.splitlines() if "missed" in line]
    assert len(missed) == (2 if name == "deepseek_v3" else 0)
    for line in missed:  # which node, why, the module and the line of its source
        assert re.search(r"it is expanded already: cached_latent\w+ \(model\.model\.layers\.\d\.self_attn, ", line)
        assert re.search(r"modeling_deepseek_v3\.py\", line \d+, in forward\)$", line)


def test_stages_differ_only_where_a_pass_worked(shown: tuple[str, Shown]) -> None:
    explained = shown[1].data
    diffs = sorted(shown[1].dump.glob("*-packed-*.diff"))
    assert [f.stem[4:].removeprefix("packed-") for f in diffs] == [p.name for p in default().passes]
    for file, p in zip(diffs, default().passes, strict=True):
        text = file.read_text()
        applied = {k["name"] for k in explained["kinds"] for q in k["passes"] if q["pass"] == p.name and q["applied"]}
        changed = set(re.findall(rf"^\+\+\+ (\w+) after {p.name}$", text, re.MULTILINE))
        assert applied <= changed, "an applied rewrite shows in no diff"
        assert changed - applied <= {"skeleton", "prefix", "suffix"}, "a graph changed without a word"
        lines = [line for line in text.splitlines() if line.startswith(("+", "-")) and line[:3] not in ("+++", "---")]
        assert [line for line in lines if not re.match(r"[+-](%\w+: .* = |return )", line)] == [], "a line is no node"
        assert len(lines) < 150, "a diff that nobody would read"
