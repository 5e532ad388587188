"""`explain` of a bundle for a GPU: the kernel of each node, what it costs at best and, measured, what it takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import deepinfer_compile as dc
from deepinfer_compile.bundle import BundleFiles, read_bundle
from deepinfer_compile.cli import app, facts, measuring
from deepinfer_compile.cli.explain_model import explain_bundle
from deepinfer_compile.cli.kernel_words import choice_words
from deepinfer_compile.errors import CannotMeasure
from deepinfer_compile.runtime.kernel_blocks import kernel_record
from deepinfer_compile.runtime.launch import check_operands, plan_from_json
from tests import models

TARGET = "nvidia-sm90"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "bundle"
    dc.build(models.make("deepseek_v3"), out, target=TARGET)
    return out


class Checked:
    """Stands for a kernel on a GPU: refuses operands that it would not take, and counts."""

    calls = 0

    def __init__(self, files: BundleFiles, path: str, device: torch.device) -> None:
        self.plan = plan_from_json(kernel_record(files, path)["plan"], path)
        self.name = path

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        check_operands(self.name, self.plan, operands)
        assert len(results) == len(self.plan.results)
        assert all(t.is_contiguous() for t in results)
        Checked.calls += 1


def timer(run: Any) -> Any:
    run()
    return SimpleNamespace(us=float(Checked.calls))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("CONTEXT", 70), ("MANY", 90), ("MOST", 5)):
        monkeypatch.setattr(facts, name, number)


@pytest.mark.usefixtures("small")
def test_every_choice_is_measured_once(bundle: Path) -> None:
    files = read_bundle(bundle)
    rows = explain_bundle(files)["kernels"]
    Checked.calls = 0
    measuring.measure(files, rows, Checked, timer)
    choices = [(r["program"] == "prefill", c) for r in rows for c in r.get("choices", ())]
    assert choices
    for row in rows:
        limits = [c["tokens"] for c in row.get("choices", ()) if c["tokens"] is not None]
        assert all(c["at"] > max(limits, default=0) for c in row.get("choices", ()) if c["tokens"] is None)
    assert all(c["measured"]["us"] is not None for _, c in choices)
    different = {(prefill, c["hash"], c["at"]) for prefill, c in choices}
    assert len({c["measured"]["us"] for _, c in choices}) == Checked.calls == len(different)
    words = choice_words(choices[0][1])
    assert re.search(r"us at best, \S+ us measured; default$", words)


@pytest.mark.usefixtures("small")
def test_operands_that_do_not_fit_are_no_number(bundle: Path) -> None:
    def full(run: Any) -> Any:
        raise torch.OutOfMemoryError

    files = read_bundle(bundle)
    rows = explain_bundle(files)["kernels"]
    measuring.measure(files, rows, Checked, full)
    found = next(c for r in rows for c in r.get("choices", ()))
    assert found["measured"] == {"us": None, "reason": "its operands do not fit into memory"}
    assert "not measured: its operands do not fit into memory" in choice_words(found)


def test_explain_shows_the_kernels_of_a_layer(bundle: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(bundle)])
    assert done.exit_code == 0
    layer = next(part for part in done.stdout.split("\n\n") if part.startswith("layers 0-1"))
    assert re.search(r"decode \S+: latent_attention on nvidia-sm90", layer)
    assert re.search(r"GFLOP, \S+ MB, \S+ us at best", layer)


def test_explain_shows_every_node_that_computes(bundle: Path) -> None:
    shown = CliRunner().invoke(app, ["explain", str(bundle)]).stdout
    sections = {part.split("\n")[0].split(", ")[-1]: part for part in shown.split("\n\n")}
    rows = explain_bundle(read_bundle(bundle))["kernels"]
    assert {row["block"] for row in rows} > {"suffix", "logits"}
    for row in rows:
        assert f" {row['node']}: " in sections[row["block"]]


def test_library_choices_are_said_and_not_measured() -> None:
    choice = {"tokens": None, "library": "torch"}
    assert choice_words(choice) == "more tokens: by torch, whose library is as fast there or faster"


def test_without_the_gpu_nothing_is_measured(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CannotMeasure, match="nvidia-sm90, and this machine has no such GPU"):
        measuring.measure(read_bundle(bundle), explain_bundle(read_bundle(bundle))["kernels"])
    done = CliRunner().invoke(app, ["explain", "deepseek_v3", "--measure"])
    assert done.exit_code == 2
    assert "is not a bundle" in done.stderr
