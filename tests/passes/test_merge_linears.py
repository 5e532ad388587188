"""Siblings merge, strangers do not; the merged call means the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_compile import ops
from deepinfer_compile.graph import is_op
from deepinfer_compile.passes import merge_linears
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.merge_linears import MergeLinears
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.program import Program
from deepinfer_compile.targets.cpu import KERNELS as NAMES
from tests import models
from tests.cpu_library import load
from tests.passes.harness import calls, check_equal, run_passes
from tests.passes.stages import canonical, captured, go_on

KERNELS = tuple((op, f"deepinfer_cpu.{kernel}") for op, kernel in NAMES)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load()


def test_query_key_value_and_gate_up_merge() -> None:
    model, program = canonical("llama")
    passes = (CacheAttention(), SelectKernels(kernels=KERNELS))
    merge = MergeLinears(one="deepinfer_cpu.linear", many="deepinfer_cpu.linears")
    before, _ = go_on(program, *passes)
    after, records = go_on(program, *passes, merge)
    assert calls(before, "deepinfer_cpu.linear", "layer0") == 7
    assert calls(after, "deepinfer_cpu.linear", "layer0") == 2
    assert calls(after, "deepinfer_cpu.linears", "layer0") == 2
    assert records[-1].count("applied") == 2
    check_equal(after, model, tol=5e-6)
    _, records = run_passes(model, merge, program=after)
    assert records[-1].count("applied") == 0


def test_without_names_nothing_happens() -> None:
    _, records = go_on(canonical("llama")[1], CacheAttention(), SelectKernels(), MergeLinears())
    assert records[-1].remarks == ()
    assert torch.is_grad_enabled()


SIBLINGS = MergeLinears(one="aten.linear", many="deepinfer.linears", most=3, large=True)


def merged(model: Any, program: Program | None = None) -> tuple[list[int], Program]:
    """How many weights each merged call of the first layer has, and the program, of one that is captured already or of
    the model's."""
    after, _ = run_passes(model, Canonicalize(), CacheAttention(), SIBLINGS, program=program)
    nodes = after.blocks["layer0"].graph.nodes
    return [len(n.args[1]) for n in nodes if is_op(n, ops.LINEARS.overload)], after


@pytest.mark.parametrize(("hidden", "wanted"), [(192, []), (384, [2]), (768, [3, 2])])
def test_weights_that_are_large_together_merge_from_atens_linear(hidden: int, wanted: list[int]) -> None:
    """Query, key and value take 5/3 of hidden squared elements, gate and up 4 times hidden squared."""
    model = models.make("llama", num_hidden_layers=1, hidden_size=hidden, intermediate_size=2 * hidden)
    assert merged(model)[0] == []
    assert merged(model.to(torch.bfloat16))[0] == wanted


@pytest.mark.parametrize("name", ["llama", "qwen2", "deepseek_v3"])
def test_the_dialects_call_means_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_linears, "is_large", lambda *weights: True)
    model, program = captured(name)
    found, after = merged(model, program)
    assert found == ([2, 2] if name == "deepseek_v3" else [3, 2])
    check_equal(after, model, tol=5e-6)


def test_more_siblings_than_a_call_takes_become_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge_linears, "is_large", lambda *weights: True)
    model = models.make("llama", num_hidden_layers=1)
    pairs = MergeLinears(one="aten.linear", many="deepinfer.linears", most=2)
    after, records = run_passes(model, Canonicalize(), CacheAttention(), pairs)
    nodes = after.blocks["layer0"].graph.nodes
    assert [len(n.args[1]) for n in nodes if is_op(n, ops.LINEARS.overload)] == [2, 2]
    assert records[-1].count("applied") == 2
    assert calls(after, "aten.linear", "layer0") == 3
    check_equal(after, model, tol=5e-6)
