"""Siblings merge, strangers do not; the merged call means the same."""

from __future__ import annotations

import pytest
import torch

from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.merge_linears import MergeLinears
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.targets.cpu import KERNELS as NAMES
from tests import models
from tests.cpu_library import load
from tests.passes.harness import calls, check_equal, run_passes

KERNELS = tuple((op, f"deepinfer_cpu.{kernel}") for op, kernel in NAMES)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load()


def test_query_key_value_and_gate_up_merge() -> None:
    model = models.make("llama")
    passes = (Canonicalize(), CacheAttention(), SelectKernels(kernels=KERNELS))
    merge = MergeLinears(one="deepinfer_cpu.linear", many="deepinfer_cpu.linears")
    before, _ = run_passes(model, *passes)
    after, records = run_passes(model, *passes, merge)
    assert calls(before, "deepinfer_cpu.linear", "layer0") == 7
    assert calls(after, "deepinfer_cpu.linear", "layer0") == 2
    assert calls(after, "deepinfer_cpu.linears", "layer0") == 2
    assert records[-1].count("applied") == 2
    check_equal(after, model, tol=5e-6)
    _, records = run_passes(model, merge, program=after)
    assert records[-1].count("applied") == 0


def test_without_names_nothing_happens() -> None:
    model = models.make("llama")
    _, records = run_passes(model, Canonicalize(), CacheAttention(), SelectKernels(), MergeLinears())
    assert records[-1].remarks == ()
    assert torch.is_grad_enabled()
