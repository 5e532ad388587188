"""Every op with a kernel gets it, every dialect op without one is reported, and results hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer_compile.errors import GraphInvalid
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, tensor
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.targets.cpu import KERNELS as NAMES
from deepinfer_compile.verify import contiguous, verify
from tests.cpu_library import load
from tests.passes.harness import calls, check_equal, run_passes
from tests.passes.stages import canonical, go_on

A = torch.ops.aten
KERNELS = tuple((op, f"deepinfer_cpu.{kernel}") for op, kernel in NAMES)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load()


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "mixtral"])
def test_kernels_replace_ops_and_results_hold(name: str) -> None:
    model, before = canonical(name)
    program, records = go_on(before, CacheAttention(), SelectKernels(kernels=KERNELS))
    for op, _ in KERNELS:
        assert calls(program, op) == 0
    assert calls(program, "deepinfer_cpu.cached_attention") == len([b for b in program.blocks if b.startswith("layer")])
    assert records[-1].count("missed") == 0
    check_equal(program, model, tol=5e-6, chunk=13)


def test_ops_without_a_kernel_are_reported() -> None:
    _, records = go_on(canonical("mixtral")[1], CacheAttention(), SelectKernels(kernels=KERNELS[:2]))
    reasons = [r.reason for r in records[-1].remarks if r.kind == "missed"]
    assert reasons == ["deepinfer.experts has no kernel here; compiled from its reference"]


def with_a_view() -> tuple[Any, Program]:
    """A cached program whose first block hands on a part of a wider table, as some models' rotary tables are."""
    model, before = canonical("llama")
    program, _ = go_on(before, CacheAttention())
    program = program.clone()
    graph = program.blocks["prefix"].graph
    output = graph.output_node()
    table = output.args[0][1]  # type: ignore[index]
    edit = Editor(graph, output)
    wide = edit.call(A.cat.default, [table, table], -1)
    output.replace_input_with(table, edit.call(A.slice.Tensor, wide, -1, 0, tensor(table).shape[-1]))
    program.blocks["prefix"].recompile()
    return model, program


def test_what_blocks_hand_on_is_contiguous() -> None:
    """Compiled blocks take every input for contiguous."""
    model, program = with_a_view()
    assert not contiguous(output_values(program.blocks["prefix"])[1])
    lowered, _ = run_passes(model, SelectKernels(kernels=KERNELS), program=program)
    assert all(contiguous(v) for gm in lowered.blocks.values() for v in output_values(gm))
    check_equal(lowered, model, tol=5e-6, chunk=13)


def test_lowered_blocks_that_hand_on_views_are_refused() -> None:
    _, program = with_a_view()
    with pytest.raises(GraphInvalid, match="prefix: output 1 goes to layer0 and is not contiguous"):
        verify(replace(program, facts=program.facts | {Fact.LOWERED}), frozenset(), "test")


@pytest.mark.parametrize("width", [0, 3])
def test_what_has_no_elements_is_contiguous(width: int) -> None:
    """A slice of width 0 keeps the strides of what it is a slice of, and so does its copy."""
    rows = torch.empty(2, 5, 8)[..., :width]
    assert contiguous(rows) == (width == 0) == rows.is_contiguous()
    assert contiguous(rows.clone(memory_format=torch.contiguous_format))
