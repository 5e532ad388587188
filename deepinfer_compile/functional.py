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
from torch import Tensor
from torch._functorch._aot_autograd.functional_utils import (
    from_fun,
    has_data_mutation,
    has_metadata_mutation,
    sync_functional_tensor,
    to_fun,
)
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from deepinfer_compile.errors import CompileError, NotFunctional
from deepinfer_compile.graph import Editor
from deepinfer_compile.match import equal_size

CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"}
    | {"cpu", "cuda", "contiguous"}
)
"""Tensor methods that may return their tensor itself."""


@dataclass(frozen=True)
class Functional:
    """gm returns (outputs..., new values of the inputs in `written`...); `same[i]` is the input that output i is.

    seen: inputs and outputs as Dynamo saw them, which says how outputs lie in memory and what they share.
    """

    gm: GraphModule
    outputs: int
    written: tuple[int, ...]
    same: dict[int, int]
    seen: tuple[Any, ...]


def functional(gm: GraphModule, values: Sequence[Any]) -> Functional:
    """Trace a graph whose output is a flat tuple. values: its placeholders' fake tensors, symbols and constants.

    Raises NotFunctional for aliasing that a functional graph cannot express, and for what torch cannot trace.
    """
    _refuse_aliases(values)
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
            found["same"] = _same(inputs, outputs, found["written"])
            found["outputs"] = len(outputs)
            results = [*outputs, *(inputs[i] for i in found["written"])]
            return pytree.tree_map_only(Tensor, from_fun, results)

    traced = trace(run, values)
    if any(n.op == "call_function" and n.target is torch._C._set_grad_enabled for n in traced.graph.nodes):
        raise NotFunctional(reason="it switches autograd on or off")
    return Functional(traced, found["outputs"], found["written"], found["same"], (*values, *seen))


def trace(run: Callable[..., Any], values: Sequence[Any]) -> GraphModule:
    """`run` as an ATen graph before dispatch. Raises NotFunctional for what torch cannot trace."""
    try:
        traced = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(*values)
    except CompileError:
        raise
    except Exception as err:  # the tracer may fail in any way; the graph is then left to Inductor, with the reason
        words = (str(err).strip().splitlines() or [""])[0]
        raise NotFunctional(reason=f"torch cannot trace it: {type(err).__name__}: {words}") from err
    for node in [n for n in traced.graph.nodes if n.op == "get_attr"]:
        _write_out(traced, node)
    return traced


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


def with_writes(run: Callable[..., Sequence[Any]], form: Functional) -> Callable[..., tuple[Any, ...]]:
    """The function with its in-place effects and its memory: `run` gives what `form.gm` gives; writes are copied back,
    and outputs share memory, and lie in it, as in the graph that was traced. Passes may drop copies: here they return.

    The function raises NotFunctional where an output should share memory and does not.
    """

    def whole(*args: Any) -> tuple[Any, ...]:
        results = list(run(*args))
        taken = {_memory(args[i]) for i in form.written}
        news = [_fresh(new) if _memory(new) in taken else new for new in results[form.outputs :]]
        outputs: list[Any] = []
        for at, out in enumerate(results[: form.outputs]):
            mine = isinstance(out, Tensor) and at not in form.same
            outputs.append(_as_seen(out, [*args, *outputs], len(args) + at, form.seen) if mine else out)
        for i, new in zip(form.written, news, strict=True):
            args[i].copy_(new)
        return tuple(args[form.same[i]] if i in form.same else out for i, out in enumerate(outputs))

    return whole


def _as_seen(out: Tensor, others: Sequence[Any], at: int, seen: Sequence[Any]) -> Tensor:
    """An output that shares memory with those of `others` that Dynamo saw it share with, and has the strides it saw."""
    like = seen[at]
    if not isinstance(like, Tensor) or not same_sizes(like.shape, out.shape):
        raise NotFunctional(reason="what Dynamo recorded of an output is not what it is")
    shared = [isinstance(t, Tensor) and _memory(t) == _memory(like) for t in seen[:at]]
    found = [isinstance(t, Tensor) and _memory(t) == _memory(out) for t in others]
    if any(f and not s for f, s in zip(found, shared, strict=True)):
        out, found = _fresh(out), [False] * len(found)
    if shared != found:
        raise NotFunctional(reason="an output shares memory that the raised graph does not keep")
    if _same_strides(out, like):
        return out
    order = sorted(range(like.dim()), key=lambda d: (-_hint(like.stride(d)), d))
    back = sorted(range(like.dim()), key=order.__getitem__)
    moved = out.permute(order).clone(memory_format=torch.contiguous_format).permute(back)
    if any(shared) or not _same_strides(moved, like):
        raise NotFunctional(reason="an output lies in memory in a way that the raised graph does not keep")
    return moved


def _fresh(t: Tensor) -> Tensor:
    """A copy with the strides of its source."""
    return t.clone()


def _same_strides(a: Tensor, b: Tensor) -> bool:
    """Equal strides, but for dimensions of one element or none, whose strides mean nothing."""
    pairs = zip(a.stride(), b.stride(), b.shape)
    return all(equal_size(s, t) or equal_size(d, 1) or equal_size(d, 0) for s, t, d in pairs)


def _hint(stride: Any) -> int:
    """A stride as a number, for ordering."""
    return int(stride) if isinstance(stride, int) else int(stride.node.hint or 0)


def _written(t: Any, before: Any) -> bool:
    if not isinstance(t, FunctionalTensor):
        return False
    if has_metadata_mutation(t, before, check_only_storage_mutation=False):
        raise NotFunctional(reason="it changes the shape or storage of an input in place")
    return has_data_mutation(t)


def _same(inputs: Sequence[Any], outputs: Sequence[Any], written: tuple[int, ...]) -> dict[int, int]:
    """Outputs that are an input themselves. Raises NotFunctional where an output is another view of a written input."""
    where = {id(t): i for i, t in enumerate(inputs) if isinstance(t, Tensor)}
    memory = {_memory(inputs[i]) for i in written}
    same = {}
    for at, out in enumerate(outputs):
        if id(out) in where:
            same[at] = where[id(out)]
        elif isinstance(out, Tensor) and _memory(out) in memory:
            raise NotFunctional(reason="it returns a view of an input that it writes to")
    return same


def _write_out(gm: GraphModule, node: Node) -> None:
    """Make a constant of one number a call that gives it: a graph must not hold tensors. Raises NotFunctional."""
    held = getattr(gm, str(node.target), None)
    if not isinstance(held, Tensor) or held.dim() or held.dtype.is_complex:
        raise NotFunctional(reason=f"it holds the constant {node.target}")
    edit = Editor(gm.graph, node)
    edit.replace(node, edit.call(torch.ops.aten.scalar_tensor.default, held.item(), dtype=held.dtype))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal, be they numbers or expressions."""
    return len(a) == len(b) and all(map(equal_size, a, b))


def _memory(t: Tensor) -> int:
    return int(t.untyped_storage()._cdata)


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
