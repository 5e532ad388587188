"""Both doors take their configurations from a store: a bundle holds them and says so, the backend calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import deepinfer_compile as dc
from deepinfer_compile import backend, kernel_ops, ops
from deepinfer_compile.builder import compile_model
from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.cli import app
from deepinfer_compile.errors import BadOption, BadTuning
from deepinfer_compile.kernels import Call, Refused, call_of, select
from deepinfer_compile.settings import BuildSettings
from deepinfer_compile.targets import nvidia
from deepinfer_compile.targets.nvidia import SM90
from deepinfer_compile.tuned import Tuned
from tests import models
from tests.sweeping import DEVICE, filled, shape, spec_of

SIZES = {"num_hidden_layers": 1, "hidden_size": 24, "intermediate_size": 16, "num_attention_heads": 2}
MEASURED = (1, 64)
LADDER = (2, 16, 128, 8192)


@pytest.fixture(scope="module")
def model() -> Any:
    return models.make("llama", num_key_value_heads=1, vocab_size=60, **SIZES)


def norm_params(model: Any) -> Any:
    """What the model's decode program fixes about its first norm."""
    for block in compile_model(model, BuildSettings.of()).programs["decode"].blocks.values():
        for node in block.graph.nodes:
            call = call_of(node, "decode")
            found = select(call, "triton") if call is not None and call.op is ops.RMS_NORM else None
            if found is not None and not isinstance(found, Refused):
                return found[1]
    raise AssertionError("the model has no norm")


def slow_default(config: Any) -> float:
    """Four rows and two warps are best, and no default."""
    return 12.5 if (config.rows, config.num_warps) == (4, 2) else 50.0


