"""ONNX export: what onnxruntime gives is what eager gives, at any length, and nothing half written is left."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import deepinfer_compile as dc
from deepinfer_compile import onnx_file
from deepinfer_compile.cli import app
from deepinfer_compile.errors import BadOption, ExportInvalid, MissingExtra, NoOnnxForm, OutputFailed
from tests import models
from tests.plain_model import make_plain

LIMIT = 2e-5
"""Largest difference of logits over the largest logit, fp32; measured 3e-7 to 1e-6."""
LENGTHS = (1, 2, 45, 90)
DEPTH = {"llama": 2, "mixtral": 2, "deepseek_v3": 3}


def tiny(name: str) -> Any:
    layers = {"num_hidden_layers": DEPTH[name]} if name in DEPTH else {}
    return models.make(name, **layers)


def session(path: Path) -> Any:
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def ids_of(length: int) -> Tensor:
    return torch.randint(0, models.VOCAB, (1, length), generator=torch.Generator().manual_seed(length))


def logits(ran: Any, ids: Tensor) -> np.ndarray:
    given = {"input_ids": ids.numpy(), "position_ids": torch.arange(ids.shape[1])[None].numpy()}
    found: np.ndarray = ran.run(None, {i.name: given[i.name] for i in ran.get_inputs()})[0]
    return found


def check_equal(path: Path, model: Any, lengths: tuple[int, ...] = LENGTHS) -> None:
    """onnxruntime against eager Transformers, run twice."""
    ran = session(path)
    assert [o.name for o in ran.get_outputs()] == ["logits"]
    for length in lengths:
        ids = ids_of(length)
        with torch.no_grad():
            want = model(ids, use_cache=False).logits.numpy()
        got = logits(ran, ids)
        assert got.shape == want.shape == (1, length, models.VOCAB)
        assert np.abs(got - want).max() <= LIMIT * np.abs(want).max(), length
        assert np.array_equal(got, logits(ran, ids))


@pytest.mark.parametrize("name", DEPTH)
def test_equals_eager_at_every_length(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    made = dc.export_onnx(model, tmp_path / "m.onnx")
    check_equal(made.path, model)
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert (made.inputs, made.data) == (("input_ids", "position_ids"), None)
    graph = onnx.load(made.path).graph
    assert {n.domain for n in graph.node} == {""}, "only standard operations"
    assert {i.name for i in graph.initializer} >= {"model.embed_tokens.weight", "model.norm.weight"}


# window, sinks, softcap, interleaved gates, complex rotary tables, length-dependent rotary, alibi, partial rotary
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(n for n in models.CONFIGS if n not in DEPTH),
        *(
            "gemma2",
            "gemma4_text",
            "phi3_longrope",
            "bloom",
            "gptj",
            "gpt2",
            "cohere",
            "phimoe",
            "qwen2_moe",
            "minimax_m2",
        ),
    ],
)
def test_every_architecture(name: str, tmp_path: Path) -> None:
    model = tiny(name)
    made = dc.export_onnx(model, tmp_path / "m.onnx", verify=True)
    check_equal(made.path, model, (3, 90))
    assert len(made.errors) == 2


def test_a_model_that_is_no_library_model(tmp_path: Path) -> None:
    model = make_plain("einsum")
    path = dc.export_onnx(model, tmp_path / "m.onnx").path
    ids = torch.randint(0, 60, (1, 21), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want = model(ids).numpy()
    got = logits(session(path), ids)
    assert got.shape == want.shape
    assert np.abs(got - want).max() <= LIMIT * np.abs(want).max()


@pytest.fixture(scope="module")
def llama() -> Any:
    return tiny("llama")


def test_large_weights_go_beside_the_model(llama: Any, tmp_path: Path) -> None:
    made = dc.export_onnx(llama, tmp_path / "m.onnx", inline_bytes=1000)
    assert made.data is not None
    assert made.data.name.startswith("m-")
    assert sorted(os.listdir(tmp_path)) == sorted(["m.onnx", made.data.name])
    assert made.path.stat().st_size < 100_000 < made.weight_bytes <= made.data.stat().st_size
    check_equal(made.path, llama, (7, 45))
    (tmp_path / "moved").mkdir()
    for file in (made.path, made.data):
        file.rename(tmp_path / "moved" / file.name)
    check_equal(tmp_path / "moved" / "m.onnx", llama, (7,))


def test_a_new_export_never_meets_old_data(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data file is named by its content, so a crash between the two renames leaves the old pair whole."""
    old = dc.export_onnx(llama, tmp_path / "m.onnx", inline_bytes=1000)
    real = os.replace

    def replace(source: Path, target: Path) -> None:
        if Path(target).suffix == ".onnx":
            raise OSError(28, "No space left on device")
        real(source, target)

    other = models.make("llama", seed=1, num_hidden_layers=2)
    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OutputFailed, match="No space left"):
        dc.export_onnx(other, tmp_path / "m.onnx", inline_bytes=1000)
    monkeypatch.undo()
    check_equal(old.path, llama, (7,))
    new = dc.export_onnx(other, tmp_path / "m.onnx", inline_bytes=1000)
    assert new.data != old.data
    check_equal(new.path, other, (7,))
    assert not [n for n in os.listdir(tmp_path) if n.startswith(".")]


