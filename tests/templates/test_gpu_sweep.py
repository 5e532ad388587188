"""A sweep on the GPU of this machine: compiled in parallel, compared, timed in CUDA graphs, kept and used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile import kernel_ops
from deepinfer_compile.kernels import render_kernel
from deepinfer_compile.sweep import Sweep
from deepinfer_compile.sweep_machine import this_machine
from deepinfer_compile.sweep_shapes import Shape
from deepinfer_compile.tuned import Tuned
from deepinfer_compile.tuning import Store
from tests.sweeping import shape, spec_of

pytestmark = pytest.mark.gpu


def some(configs: list[Any]) -> Any:
    """The default and a few others."""
    return [configs[0], *configs[1 :: max(1, len(configs) // 8)]]


@pytest.mark.parametrize(
    ("name", "case", "tokens", "context"),
    [
        ("linear", "narrow", 1, 1),
        ("rms_norm", "typical", 512, 1),
        ("experts", "crowded", 64, 1),
        ("cached_latent_attention", "typical", 16, 512),
        ("route", "typical", 64, 1),
        ("cached_attention", "typical", 16, 512),
    ],
)
def test_kernels_are_swept(
    name: str, case: str, tokens: int, context: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(name)
    params = next(c.params for c in spec.cases if c.name == case)
    whole = Sweep._configs
    monkeypatch.setattr(Sweep, "_configs", lambda self, shape: some(whole(self, shape)))
    machine, timer = this_machine()
    (found,) = Sweep(machine, timer, Store(tmp_path)).run([shape(spec, params, tokens, context)])
    assert found.bucket.default_us is not None, found.bucket.measurements[0].rejected
    assert all(m.us is None or 0.5 < m.us < 1e6 for m in found.bucket.measurements)
    assert found.bucket.counts()["measured"] > 1
    chosen = Tuned(tmp_path, machine.target, machine.limits, machine.name).choose(spec, params, tokens)
    assert chosen.bucket == tokens
    assert chosen.us is not None
    assert chosen.us <= found.bucket.default_us


def test_what_is_wrong_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of("linear")
    params = next(c.params for c in spec.cases if c.name == "narrow")

    def rendered(spec: Any, params: Any, config: Any, dialect: str) -> str:
        text = render_kernel(spec, params, config, dialect)
        return text.replace("acc.to(out", "(1.05 * acc).to(out") if config.num_stages == 4 else text

    monkeypatch.setattr(kernel_ops, "render_kernel", rendered)
    plain = [c for c in spec.space(params, this_machine()[0].limits) if c.split == 1][::9]
    monkeypatch.setattr(Sweep, "_configs", lambda self, shape: plain)
    machine, timer = this_machine()
    (found,) = Sweep(machine, timer, Store(tmp_path)).run([Shape(spec, params, 1, ((1, 1, 1),))])
    for measurement in found.bucket.measurements:
        wrong = measurement.config["num_stages"] == 4
        assert (measurement.us is None) == wrong or "spills" in measurement.rejected
    assert torch.cuda.is_available()