@pytest.fixture(scope="module")
def store(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    spec, params = spec_of("rms_norm"), norm_params(model)
    filled(folder, [shape(spec, params, n) for n in MEASURED], slow_default)
    return folder


@pytest.fixture(scope="module")
def bundle(model: Any, store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(model, tmp_path_factory.mktemp("tuned") / "b", store)


def built(model: Any, out: Path, store: Path) -> Path:
    """A bundle with fewer choices than usual, since each is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvidia, "TOKENS", LADDER)
        dc.build(model, out, target="nvidia-sm90", tuned=store)
    return out


def test_a_bundle_holds_the_stored_configurations(bundle: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["inspect", str(bundle), "--json"]).stdout)["kernels"]
    norms = [r for r in found if r["op"] == "deepinfer.rms_norm" and r["program"] == "decode"]
    others = [r for r in found if r.get("kernel") and r["op"] != "deepinfer.rms_norm"]
    assert norms
    assert others
    assert all(choice["tuned"] is None for row in others for choice in row["choices"])
    for row in norms:
        told = {choice["tokens"]: choice for choice in row["choices"]}
        for upto, tokens in ((2, 1), (128, 64)):
            assert told[upto]["config"] == {"rows": 4, "num_warps": 2, "pdl": True}
            assert told[upto]["tuned"] == {
                "upto": upto, "tokens": tokens, "us": 12.5, "default_us": 50.0, "device": DEVICE,
            }  # fmt: skip
        assert [c["tuned"] is None for c in row["choices"]] == [False, True, False, *[True] * (len(told) - 3)]
        assert told[16]["config"] != told[2]["config"]


def test_manifest_report_and_inspect_say_so(bundle: Path) -> None:
    tuning = read_bundle(bundle).manifest.tuning["nvidia-sm90"]
    assert tuning["device"] == DEVICE
    kernels = read_bundle(bundle).manifest.variants["nvidia-sm90"]["kernels"]
    assert tuning["kernels"].keys() < kernels.keys()
    report = (bundle / "report.md").read_text()
    for name in kernels:
        line = f"  - configuration of {name[:12]}: "
        tuned = f"tuned, 12.5 us at 1 tokens on {DEVICE}; tuned, 12.5 us at 64 tokens on {DEVICE}"
        assert f"{line}{tuned if name in tuning['kernels'] else 'default'}\n" in report
    shown = CliRunner().invoke(app, ["inspect", str(bundle)]).stdout
    assert f"; tuned, 12.5 us at 1 token, default 50.0 us, {DEVICE}\n" in shown
    assert "; default\n" in shown


def test_a_bundle_that_says_nonsense_is_refused(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepinfer_compile.bundle.reader import BundleFiles

    files = read_bundle(bundle)
    files.manifest.tuning["nvidia-sm90"]["kernels"] = {"x": [{"upto": "2"}]}
    monkeypatch.setattr("deepinfer_compile.bundle.read_bundle", lambda path: files)
    assert isinstance(files, BundleFiles)
    done = CliRunner().invoke(app, ["inspect", str(bundle)])
    assert done.exit_code == 8
    assert "tuning.nvidia-sm90.kernels.x[0]" in done.stderr


def test_the_command_line_takes_the_store_and_says_what_was_of_no_use(
    model: Any, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model.save_pretrained(tmp_path / "model")
    arguments = ["build", str(tmp_path / "model"), "-o", str(tmp_path / "b"), "--graph-only", "--tuned"]
    done = CliRunner().invoke(app, [*arguments, str(store)])
    assert done.exit_code == 0, done.output
    with monkeypatch.context() as patch:
        patch.setattr("deepinfer_compile.tuning.spec_hash", lambda spec: "0" * 16)
        old = tmp_path / "old"
        filled(old, [shape(spec_of("rms_norm"), norm_params(model), 1)], slow_default)
    built(model, tmp_path / "stale", old)
    notes = read_bundle(tmp_path / "stale").manifest.variants["nvidia-sm90"]["notes"]
    assert any("tuning record not used: rms_norm-nvidia-sm90-" in n and "another version" in n for n in notes)
    assert any("no configuration is from old: " in n for n in notes)
    assert not read_bundle(tmp_path / "stale").manifest.tuning
    with pytest.raises(BadOption, match="no such folder"):
        dc.build(model, tmp_path / "x", tuned=tmp_path / "none")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "x.json").write_text("{}")
    with pytest.raises(BadTuning, match=r"x\.json"):
        dc.build(model, tmp_path / "x", target="nvidia-sm90", tuned=tmp_path / "bad")
    assert not (tmp_path / "x").exists()


LINEAR = spec_of("linear")


def operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor, None]:
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 64, generator=generator).bfloat16()
    return x, torch.randn(48, 64, generator=generator).bfloat16(), None


def linear_store(folder: Path, **machine: Any) -> Any:
    """Measured at one token: the default is half as fast as one with four stages less."""
    params = LINEAR.bind(Call(ops.LINEAR, dict(zip(("x", "weight", "bias"), operands(1))), "decode"))
    usual = LINEAR.default(params, SM90.limits, 1)
    best = next(c for c in LINEAR.space(params, SM90.limits) if c.block_n == 128 and c != usual)
    filled(folder, [shape(LINEAR, params, 1)], lambda c: 3.0 if c == best else 6.0, **machine)
    return best


def test_the_backend_s_kernels_are_the_stored_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = linear_store(tmp_path)
    asked: list[Any] = []
    monkeypatch.setattr(kernel_ops, "operator", lambda spec, params, config: asked.append(config) or _stand_in())
    rendered = kernel_ops.Rendered(SM90.limits, Tuned(tmp_path, SM90.name, SM90.limits, DEVICE))
    for tokens in (1, 2, 3):
        rendered.call(ops.LINEAR, operands(tokens), {})
    assert asked[:2] == [best, best]
    assert asked[2] == LINEAR.default(LINEAR.params(64, 48, torch.bfloat16, False, 16), SM90.limits, 3)
    assert rendered.stored == {"linear": 2}
    assert rendered.used == {"linear": 3}


def _stand_in() -> kernel_ops.Kernel:
    return kernel_ops.Kernel(torch.ops.deepinfer.linear.default, ("x", "weight", "bias"))


def test_the_backend_knows_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linear_store(tmp_path, name="This GPU")
    linear_store(tmp_path, name="That GPU")
    monkeypatch.setattr(backend, "device_target", lambda device: SM90)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "That GPU")
    with torch._subclasses.FakeTensorMode():
        value = torch.empty(1, device="meta")
    found = backend._rendered([value], str(tmp_path))
    assert found is not None
    assert found.tuned is not None
    assert found.tuned.device == "That GPU"
    assert backend._rendered([value], None).tuned is None  # type: ignore[union-attr]


def test_options_name_the_store(tmp_path: Path) -> None:
    linear_store(tmp_path)
    layer = torch.nn.Linear(8, 8)
    given = torch.randn(3, 8)
    with torch.no_grad():
        made = torch.compile(layer, backend="deepinfer", options={"tuned": str(tmp_path)})(given)
        assert torch.allclose(made, layer(given), atol=1e-5)
        torch._dynamo.reset()
        with pytest.raises(Exception, match="no such folder"):
            torch.compile(layer, backend="deepinfer", options={"tuned": str(tmp_path / "none")})(given)