class Twisted(nn.Module):
    """A decoder whose one step has no ONNX form in our tables."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.head = nn.Linear(8, 40)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        return self.head(torch.special.bessel_j0(x))


def test_an_operation_without_a_form_is_named_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_bytes(b"what was there")
    with pytest.raises(NoOnnxForm, match=r"special_bessel_j0.*\n  where: .*test_onnx\.py\", line \d+, in forward"):
        dc.export_onnx(Twisted(), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").read_bytes() == b"what was there"
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_what_the_checker_refuses_is_not_put_in_place(
    llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onnx_file, "OPSET", 1)
    with pytest.raises(ExportInvalid, match=r"m\.onnx"):
        dc.export_onnx(llama, tmp_path / "m.onnx")
    assert os.listdir(tmp_path) == []


def test_verification_sees_wrong_numbers(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    made = dc.export_onnx(llama, tmp_path / "m.onnx", verify=True)
    assert sorted(made.errors) == [5, 73]
    assert max(made.errors.values()) <= LIMIT
    honest = onnx_file.tensor_proto
    monkeypatch.setattr(onnx_file, "tensor_proto", lambda name, t: honest(name, t * (1.001 if "q_proj" in name else 1)))
    with pytest.raises(ExportInvalid, match="its logits differ by"):
        dc.export_onnx(llama, tmp_path / "other.onnx", verify=True)
    assert os.listdir(tmp_path) == ["m.onnx"]
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(MissingExtra, match="onnx-runtime"):
        dc.export_onnx(llama, tmp_path / "other.onnx", verify=True)


def test_options_and_types(llama: Any, tmp_path: Path) -> None:
    for out, dtype in (("m.txt", "float32"), ("m.onnx", "float16")):
        with pytest.raises(BadOption):
            dc.export_onnx(llama, tmp_path / out, dtype=dtype)
    (tmp_path / "f.onnx").mkdir()
    with pytest.raises(BadOption, match="folder"):
        dc.export_onnx(llama, tmp_path / "f.onnx")
    narrow = models.make("llama", dtype=torch.bfloat16, num_hidden_layers=1)
    dc.export_onnx(narrow, tmp_path / "wide.onnx")
    assert narrow.dtype == torch.bfloat16, "the caller's model stays as it is"
    check_equal(tmp_path / "wide.onnx", models.make("llama", dtype=torch.bfloat16, num_hidden_layers=1).float(), (9,))
    dc.export_onnx(narrow, tmp_path / "narrow.onnx", dtype="auto")
    types = {i.data_type for i in onnx.load(tmp_path / "narrow.onnx").graph.initializer if len(i.dims) == 2}
    assert types == {onnx.TensorProto.BFLOAT16}


def test_the_command(tmp_path: Path, llama: Any) -> None:
    pytest.importorskip("onnxruntime")
    llama.save_pretrained(tmp_path / "model")

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, ["export", str(tmp_path / "model"), "-o", str(tmp_path / "m.onnx"), *args])

    result = run("--format", "onnx", "--verify", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["inputs"] == ["input_ids", "position_ids"]
    assert all(e <= LIMIT and not math.isnan(e) for e in found["errors"].values())
    check_equal(tmp_path / "m.onnx", llama, (9, 45))
    assert "output: logits" in run().stdout
    assert run("--format", "tflite").exit_code == 2
    assert run("--dtype", "float8").exit_code == 2
