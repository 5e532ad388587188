"""`explain`, `dump`, `replay`, `bisect`, `support` and `doctor`: they say what is so, and planted faults are found."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from deepinfer_compile.capture import capture
from deepinfer_compile.cli import check_environment, examine, support_table
from deepinfer_compile.errors import PassFailed, UnsupportedConstruct
from deepinfer_compile.models import more, tiny
from deepinfer_compile.observe import Reproducer
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import default
from tests import models
from tests.cli.conftest import Run, Toy, document

# doubles the epsilon of the second norm it meets, as a module that a user could bring
PLANTED = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from deepinfer_compile.graph import Editor, is_op
from deepinfer_compile.passbase import NONE
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.passes.canonicalize import Canonicalize

@dataclass(frozen=True)
class Wrong:
    name: ClassVar[str] = "wrong"
    level: ClassVar[str] = "layer"
    needs = makes = breaks = NONE

    def run(self, gm, ctx):
        for i, node in enumerate(n for n in list(gm.graph.nodes) if is_op(n, torch.ops.aten.rsqrt.default)):
            if ctx.claim(node, "planted"):
                edit = Editor(gm.graph, node)
                edit.replace(node, edit.call(torch.ops.aten.mul.Tensor, edit.call(*_same(node)), 1.0 + 0.5 * i))

def _same(node):
    return (node.target, *node.args)

wrong = Pipeline((Canonicalize(), Wrong()))
def good():
    return Pipeline((Canonicalize(),))
text = "no pipeline"
"""


def test_explain_a_folder_without_weights(cli: Run, toy: Toy, tmp_path: Path) -> None:
    shutil.copy(toy.folder / "config.json", tmp_path)
    result = cli("explain", tmp_path, "--json")
    assert result.exit_code == 0, result.stderr
    found = document(result)
    kind = found["kinds"][0]
    assert kind["layers"] == [0, 1, 2]
    ran = {p.name for p in default().passes}
    told = {p["pass"] for k in found["kinds"] for p in k["passes"]} | {q.split("/")[1] for q in found["quiet"]}
    assert ran <= told, "a pass is neither explained nor listed as having found nothing"
    cached = next(p for p in kind["passes"] if p["pass"] == "cache-attention")
    assert cached["applied"] == 1
    assert sum(cached["reasons"].values()) == 1


def test_explain_in_words_and_of_a_bundle(cli: Run, toy: Toy, plain: Toy) -> None:
    assert "layers 0 (1), layer0" in cli("explain", plain.folder).stdout
    found = document(cli("explain", toy.bundle, "--json"))
    applied = {p["pass"]: p["applied"] for k in found["kinds"] if k["name"] == "whole model" for p in k["passes"]}
    assert applied["cache-attention"] >= 1
    assert "layers 0-2 (3)" in cli("explain", toy.bundle).stdout


def test_explain_by_name_uses_the_default_configuration(cli: Run) -> None:
    found = document(cli("explain", "gpt2", "--json"))
    assert found["model"] == "GPT2LMHeadModel"
    assert found["kinds"][0]["layers"] == list(range(12))


def test_explain_refuses_what_it_does_not_know(cli: Run, tmp_path: Path) -> None:
    unknown = cli("explain", "deepseek_v33")
    assert unknown.exit_code == 5
    assert "did you mean deepseek_v3" in unknown.stderr
    assert cli("explain", tmp_path).exit_code == 7
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert cli("explain", tmp_path).exit_code == 5
    assert cli("explain", "gpt2", "--waive", "nothing").exit_code == 6


def test_dump(cli: Run, plain: Toy, tmp_path: Path) -> None:
    result = cli("dump", plain.folder, tmp_path / "d", "--json")
    assert result.exit_code == 0, result.stderr
    names = document(result)["files"]
    assert names == sorted(p.name for p in (tmp_path / "d").iterdir() if p.name[0] != ".")
    for p in default().passes:
        assert any(n.endswith(f"-packed-{p.name}.txt") for n in names)
    only = document(cli("dump", plain.folder, tmp_path / "e", "--pass", "cache-attention", "--json"))["files"]
    assert [n for n in only if n.endswith(".diff")] == ["001-packed-cache-attention.diff"]
    assert cli("dump", plain.folder, tmp_path / "f", "--pass", "nope").exit_code == 6
    assert not (tmp_path / "f").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    assert cli("dump", plain.folder, tmp_path / "mine").exit_code == 8


def test_replay_of_a_model(cli: Run, plain: Toy) -> None:
    own = document(cli("replay", plain.folder, "--json"))
    assert own["random_weights"] is False
    assert {p.name for p in default().passes} <= {s["name"] for s in own["stages"]}
    assert max(s["exact"] for s in own["stages"]) < 1e-9
    assert max(s["native"] for s in own["stages"]) < 2e-5
    assert "random weights" in cli("replay", plain.folder, "--random").stdout


