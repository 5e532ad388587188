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

from deepinfer_compile.errors import NotFunctional
from deepinfer_compile.graph import Editor

CONVERSIONS = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "int", "long", "short", "char", "byte", "bool"}
    | {"cpu", "cuda", "contiguous"}
)
"""Tensor methods that may return their tensor itself."""


@dataclass(frozen=True)
class Functional:
    """gm returns (outputs..., new values of the inputs in `written`...); `same[i]` is the input that output i is."""

    gm: GraphModule
    outputs: int
    written: tuple[int, ...]
    same: dict[int, int]


def functional(gm: GraphModule, values: Sequence[Any]) -> Functional:
    """Trace a graph whose output is a flat tuple. values: its placeholders' fake tensors, symbols and constants.

    Raises NotFunctional for aliasing that a functional graph cannot express, and whatever the trace raises.
    """
    _refuse_aliases(values)
    found: dict[str, Any] = {}

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

    traced = make_fx(run, pre_dispatch=True, tracing_mode="symbolic")(*values)
    for node in [n for n in traced.graph.nodes if n.op == "get_attr"]:
        _write_out(traced, node)
    if any(n.op == "call_function" and n.target is torch._C._set_grad_enabled for n in traced.graph.nodes):
        raise NotFunctional(reason="it switches autograd on or off")
    return Functional(traced, found["outputs"], found["written"], found["same"])


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
    """The function with its in-place effects: `run` gives what `form.gm` gives, and writes are copied back."""

    def whole(*args: Any) -> tuple[Any, ...]:
        results = list(run(*args))
        for i, new in zip(form.written, results[form.outputs :], strict=True):
            args[i].copy_(new)
        return tuple(args[form.same[i]] if i in form.same else r for i, r in enumerate(results[: form.outputs]))

    return whole


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
