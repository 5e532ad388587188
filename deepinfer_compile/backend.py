"""The torch.compile door: `torch.compile(model, backend="deepinfer")`.

Dynamo's graph is made functional, raised by the same passes as a bundle (`presets.BACKEND`), and handed to Inductor
with every dialect op in the form that suits it best (`inline`). Graphs that this cannot do justice to are left to
Inductor unchanged, with the reason logged and counted: under autograd, or with aliasing that cannot be expressed.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import SymFloat, Tensor, nn
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile import ops
from deepinfer_compile.errors import (
    BadOption,
    BadTuning,
    CompileError,
    GraphInvalid,
    NoCompiler,
    PassFailed,
    TargetUnavailable,
    UnknownOption,
)
from deepinfer_compile.facts import Fact
from deepinfer_compile.functional import Functional, functional, given, trace, with_writes, write_out_constants
from deepinfer_compile.graph import make_module
from deepinfer_compile.inline import Inliner
from deepinfer_compile.kernel_ops import Rendered
from deepinfer_compile.passbase import Pass
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program
from deepinfer_compile.targets import device_target
from deepinfer_compile.tuned import Tuned

log = logging.getLogger("deepinfer_compile.backend")
counters: collections.Counter[str] = collections.Counter()
"""What the backend compiled in this process: `raised`, `left: <reason>`, `op: <name>` per dialect op compiled in."""
executed: collections.Counter[str] = collections.Counter()
"""What compiled graphs ran in this process: `<name>` per dialect op, added at each call of a graph that holds it."""
DEFAULTS: dict[str, Any] = {"raise": True, "pipeline": None, "kernels": True, "tuned": None}
"""The backend's own options."""


@dataclass(frozen=True)
class Prepared:
    """A graph for Inductor. ran: the dialect ops in it, counted. left: why it is Dynamo's graph itself, or nothing."""

    gm: GraphModule
    ran: dict[str, int] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    left: str = ""