def test_replay_of_a_reproducer(cli: Run, plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Canonicalize, gm: Any, ctx: Any) -> None:
        raise ValueError("planted")

    with monkeypatch.context() as patched:
        patched.setattr(Canonicalize, "run", crash)
        with pytest.raises(PassFailed):
            Pipeline((Canonicalize(),)).run(capture(plain.model), observers=[Reproducer(tmp_path)])
        file = tmp_path / "canonicalize.reproducer.json"
        assert document(cli("replay", file, "--json"))["fails"] is True
    assert "succeeds now" in cli("replay", file).stdout
    (tmp_path / "x.json").write_text("{}")
    assert cli("replay", tmp_path / "x.json").exit_code == 2


def test_bisect_names_pass_and_rewrite(cli: Run, plain: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "planted_passes.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    result = cli("bisect", plain.folder, "--pipeline", "planted_passes:wrong", "--json")
    assert result.exit_code == 6, result.stderr
    culprit = document(result)["culprit"]
    assert (culprit["name"], culprit["application"]) == ("wrong", 2)
    assert culprit["node"].startswith("layer0.")
    assert "first at its rewrite 2" in cli("bisect", plain.folder, "--pipeline", "planted_passes:wrong").stdout
    good = cli("bisect", plain.folder, "--pipeline", "planted_passes:good")
    assert (good.exit_code, "every pass keeps the results" in good.stdout) == (0, True)
    for name in ("planted_passes:text", "planted_passes:missing", "no_such_module:x", "planted_passes"):
        assert cli("bisect", plain.folder, "--pipeline", name).exit_code == 2, name


def test_support_tries_and_reports(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = document(cli("support", "gpt2", "--write", tmp_path / "table.md", "--json"))
    assert [(r["kind"], r["supported"], r["layers"], r["blocks"]) for r in rows] == [("gpt2", True, 3, 1)]
    assert rows[0]["operations"]["cached_attention"] == 3
    assert 0 <= rows[0]["error"] < 2e-6
    assert "| gpt2 | GPT2LMHeadModel | 3 (1) |" in (tmp_path / "table.md").read_text()
    assert cli("support", "gpt22").exit_code == 5
    assert cli("support", "gpt2", "--write", tmp_path / "no" / "table.md").exit_code == 8
    assert [p.name for p in tmp_path.iterdir()] == ["table.md"]


def test_support_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(model: Any) -> Any:
        raise UnsupportedConstruct(construct="a | b", fix="wait", where="/x/site-packages/m.py:3")

    monkeypatch.setattr(examine, "capture", refuse)
    row = examine.examine("llama")
    assert (row.stage, row.supported, row.error) == ("capture", False, None)
    text = support_table.markdown([row])
    assert "0 of 1 architecture" in text
    assert "| llama | LlamaForCausalLM | capture |" in text
    assert "a \\| b (m.py:3) |" in text


def test_support_sees_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = examine.eager_logits
    monkeypatch.setattr(examine, "eager_logits", lambda *args: honest(*args) * 1.001)
    row = examine.examine("gpt2")
    assert (row.stage, row.supported) == ("done", False)
    assert "differ from eager" in row.problem


def test_tiny_models_have_one_name_each() -> None:
    assert not tiny.CONFIGS.keys() & more.MORE.keys()
    kinds = {tiny.config(name).model_type for name in (*tiny.CONFIGS, *more.MORE)}
    assert {
        "deepseek_v32",
        "deepseek_v4",
        "gemma2",
        "gemma4_text",
        "qwen2",
        "gpt2",
        "olmo2",
        "minimax",
        "phi3",
    } <= kinds
    assert models.CONFIGS is tiny.CONFIGS


def test_doctor(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {c["name"]: c for c in document(cli("doctor", "--json"))["checks"]}
    assert checks["torch"]["ok"]
    assert re.match(r"\d+\.\d+", checks["torch"]["found"])
    assert {"triton", "extra hf", "C++ compiler", "OpenMP", "cache folder", "GPU", "x86-64-v3"} <= checks.keys()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPINFER_COMPILE_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = cli("doctor")
    assert shown.exit_code == 0
    flat = " ".join(shown.stdout.split())
    assert "disables native code" in flat
    assert "disables reuse of compiled code" in flat


def test_doctor_fails_where_nothing_would_work(cli: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = check_environment.Check("torch", False, "1.0, needs 2.11", "everything", True)
    monkeypatch.setattr(check_environment, "_package", lambda *args: broken)
    result = cli("doctor", "--json")
    assert (result.exit_code, document(result)["ok"]) == (3, False)
    assert "MISSING" in cli("doctor").stdout


def test_doctor_asks_for_what_the_package_asks_for() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    asked = {m[1]: m[2] for d in project["dependencies"] if (m := re.match(r"([a-z0-9-]+)>=([0-9.]+)", d))}
    told = {name: oldest for name, oldest, *_ in check_environment.PACKAGES}
    assert told.items() <= asked.items()
    assert asked.keys() - told.keys() == {"typer", "rich"}  # without them there is no doctor
    assert check_environment._numbers("2.13.0+cpu") == (2, 13, 0)
    assert check_environment._numbers("3.0.dev1") == (3, 0)
    assert json.dumps([vars(check_environment._python())])
