"""Programs for pass tests: tiny architectures captured once a process, and any small module as a one-block program."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.capture.export import Exported
from deepinfer_compile.capture.partition import partition
from deepinfer_compile.graph import to_text
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program, WeightRef
from tests import models


@functools.cache
def captured(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Program]:
    """A tiny model of an architecture and its program, as captured. Pipelines copy programs, so sharing is safe."""
    model = models.make(name, dtype=dtype)
    return model, capture(model)


@functools.cache
def canonical(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Program]:
    """A tiny model of an architecture and its canonical program."""
    model, program = captured(name, dtype)
    return model, Pipeline((Canonicalize(),)).run(program)[0]


def go_on(program: Program, *passes: Any, **options: Any) -> tuple[Program, list[Record]]:
    """Run passes on a program whose facts are given."""
    text = {name: to_text(gm) for name, gm in program.graphs()}
    after, records = Pipeline(passes, given=program.facts).run(program, **options)
    assert text == {name: to_text(gm) for name, gm in program.graphs()}, "a pass edited its input"
    return after, records


def program_of(module: nn.Module, dynamic: dict[str, dict[int, Any]] | None = None, **examples: Tensor) -> Program:
    """The canonical program of a small module: one block `prefix`, inputs named as the forward's parameters."""
    with torch.no_grad():
        shapes = {k: (dynamic or {}).get(k) for k in examples}
        traced = torch.export.export(module, (), kwargs=examples, dynamic_shapes=shapes, strict=False)
        traced = traced.run_decompositions({})
    sig = traced.graph_signature
    lifted = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
    values = {**traced.state_dict, **traced.constants}
    weights: dict[str, WeightRef] = {}
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.name in lifted:
            name = lifted[node.name]
            held = values[name].detach()
            node.meta["weight"] = name
            weights[node.name] = WeightRef(name, held.dtype, tuple(held.shape), held)
    exported = Exported(traced.graph_module, tuple(sig.user_inputs), weights)
    return Pipeline((Canonicalize(),)).run(partition(exported, None, "small", {}))[0]


def run(program: Program, **inputs: Tensor) -> tuple[Tensor, ...]:
    """Results of a small program on inputs by name; weights are those it was traced with."""
    held = {name: ref.value for name, ref in program.weights.items()}
    found = program.run({**held, **inputs})
    return found if isinstance(found, tuple) else (found,)


def counts(record: Record, kind: str = "applied") -> dict[str, int]:
    """Remarks of a kind per graph."""
    return dict(Counter(r.graph for r in record.remarks if r.kind == kind))


def reasons(record: Record) -> list[str]:
    """Why candidates were left alone."""
    return [r.reason for r in record.remarks if r.kind == "missed"]


def before_and_after(before: Program, after: Program, block: str) -> str:
    """Golden text of one block around a pass."""
    return f"{to_text(before.blocks[block])}\n=>\n\n{to_text(after.blocks[block])}"
