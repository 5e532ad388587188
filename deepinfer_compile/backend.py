"""The torch.compile door: `torch.compile(model, backend="deepinfer")`.

Dynamo's graph is made functional, raised by the same passes as a bundle (`presets.BACKEND`), and handed to Inductor
with every dialect op in the form that suits it best (`inline`). Graphs that this cannot do justice to are left to
Inductor unchanged, with the reason logged and counted: under autograd, or with aliasing that cannot be expressed.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from deepinfer_compile import ops
from deepinfer_compile.errors import BadOption, CompileError, NoCompiler, TargetUnavailable, UnknownOption
from deepinfer_compile.facts import Fact
from deepinfer_compile.functional import Functional, functional, trace, with_writes
from deepinfer_compile.inline import Inliner
from deepinfer_compile.kernel_ops import Rendered
from deepinfer_compile.passbase import Pass
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.targets import device_limits

log = logging.getLogger("deepinfer_compile.backend")
counters: collections.Counter[str] = collections.Counter()
"""What the backend compiled in this process: `raised`, `left: <reason>`, `op: <name>` per dialect op compiled in."""
executed: collections.Counter[str] = collections.Counter()
"""What compiled graphs ran in this process: `<name>` per dialect op, added at each call of a graph that holds it."""
DEFAULTS: dict[str, Any] = {"raise": True, "pipeline": None, "kernels": True}
"""The backend's own options."""


def deepinfer(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    mode: one of Inductor's. options: `raise` (default True) runs the passes, `pipeline` replaces them (a sequence of
    passes), `kernels` (default True) uses our native kernels where the graph runs on the CPU; Inductor's own options
    are passed on to it. Raises UnknownOption, BadOption.
    """
    chosen, patches = _options(options or {}, mode)
    reason = "" if chosen["raise"] else "raise=False"
    reason = reason or _under_autograd(gm)
    if not reason:
        try:
            graph, ran = _raised(gm, chosen)
        except CompileError as err:
            reason = str(err).splitlines()[0]
        else:
            return _counted(_inductor(graph, example_inputs, patches), ran)
    counters[f"left: {reason}"] += 1
    log.info("left to Inductor: %s", reason)
    return _inductor(gm, example_inputs, patches)


def _options(options: dict[str, Any], mode: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Our options, and Inductor's."""
    import torch._inductor as inductor

    known = inductor.list_options()
    names = {name: name.replace("-", "_") for name in options if name not in DEFAULTS}
    for name, theirs in names.items():
        if theirs not in known:
            raise UnknownOption(name=name, known=f"{', '.join(DEFAULTS)}, and those of torch._inductor.list_options()")
    if mode is not None and mode not in inductor.list_mode_options():
        fix = f"use one of {', '.join(inductor.list_mode_options())}"
        raise BadOption(name="mode", value=mode, reason="Inductor has no such mode", fix=fix)
    patches = dict(inductor.list_mode_options(mode)) if mode is not None else {}
    patches.update({theirs: options[name] for name, theirs in names.items()})
    return {**DEFAULTS, **{k: v for k, v in options.items() if k in DEFAULTS}}, patches


def _under_autograd(gm: GraphModule) -> str:
    held = [n.meta.get("example_value") for n in gm.graph.nodes if n.op == "placeholder"]
    if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in held):
        return "autograd is recording"
    return ""


def _inductor(gm: GraphModule, example_inputs: Sequence[Any], patches: dict[str, Any]) -> Callable[..., Any]:
    from torch._inductor.compile_fx import compile_fx

    compiled: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)  # type: ignore[arg-type]
    return compiled  # type: ignore[no-any-return]


def _counted(compiled: Callable[..., Any], ran: dict[str, int]) -> Callable[..., Any]:
    """The compiled graph, which adds to `executed` at each call."""

    def run(*args: Any) -> Any:
        executed.update(ran)
        return compiled(*args)

    return run


