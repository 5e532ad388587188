"""A Dynamo graph as a functional ATen graph: the same values, in-place work made explicit.

The trace happens before dispatch, so that linear, attention and grouped products stay whole, under torch's own
functionalization, so that views and writes cannot be reordered by a rewrite. What a graph writes to its inputs becomes
further outputs, which `with_writes` copies back at the end. Graphs whose aliasing that cannot express are refused with
the reason: the caller leaves them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymFloat, Tensor
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._dynamo.source import DictGetItemSource, GetItemSource, LocalSource
from torch._dynamo.symbolic_convert import TensorifyState
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    has_metadata_mutation,
    sync_functional_tensor,
    to_fun,
)
from torch._ops import HigherOrderOperator
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from deepinfer_compile.errors import CompileError, NotFunctional
from deepinfer_compile.graph import Editor
from deepinfer_compile.memory import Output, memory, placed, settled

CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"}
    | {"cpu", "cuda", "contiguous"}
)
"""Tensor methods that may return their tensor itself."""
GRAD_SWITCH = "_set_grad_enabled"
SWITCHES = frozenset(
    {GRAD_SWITCH, "_enter_autocast", "_enter_inference_mode"} | {"_vmap_increment_nesting", "_grad_increment_nesting"}
)
"""Calls in Dynamo's graphs that change how the calls behind them run. A trace that failed midway would leave it so."""


@dataclass(frozen=True)
class Functional:
    """gm takes (inputs..., constants...) and returns (outputs..., new values of the inputs in `written`...).

    outputs: None for what is no tensor. constants: tensors that the graph made of Python numbers.
    """

    gm: GraphModule
    outputs: tuple[Output | None, ...]
    written: tuple[int, ...]
    constants: tuple[Tensor, ...]


def functional(gm: GraphModule, values: Sequence[Any]) -> Functional:
    """Trace a graph whose output is a flat tuple. values: its placeholders' fake tensors, symbols and constants.

    Raises NotFunctional for what a functional graph cannot express, and for what torch cannot trace.
    """
    _refuse_aliases(values)
    _refuse_modes(gm, values)
    found: dict[str, Any] = {}
    (returned,) = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args
    seen = [n.meta.get("example_value") if isinstance(n, Node) else n for n in returned]  # type: ignore[union-attr]

    def run(*args: Any) -> Any:
        mode = FunctionalTensorMode(pre_dispatch=True, export=True)
        above = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with above, mode:
            inputs = [to_fun(a) if isinstance(a, Tensor) else a for a in args]
            outputs = list(_Runner(gm, mode).run(*inputs))
            for t in inputs:
                if isinstance(t, FunctionalTensor):
                    sync_functional_tensor(t)
            found["written"] = tuple(i for i, t in enumerate(inputs) if _written(t, args[i]))
            found["outputs"] = placed(outputs, [*values, *seen], inputs, found["written"])
            results = [*outputs, *(inputs[i] for i in found["written"])]
            return pytree.tree_map_only(Tensor, from_fun, results)

    traced = trace(run, values)
    for node in traced.graph.nodes:
        if "as_strided" in str(node.target):
            raise NotFunctional(reason="as_strided reads memory whose layout a functional graph does not keep")
        if isinstance(node.target, HigherOrderOperator):
            raise NotFunctional(reason=f"it calls {node.target.name()}, an operation on operations")
    return Functional(traced, found["outputs"], found["written"], _lift_constants(traced))


def trace(run: Callable[..., Any], values: Sequence[Any]) -> GraphModule:
    """`run` as an ATen graph before dispatch. Constants of one number are written out, others are attributes.

    Raises NotFunctional for what torch cannot trace.
    """
    try:
        traced = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(*values)
    except CompileError:
        raise
    except Exception as err:  # the tracer may fail in any way; the graph is then left to Inductor, with the reason
        words = (str(err).strip().splitlines() or [""])[0]
        raise NotFunctional(reason=f"torch cannot trace it: {type(err).__name__}: {words}") from err
    for node, held in _attributes(traced):
        if isinstance(held, Tensor) and held.dim() == 0 and not held.dtype.is_complex:
            edit = Editor(traced.graph, node)
            call = edit.call(torch.ops.aten.scalar_tensor.default, held.item(), dtype=held.dtype, device=held.device)
            _put(traced, node, call)
    traced.recompile()
    return traced


def write_out_constants(gm: GraphModule) -> None:
    """Make every tensor that a graph holds the call that Dynamo had for it: AOTAutograd takes attributes for the
    model's own, and asks which. Raises NotFunctional if it holds anything else."""
    for node, held in _attributes(gm):
        _refuse_others(held)
        with gm.graph.inserting_before(node):
            how = {"dtype": held.dtype, "device": held.device}
            call = gm.graph.call_function(torch.tensor, (held.tolist(),), how)
        call.meta = dict(node.meta)
        _put(gm, node, call)
    gm.recompile()


def given(hole: Node) -> Any:
    """What a placeholder of a Dynamo graph is traced with: its own fake value (example inputs hold real tensors, which
    would get symbols of their own), or the number where it is a tensor made of a Python float.

    Floats that are no arguments (a module's, a function's defaults) are written into the graph, which Dynamo traces
    again for that: a rewrite reads them, and they do not change from call to call.
    Raises TensorifyScalarRestartAnalysis then, which is Dynamo's to catch.
    """
    held = hole.meta["example_value"]
    number = getattr(held, "item_memo", None)
    if not isinstance(number, SymFloat) or not all(u.op == "call_method" and u.target == "item" for u in hole.users):
        return held
    if not _is_argument(getattr(hole, "_dynamo_source", None)):
        TensorifyState.specialize(str(number.node._expr))
        raise TensorifyScalarRestartAnalysis
    return number


