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
from torch import SymFloat, SymInt, Tensor
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
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from deepinfer_compile.errors import CompileError, NotFunctional
from deepinfer_compile.match import equal_size, same_sizes

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
class Output:
    """How an output lies in memory: in that of `home`, the first such of (inputs..., outputs...), or is `home` itself.

    like: its shape, strides and offset in that memory, as Dynamo saw them; a functional trace has others after a write.
    """

    home: int
    itself: bool
    like: Tensor


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
            pairs = zip(outputs, seen, strict=True)
            found["outputs"] = tuple(_output(t, like, inputs, [*values, *seen]) for t, like in pairs)
            results = [*outputs, *(inputs[i] for i in found["written"])]
            return pytree.tree_map_only(Tensor, from_fun, results)

    try:
        traced = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(*values)
    except CompileError:
        raise
    except Exception as err:  # torch's tracer may fail in any way; the caller must learn that it did, and go on
        words = f"{type(err).__name__}: {(str(err).splitlines() or [''])[0]}"
        raise NotFunctional(reason=f"torch cannot trace it: {words}") from err
    for node in traced.graph.nodes:
        if "as_strided" in str(node.target):
            raise NotFunctional(reason="as_strided reads memory whose layout a functional graph does not keep")
        if isinstance(node.target, HigherOrderOperator):
            raise NotFunctional(reason=f"it calls {node.target.name()}, an operation on operations")
    return Functional(traced, found["outputs"], found["written"], _lift_constants(traced))


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
    """The function of the inputs with its in-place effects: `run` gives what `form.gm` gives, and writes are copied
    back. Outputs share memory, and lie in it, as in the graph that was traced: a rewrite knows nothing of that.
    """

    def whole(*args: Any) -> tuple[Any, ...]:
        found = list(run(*args, *(torch.ops.aten.lift_fresh_copy.default(c) for c in form.constants)))
        owner = {_memory(a): i for i, a in enumerate(args) if isinstance(a, Tensor)}
        # what is written may be another input, which is written too
        news = [r.clone() if _memory(r) in owner else r for r in found[len(form.outputs) :]]
        results = [_settled(r, out, args, owner, form.written) for r, out in zip(found, form.outputs)]
        for i, new in zip(form.written, news, strict=True):
            args[i].copy_(new)
        for at, out in enumerate(form.outputs):
            if out is not None and out.home in form.written and not out.itself:
                results[at] = _view_like(args[out.home], out.like, args)
        return tuple(results)

    return whole


def _settled(
    result: Any, out: Output | None, args: Sequence[Any], owner: dict[int, int], written: tuple[int, ...]
) -> Any:
    """An output in memory of its own where it is new, and in its strides. owner: whose each piece of memory is."""
    if out is None or out.home in written:
        return args[out.home] if out is not None and out.itself else result
    if out.itself:
        return args[out.home]
    if out.home < len(args):
        if owner.get(_memory(result)) != out.home or not _lies_as(result, out):
            raise NotFunctional(reason="a rewrite made a view of an input something else")
        # a view of a whole input is not the input itself: its shape may be changed without the input's
        return torch.ops.aten.alias.default(result)
    if owner.setdefault(_memory(result), out.home) == out.home and _lies_as(result, out):
        return result
    settled = _in_order(result, out)
    owner[_memory(settled)] = out.home
    return settled


def _view_like(base: Tensor, like: Tensor, args: Sequence[Any]) -> Tensor:
    """The view of `base`, an input that was written to, that another tensor is of what Dynamo saw in its place."""
    held = [a for a in args if isinstance(a, SymInt)] + [d for a in args if isinstance(a, Tensor) for d in a.shape]
    known = {d.node.expr: d for d in held if isinstance(d, SymInt) and d.node.expr.is_symbol}

    def formed(size: int | SymInt) -> Any:
        # sizes of another trace have no place in this one, their symbols do
        return sympy_interp(PythonReferenceAnalysis, known, size.node.expr) if isinstance(size, SymInt) else size

    where = [formed(d) for d in like.shape], [formed(d) for d in like.stride()], formed(like.storage_offset())
    return torch.as_strided(base, *where)


def _lies_as(t: Tensor, out: Output) -> bool:
    """Whether the strides that matter are those of an output: that of a dimension of size 1 is never used."""
    held = zip(t.shape, t.stride(), out.like.stride(), strict=True)
    return all((isinstance(size, int) and size == 1) or equal_size(x, y) for size, x, y in held)


def _in_order(result: Tensor, out: Output) -> Tensor:
    """A copy whose dimensions lie in memory in the order of those of `out`, without gaps."""
    steps = [s.node.hint if isinstance(s, SymInt) else s for s in out.like.stride()]
    order = sorted(range(result.dim()), key=lambda d: (-steps[d], d))
    if order == sorted(order):
        copy = result.clone(memory_format=torch.contiguous_format)
    else:
        turned = result.permute(order).clone(memory_format=torch.contiguous_format)
        copy = turned.permute([order.index(d) for d in range(result.dim())])
    if not _lies_as(copy, out):
        raise NotFunctional(reason="a rewrite changed how an output with gaps lies in memory")
    return copy


def _written(t: Any, before: Any) -> bool:
    if not isinstance(t, FunctionalTensor):
        return False
    if has_metadata_mutation(t, before, check_only_storage_mutation=False):
        raise NotFunctional(reason="it changes the shape or storage of an input in place")
    if has_data_mutation(t) and any(step == 0 and size != 1 for step, size in zip(before.stride(), before.shape)):
        raise NotFunctional(reason="it writes to an input whose elements share memory")
    return has_data_mutation(t)


def _output(t: Any, like: Any, inputs: Sequence[Any], seen: Sequence[Any]) -> Output | None:
    """Where an output lies. like: it as Dynamo saw it. seen: all inputs and outputs as Dynamo saw them."""
    if not isinstance(t, Tensor):
        return None
    if not isinstance(like, Tensor) or like.dtype != t.dtype or not same_sizes(like.shape, t.shape):
        raise NotFunctional(reason="what Dynamo recorded of an output is not what it is")
    home = next(i for i, other in enumerate(seen) if isinstance(other, Tensor) and _memory(other) == _memory(like))
    itself = home < len(inputs) and inputs[home] is t
    if home < len(inputs) and inputs[home].dtype != t.dtype:
        raise NotFunctional(reason="it returns a view of an input in another dtype")
    return Output(home, itself, like)


def _memory(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


def _lift_constants(gm: GraphModule) -> tuple[Tensor, ...]:
    """Make every tensor that the graph holds an input behind the others. Raises NotFunctional if it holds more."""
    lifted: dict[str, tuple[Node, Tensor]] = {}
    last = [n for n in gm.graph.nodes if n.op == "placeholder"][-1:]
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        held = getattr(gm, str(node.target))
        if not isinstance(held, Tensor):
            raise NotFunctional(reason=f"it holds a {type(held).__name__}")
        if node.target not in lifted:
            place = gm.graph.inserting_after(last[0]) if last else gm.graph.inserting_before()
            with place:
                last = [gm.graph.placeholder(str(node.target).strip("_"))]
            last[0].meta = dict(node.meta)
            lifted[str(node.target)] = last[0], held
        node.replace_all_uses_with(lifted[str(node.target)][0])
        gm.graph.erase_node(node)
    gm.recompile()
    return tuple(held for _, held in lifted.values())


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
        key = _memory(value)
        if key in seen:
            raise NotFunctional(reason="two inputs share memory")
        seen.add(key)
