"""Export a model as an ONNX file that any runtime reads: ids and positions of one sequence in, logits out.

The graph is our raised program, every operation written as ONNX nodes by our own tables. torch's exporter (2.11 and
2.13, with onnxscript 0.7) was tried first: it exports a Llama, fails on the experts of Mixtral and DeepSeek-V3, and
would be two more dependencies and a second trace; the raised program has thirty operations a layer that mean something,
and what has no ONNX form is known before anything is written. Weights stream from the checkpoint one at a time; above
`INLINE_BYTES` they go to a data file beside the model, named by its content, so that a model file never meets the data
of another. The model is written under a temporary name, checked, and then put in place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from onnx import helper
from torch import nn
from torch.fx import GraphModule, Node

import deepinfer_compile.onnx_dialect
import deepinfer_compile.onnx_shapes  # noqa: F401  (both register what operations become)
from deepinfer_compile.builder import with_constants
from deepinfer_compile.capture import capture
from deepinfer_compile.capture.source import open_source
from deepinfer_compile.errors import BadOption, UnsupportedConstruct
from deepinfer_compile.graph import tensor
from deepinfer_compile.onnx_file import INLINE_BYTES, Exported, Initialiser, OnnxGraph, write_model
from deepinfer_compile.onnx_graph import Complex, Emitter, Value, onnx_type
from deepinfer_compile.onnx_ops import lower
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import RAISE
from deepinfer_compile.program import Program, WeightRef
from deepinfer_compile.settings import DTYPES

INPUTS = ("input_ids", "position_ids")
Progress = Callable[[str], None]


def export_onnx(
    model: nn.Module | str | Path,
    out: str | Path,
    *,
    dtype: str = "float32",
    verify: bool = False,
    inline_bytes: int = INLINE_BYTES,
    progress: Progress = lambda text: None,
) -> Exported:
    """Export a Hugging Face folder or a module in memory to `out` (*.onnx), which is replaced only by a whole model.

    The model takes `input_ids` and (where the model uses them) `position_ids`, i64[1, tokens], and gives `logits`
    [1, tokens, V] of the sequence read at once; tokens is dynamic. dtype: float32, which every runtime computes in,
    bfloat16, or auto (the model's own). verify: run it in onnxruntime and compare with our program before it is put in
    place; all weights are in memory then. inline_bytes: more bytes of weights go to a file beside the model; that
    of an earlier export is left, since a copy of the model may need it.
    Raises NoOnnxForm naming the operation and its source line, BadOption, OutputBusy, OutputFailed, ExportInvalid,
    MissingExtra (to verify without onnxruntime), and what capture and weights raise.
    """
    target = _target(Path(out))
    if dtype not in DTYPES:
        raise BadOption(name="dtype", value=dtype, reason="not one of the choices", fix=f"use one of {DTYPES}")
    progress("open")
    source = open_source(model, dtype)
    progress("capture")
    captured = with_constants(capture(source.model), source)
    progress("passes")
    raised, _ = Pipeline(RAISE).run(captured)
    progress("graph")
    graph = emit(raised)
    progress("weights")
    return write_model(graph, raised, source, target, inline_bytes, verify)


def _target(out: Path) -> Path:
    if out.suffix != ".onnx":
        raise BadOption(name="out", value=out, reason="it does not end in .onnx", fix=f"write {out}.onnx")
    if out.is_dir():
        raise BadOption(name="out", value=out, reason="it is a folder", fix="choose another path")
    return Path(os.path.realpath(out))


# -- the graph --------------------------------------------------------------------------------------------------------


def emit(program: Program) -> OnnxGraph:
    """Write a raised program as ONNX nodes. Raises NoOnnxForm."""
    g = Emitter()
    env: dict[Node, Value] = {}
    weights: dict[str, Initialiser] = {}
    holes = [n for n in program.skeleton.graph.nodes if n.op == "placeholder"]
    given = tuple(n.name for n in holes if n.name in INPUTS)
    length = g.op("Gather", g.op("Shape", "input_ids"), g.const([1]), axis=0)
    for node in holes:
        if node.name in program.weights:
            env[node] = _weight(program.weights[node.name], weights)
        else:
            env[node] = _input(g, node, length)
            symbols: list[Any] = [d for d in tensor(node).shape if isinstance(d, torch.SymInt)]
            g.symbols |= {str(d.node.expr): length for d in symbols}
    output = _skeleton(g, program, env)
    logits = tensor(output)
    named = g.op("Identity", env[output]) if logits.dim() == 3 else g.op("Unsqueeze", env[output], g.const([0]))
    g.nodes.append(helper.make_node("Identity", [named], ["logits"], "logits"))
    return OnnxGraph(g, given, onnx_type(logits.dtype), int(logits.shape[-1]), weights)


def _weight(ref: WeightRef, weights: dict[str, Initialiser]) -> Value:
    """Note the initialisers of a weight; a complex one is two."""
    if not ref.dtype.is_complex:
        weights[ref.name] = Initialiser(ref)
        return ref.name
    parts = {f"{ref.name}.{part}": Initialiser(ref, part) for part in ("real", "imag")}  # type: ignore[arg-type]
    weights.update(parts)
    return Complex(parts)


def _input(g: Emitter, node: Node, length: str) -> str:
    """A program input that is no weight, for one sequence that is read at once from its start."""
    if node.name in INPUTS:
        return str(node.name)
    count = g.op("Squeeze", length, g.const([0]))
    if node.name == "rows":
        return g.op("Range", g.const(0), count, g.const(1))
    if node.name == "context_hint":
        total = g.op("Add", g.op("ReduceMax", "position_ids", keepdims=1), g.const([[1]]))
        return g.op("Expand", total, g.op("Concat", g.const([1]), length, axis=0))
    raise UnsupportedConstruct(
        construct=f"the input {node.name!r}", fix="export a model of one sequence of token ids, without other inputs"
    )


def _skeleton(g: Emitter, program: Program, env: dict[Node, Value]) -> Node:
    """Emit all calls; returns the node whose value the program gives."""
    for node in program.skeleton.graph.nodes:
        if node.op == "output":
            return node.args[0]  # type: ignore[no-any-return]
        if node.op == "call_module":
            with g.under(f"{node.name}/"):
                env[node] = _block(g, program.blocks[str(node.target)], [env[a] for a in node.args])
        elif node.op == "call_function":
            env[node] = lower(g, node, env)
    raise ValueError(f"program {program.name!r} has no output")


def _block(g: Emitter, block: GraphModule, given: Sequence[Value]) -> Value:
    """Emit one block for the values of its inputs; returns what it gives."""
    holes = (n for n in block.graph.nodes if n.op == "placeholder")
    env: dict[Node, Value] = dict(zip(holes, given, strict=True))
    for node in block.graph.nodes:
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
        if node.op == "call_function":
            env[node] = lower(g, node, env)
    raise ValueError("a block has no output")