def _is_argument(source: Any) -> bool:
    """Whether a value is an argument of the compiled function, or an element of one."""
    while isinstance(source, (GetItemSource, DictGetItemSource)):
        source = source.base
    return isinstance(source, LocalSource) and source.is_input


class _Runner(Interpreter):
    """Runs the graph as torch.export does, which keeps composite operations whole. Only conversions are done the other
    way: export makes each a copy, but `x.to(x.dtype)` is `x`, and a write to it is a write to `x`."""

    def __init__(self, gm: GraphModule, mode: FunctionalTensorMode) -> None:
        super().__init__(gm)
        self.mode = mode

    def run_node(self, n: Node) -> Any:
        self.mode.export = n.target not in CONVERSIONS
        try:
            return super().run_node(n)
        finally:
            self.mode.export = True

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # where nothing requires a gradient, recording or not is the same
        skipped = getattr(target, "__name__", "") == GRAD_SWITCH
        return None if skipped else super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # dynamo hands over a Python float as the item of a tensor, for which the number itself was given
        if target == "item" and isinstance(args[0], SymFloat):
            return args[0]
        return super().call_method(target, args, kwargs)


def with_writes(run: Callable[..., Sequence[Any]], form: Functional) -> Callable[..., tuple[Any, ...]]:
    """The function of the inputs with its in-place effects and its memory: `run` gives what `form.gm` gives; writes are
    copied back, and outputs share memory, and lie in it, as in the graph that was traced. Passes may drop copies: here
    they return.

    The function raises NotFunctional where an output should share memory and does not.
    """

    def whole(*args: Any) -> tuple[Any, ...]:
        found = list(run(*args, *(torch.ops.aten.lift_fresh_copy.default(c) for c in form.constants)))
        taken = {memory(a) for a in args if isinstance(a, Tensor)}
        # what is written may be another input, which is written too
        news = [new.clone() if memory(new) in taken else new for new in found[len(form.outputs) :]]
        results = settled(found[: len(form.outputs)], form.outputs, args)
        for i, new in zip(form.written, news, strict=True):
            args[i].copy_(new)
        return tuple(results)

    return whole


def _written(t: Any, before: Any) -> bool:
    if not isinstance(t, FunctionalTensor):
        return False
    if has_metadata_mutation(t, before, check_only_storage_mutation=False):
        raise NotFunctional(reason="it changes the shape or storage of an input in place")
    if has_data_mutation(t) and any(step == 0 and size != 1 for step, size in zip(before.stride(), before.shape)):
        raise NotFunctional(reason="it writes to an input whose elements share memory")
    return has_data_mutation(t)


def _attributes(gm: GraphModule) -> list[tuple[Node, Any]]:
    """The nodes that read what a graph holds, and what it is."""
    return [(n, getattr(gm, str(n.target))) for n in gm.graph.nodes if n.op == "get_attr"]


def _put(gm: GraphModule, node: Node, new: Node) -> None:
    """Another node in place of one that reads an attribute, which goes with its last reader."""
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
    if not any(n.op == "get_attr" and n.target == node.target for n in gm.graph.nodes):
        delattr(gm, str(node.target))


def _lift_constants(gm: GraphModule) -> tuple[Tensor, ...]:
    """Make every tensor that the graph holds an input behind the others. Raises NotFunctional if it holds more."""
    lifted: dict[object, tuple[Node, Tensor]] = {}
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1:]
    for node, held in _attributes(gm):
        _refuse_others(held)
        if node.target not in lifted:
            place = gm.graph.inserting_after(last[0]) if last else gm.graph.inserting_before()
            with place:
                last = [gm.graph.placeholder(str(node.target).strip("_"))]
            last[0].meta = dict(node.meta)
            lifted[node.target] = last[0], held
        _put(gm, node, lifted[node.target][0])
    gm.recompile()
    return tuple(held for _, held in lifted.values())


def _refuse_others(held: Any) -> None:
    if not isinstance(held, Tensor):
        raise NotFunctional(reason=f"it holds a {type(held).__name__}")


def _refuse_modes(gm: GraphModule, values: Sequence[Any]) -> None:
    """A trace before dispatch shows neither the casts of autocast nor what autograd records."""
    tensors = [v for v in values if isinstance(v, Tensor)]
    if any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(t.device.type for t in tensors)}):
        raise NotFunctional(reason="autocast is on")
    called = {getattr(n.target, "__name__", "") for n in gm.graph.nodes if n.op == "call_function"}
    harmless = set() if any(t.requires_grad for t in tensors) else {GRAD_SWITCH}
    for name in sorted((called & SWITCHES) - harmless):
        raise NotFunctional(reason=f"it calls {name} midway")


def _refuse_aliases(values: Sequence[Any]) -> None:
    """Two inputs over one storage would be traced as strangers."""
    seen: set[int] = set()
    for value in values:
        if not isinstance(value, Tensor):
            continue
        if value.layout != torch.strided or type(value).__name__ not in ("FakeTensor", "Tensor", "Parameter"):
            raise NotFunctional(reason=f"an input is a {type(value).__name__} of layout {value.layout}")
        key = memory(value)
        if key in seen:
            raise NotFunctional(reason="two inputs share memory")
        seen.add(key)
