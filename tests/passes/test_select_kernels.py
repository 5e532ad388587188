"""Every op with a kernel gets it, every dialect op without one is reported, and results hold."""

from __future__ import annotations

import pytest

from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.targets.cpu import KERNELS as NAMES
from tests import models
from tests.cpu_library import load
from tests.passes.harness import calls, check_equal, run_passes

KERNELS = tuple((op, f"deepinfer_cpu.{kernel}") for op, kernel in NAMES)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral"])
def test_kernels_replace_ops_and_results_hold(name: str) -> None:
    model = models.make(name)
    program, records = run_passes(model, Canonicalize(), CacheAttention(), SelectKernels(kernels=KERNELS))
    for op, _ in KERNELS:
        assert calls(program, op) == 0
    assert calls(program, "deepinfer_cpu.cached_attention") == len([b for b in program.blocks if b.startswith("layer")])
    assert records[-1].count("missed") == 0
    check_equal(program, model, tol=5e-6, chunk=13)


def test_ops_without_a_kernel_are_reported() -> None:
    model = models.make("mixtral")
    _, records = run_passes(model, Canonicalize(), CacheAttention(), SelectKernels(kernels=KERNELS[:2]))
    reasons = [r.reason for r in records[-1].remarks if r.kind == "missed"]
    assert reasons == ["deepinfer.experts has no kernel here; compiled from its reference"]