def _raised(gm: GraphModule, chosen: dict[str, Any]) -> tuple[GraphModule, dict[str, int]]:
    """The graph in ATen again, after the passes, and its dialect ops. Raises CompileError where they do not apply."""
    holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    # the placeholders' own fake values: example inputs hold real tensors, which would get symbols of their own
    values = [n.meta["example_value"] for n in holes]
    form = functional(gm, values)
    for node, held in zip((n for n in form.gm.graph.nodes if n.op == "placeholder"), values, strict=True):
        if isinstance(held, nn.Parameter):
            node.meta["weight"] = node.name
    passes = chosen["pipeline"] if chosen["pipeline"] is not None else _passes()
    program, records = Pipeline(tuple(passes), given=frozenset({Fact.SHAPES, Fact.FUNCTIONAL})).run(_as_program(form))
    counters["raised"] += 1
    for record in records:
        log.info("%s: %d applied, %d missed", record.name, record.count("applied"), record.count("missed"))
    (block,) = program.blocks.values()
    found = collections.Counter(op.name for n in block.graph.nodes if (op := ops.find(n.target)) is not None)
    counters.update({f"op: {name}": count for name, count in found.items()})
    kernels = _kernels(values) if chosen["kernels"] else {}
    rendered = _rendered(values) if chosen["kernels"] else None
    (call,) = program.calls()
    order = [n.name for n in form.gm.graph.nodes if n.op == "placeholder"]
    read = [order.index(hole.name) for hole in call.args]  # type: ignore[union-attr]  # inputs nobody reads are gone

    def run(*args: Any) -> Any:
        return Inliner(block, kernels, rendered).run(*(args[i] for i in read))

    inlined = trace(with_writes(run, form), values)
    if rendered is not None:
        _report(rendered)
    return _like(inlined, gm, holes), dict(found)


def _passes() -> tuple[Pass, ...]:
    from deepinfer_compile.presets import BACKEND

    return BACKEND


def _kernels(values: Sequence[Any]) -> dict[str, Any]:
    """The native kernels by op name, if everything is on the CPU and a compiler is there."""
    if any(isinstance(v, Tensor) and v.device.type != "cpu" for v in values):
        return {}
    from deepinfer_compile.targets.cpu import CPU, KERNELS

    try:
        namespace = CPU.load()
    except (NoCompiler, TargetUnavailable) as err:
        log.warning("no native kernels: %s", str(err).splitlines()[0])
        return {}
    library = getattr(torch.ops, namespace)
    return {op.split(".")[1]: getattr(library, kernel).default for op, kernel in KERNELS}


def _rendered(values: Sequence[Any]) -> Rendered | None:
    """Kernels rendered for the one GPU that everything is on, or None."""
    devices = {v.device for v in values if isinstance(v, Tensor) and v.device.type != "cpu"}
    limits = device_limits(devices.pop()) if len(devices) == 1 else None
    return Rendered(limits) if limits is not None else None


def _report(rendered: Rendered) -> None:
    counters.update({f"kernel: {name}": count for name, count in rendered.used.items()})
    for reason, count in rendered.left.items():
        log.info("no kernel for %d call(s) of %s", count, reason)


def _like(gm: GraphModule, source: GraphModule, holes: Sequence[Any]) -> GraphModule:
    """Give a new graph what torch knows of the old one's inputs: which are parameters, and how calls are guarded."""
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(source, name):
            setattr(gm, name, getattr(source, name))
    gm.meta.update(source.meta)
    for new, old in zip((n for n in gm.graph.nodes if n.op == "placeholder"), holes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if "tensor_dict" in old.meta:  # says which inputs never move
            new.meta["tensor_dict"] = old.meta["tensor_dict"]
    return gm


def _as_program(form: Functional) -> Program:
    """One block, called once."""
    gm, graph = form.gm, Graph()
    holes = []
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            hole = graph.placeholder(node.name)
            hole.meta = {"val": node.meta["val"]}
            holes.append(hole)
    call = graph.call_module("body", tuple(holes))
    out = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    results = tuple(out.args[0]) if isinstance(out.args[0], (tuple, list)) else (out.args[0],)
    out.args = (results,)
    call.meta = {"val": tuple(n.meta["val"] if hasattr(n, "meta") else n for n in results), "layer": 0}
    graph.output(call)
    root = nn.Module()
    root.add_module("body", gm)
    facts = frozenset({Fact.SHAPES, Fact.FUNCTIONAL})
    return Program("backend", GraphModule(root, graph), {"body": gm}, {}, {}, facts=facts)