def deepinfer(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph.

    mode: one of Inductor's. options: those of `prepare`; Inductor's own are passed on to it.
    Raises UnknownOption, BadOption.
    """
    chosen, patches = _options(options or {}, mode)
    prepared = prepare(gm, chosen)
    compiled = _inductor(prepared.gm, example_inputs, patches)
    return _counted(compiled, prepared.ran) if prepared.ran else compiled


def prepare(gm: GraphModule, options: dict[str, Any] | None = None) -> Prepared:
    """What Inductor is to compile in place of a Dynamo graph: inputs, outputs and side effects are the same.

    options: `raise` (default True) runs the passes, `pipeline` replaces them (a sequence of passes), `kernels` (default
    True) uses our native kernels where the graph runs on the CPU. `tuned` is a folder of measurements (`tune --store`)
    from which rendered kernels take their configurations. Raises BadOption, BadTuning for a folder that is none.
    """
    chosen = {**DEFAULTS, **(options or {})}
    reason = "" if chosen["raise"] else "raise=False"
    reason = reason or _under_autograd(gm)
    ours = False
    if not reason:
        try:
            return _raised(gm, chosen)
        except (BadOption, BadTuning):
            raise
        except CompileError as err:
            reason = str(err).splitlines()[0]
            ours = isinstance(err, (PassFailed, GraphInvalid))
    counters[f"left: {reason}"] += 1
    log.log(logging.WARNING if ours else logging.INFO, "left to Inductor: %s", reason)
    return Prepared(gm, left=reason)


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
    if options.get("tuned") is not None and not Path(options["tuned"]).is_dir():
        fix = "give the folder that `deepinfer-compile tune --store` wrote"
        raise BadOption(name="tuned", value=options["tuned"], reason="there is no such folder", fix=fix)
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


def _raised(gm: GraphModule, chosen: dict[str, Any]) -> Prepared:
    """The graph in ATen again, after the passes. Raises CompileError where they do not apply."""
    holes, values, form = captured(gm)
    passes = chosen["pipeline"] if chosen["pipeline"] is not None else _passes()
    program, records = Pipeline(tuple(passes), given=frozenset({Fact.SHAPES, Fact.FUNCTIONAL})).run(as_program(form))
    for record in records:
        log.info("%s: %d applied, %d missed", record.name, record.count("applied"), record.count("missed"))
    (block,) = program.blocks.values()
    kernels = _kernels(values) if chosen["kernels"] else {}
    rendered = _rendered(values, chosen["tuned"]) if chosen["kernels"] else None
    (call,) = program.calls()
    order = [n.name for n in form.gm.graph.nodes if n.op == "placeholder"]
    read = [order.index(hole.name) for hole in call.args]  # type: ignore[union-attr]  # inputs nobody reads are gone

    def run(*args: Any) -> Any:
        return Inliner(block, kernels, rendered).run(*(args[i] for i in read))

    inlined = trace(with_writes(run, form), values)
    write_out_constants(inlined)
    if rendered is not None:
        _report(rendered)
    found = collections.Counter(op.name for n in block.graph.nodes if (op := ops.find(n.target)) is not None)
    counters["raised"] += 1
    counters.update({f"op: {name}": count for name, count in found.items()})
    return Prepared(_like(inlined, gm, holes), dict(found), tuple(records))


def captured(gm: GraphModule) -> tuple[list[Node], list[Any], Functional]:
    """(placeholders, what they are traced with, functional form) of a Dynamo graph. Raises NotFunctional."""
    holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    values = [given(n) for n in holes]
    form = functional(gm, values)
    for node, held in zip((n for n in form.gm.graph.nodes if n.op == "placeholder"), values):
        if isinstance(held, nn.Parameter):
            node.meta["weight"] = node.name
    return holes, values, form


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


def _rendered(values: Sequence[Any], folder: str | None) -> Rendered | None:
    """Kernels rendered for the one GPU that everything is on, or None. Raises BadOption, BadTuning."""
    devices = {v.device for v in values if isinstance(v, Tensor) and v.device.type != "cpu"}
    device = devices.pop() if len(devices) == 1 else None
    target = device_target(device) if device is not None else None
    if device is None or target is None:
        return None
    if folder is None:
        return Rendered(target.limits)
    return Rendered(target.limits, Tuned(folder, target.name, target.limits, torch.cuda.get_device_name(device)))


def _report(rendered: Rendered) -> None:
    counters.update({f"kernel: {name}": count for name, count in rendered.used.items()})
    counters.update({f"tuned: {name}": count for name, count in rendered.stored.items() if count})
    for reason in rendered.tuned.ignored if rendered.tuned is not None else ():
        log.warning("tuning record not used: %s", reason)
    for reason, count in rendered.left.items():
        log.info("no kernel for %d call(s) of %s", count, reason)


def _like(gm: GraphModule, source: GraphModule, holes: Sequence[Any]) -> GraphModule:
    """Give a new graph what torch knows of the old one's inputs: which are parameters, and how calls are guarded."""
    for name in ("_param_name_to_source", "_backend_id"):
        if hasattr(source, name):
            setattr(gm, name, getattr(source, name))
    gm.meta.update(source.meta)
    for new, old in zip([n for n in gm.graph.nodes if n.op == "placeholder"], holes, strict=True):
        if hasattr(old, "_dynamo_source"):
            new._dynamo_source = old._dynamo_source
        if "tensor_dict" in old.meta:  # says which inputs never move
            new.meta["tensor_dict"] = old.meta["tensor_dict"]
        if isinstance(new.meta["val"], SymFloat) and isinstance(old.meta["example_value"], Tensor):
            _take_item(new)
    gm.recompile()
    return gm


def _take_item(hole: Node) -> None:
    """A Python float arrives as a tensor; behind it the graph reads the number."""
    with hole.graph.inserting_after(hole):
        item = hole.graph.call_method("item", (hole,))
    item.meta["val"] = hole.meta.pop("val")
    hole.replace_all_uses_with(item, delete_user_cb=lambda user: user is not item)


def as_program(form: Functional) -> Program:
    """One block, called once, in which operations of other packages may stand: nobody stores it."""
    gm, graph = form.gm, Graph()
    gm.meta["foreign"] = True
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
    return Program("backend", make_module(root, graph), {"body": gm}, {}, {}, facts=facts)
