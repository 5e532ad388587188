"""The torch.compile door: `torch.compile(model, backend="deepinfer")`.

Dynamo's graph is traced to ATen before dispatch (so that linear and attention stay whole), raised by the same block
passes as a bundle, and handed to Inductor with every dialect op inlined as its reference. Graphs that this cannot do
justice to are left to Inductor unchanged, with the reason logged and counted: under autograd, or with writes to inputs.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter

from deepinfer_compile import ops
from deepinfer_compile.errors import CompileError, UnknownOption
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import writes
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program

log = logging.getLogger("deepinfer_compile.backend")
counters: collections.Counter[str] = collections.Counter()
"""What the backend did in this process: `raised`, `left: <reason>`, and `op: <name>` per dialect op compiled in."""
OPTIONS = ("raise",)


def deepinfer(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph. options: `raise` (default True) runs the passes; others are errors (UnknownOption)."""
    chosen = dict(options or {})
    for name in chosen:
        if name not in OPTIONS:
            raise UnknownOption(name=name, known=", ".join(OPTIONS))
    reason = _why_not(gm, chosen)
    if not reason:
        try:
            return _inductor(_raised(gm), example_inputs)
        except CompileError as err:
            reason = str(err).splitlines()[0]
    counters[f"left: {reason}"] += 1
    log.info("left to Inductor: %s", reason)
    return _inductor(gm, example_inputs)


def _why_not(gm: GraphModule, options: dict[str, Any]) -> str:
    if not options.get("raise", True):
        return "raise=False"
    held = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in held):
        return "autograd is recording"
    return ""


def _inductor(gm: nn.Module, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs))  # type: ignore[arg-type]
    return compiled  # type: ignore[no-any-return]


def _raised(gm: GraphModule) -> GraphModule:
    """The graph in ATen again, after the passes. Raises CompileError where they do not apply."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from deepinfer_compile.presets import RAISE

    # the placeholders' own fake values: example inputs hold real tensors, which would get symbols of their own
    values = [n.meta["example_value"] for n in gm.graph.nodes if n.op == "placeholder"]
    traced = make_fx(lambda *a: Interpreter(gm).run(*a), pre_dispatch=True, tracing_mode="symbolic")(*values)
    mutating = next((n for n in traced.graph.nodes if writes(n)), None)
    if mutating is not None or any(n.op == "get_attr" for n in traced.graph.nodes):
        what = f"{mutating.target} writes to an operand" if mutating is not None else "the graph holds constants"
        raise CompileError(message=what)
    passes = tuple(p for p in RAISE if p.level == "layer")
    program, records = Pipeline(passes, given=frozenset({Fact.SHAPES, Fact.FUNCTIONAL})).run(_as_program(traced))
    counters["raised"] += 1
    log.info("raised: %s", ", ".join(f"{r.name} {r.count('applied')}" for r in records if r.count("applied")))
    block = program.blocks["body"]
    for node in block.graph.nodes:
        op = ops.find(node.target)
        if op is not None:
            counters[f"op: {op.name}"] += 1
    inlined = make_fx(lambda *a: _Inliner(block).run(*a), pre_dispatch=True, tracing_mode="symbolic")
    return inlined(*values)


class _Inliner(Interpreter):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        op = ops.find(target)
        return op.reference(*args, **kwargs) if op is not None else super().call_function(target, args, kwargs)


def _as_program(gm: GraphModule) -> Program:
    """One block, called once."""
    graph = Graph()
    holes = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            hole = graph.placeholder(node.name)
            hole.meta = {"val": node.meta["val"]}
            holes.append(hole)
    call = graph.call_module("body", tuple(holes))
    out = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    vals = tuple(
        n.meta["val"] if hasattr(n, "meta") else n for n in (out if isinstance(out, (tuple, list)) else (out,))
    )
    call.meta = {"val": vals, "layer": 0}
    graph.output(call)
    root = nn.Module()
    root.add_module("body", gm)
    return Program(
        "backend", GraphModule(root, graph), {"body": gm}, {}, {}, facts=frozenset({Fact.SHAPES, Fact.FUNCTIONAL})
    )
