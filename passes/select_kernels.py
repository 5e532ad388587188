"""Bind dialect ops and linears to the kernels of a target, and say what runs otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, is_op, target_name, tensor, value
from deepinfer_compile.ops import OUTPUT_PROJECTION, WIDE_LINEAR, find
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.runtime.interpret import resolve
from deepinfer_compile.verify import contiguous

A = torch.ops.aten


@register
@dataclass(frozen=True)
class SelectKernels:
    """Replace every op that the target has a kernel for by that kernel.

    Before: `y = aten.linear(x, w); o = deepinfer.cached_attention(...)`
    After:  `y = deepinfer_cpu.linear(x, w, None); o = deepinfer_cpu.cached_attention(...)`
    What a block gives is made contiguous (`clone`) where it is not: compiled blocks read their inputs so.
    Left alone: dialect ops without a kernel, which are compiled from their reference (a remark each), and plain ATen.
    `kernels` maps an op's name (`aten.linear`, `deepinfer.experts`) to the kernel op of the same meaning.
    """

    name: ClassVar[str] = "select-kernels"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.LOWERED})
    breaks: ClassVar[frozenset[Fact]] = NONE
    kernels: tuple[tuple[str, str], ...] = ()

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        table = dict(self.kernels)
        for node in list(gm.graph.nodes):
            if is_op(node, OUTPUT_PROJECTION.overload):
                node = _split_projection(node)
            elif is_op(node, WIDE_LINEAR.overload):
                node = _split_wide(node)
            if node.op != "call_function":
                continue
            kernel = table.get(target_name(node))
            if kernel is not None:
                if ctx.claim(node, f"kernel {kernel}"):
                    _bind(node, kernel)
            elif find(node.target) is not None:
                ctx.miss(node, f"{target_name(node)} has no kernel here; compiled from its reference")
        _lay_out(gm)


def _split_projection(node: Node) -> Node:
    """Row selection and linear apart, so that the linear gets the linear's kernel."""
    x, rows, weight, bias = node.args
    edit = Editor(node.graph, node)
    picked = edit.call(A.index_select.default, x, -2, rows)
    linear = edit.call(A.linear.default, picked, weight, bias)
    edit.replace(node, linear)
    return linear


def _split_wide(node: Node) -> Node:
    """Casts and linear apart, for the same reason."""
    x, weight, bias, dtype = node.args
    edit = Editor(node.graph, node)
    wide = [t if t is None else edit.call(A._to_copy.default, t, dtype=dtype) for t in (x, weight, bias)]
    linear = edit.call(A.linear.default, *wide)
    edit.replace(node, linear)
    return linear


def _lay_out(gm: GraphModule) -> None:
    """Copy outputs that are views into something else. This is no choice, so bisection cannot cap it."""
    output = gm.graph.output_node()
    edit = Editor(gm.graph, output)
    for node in list(output.all_input_nodes):
        if isinstance(value(node), Tensor) and not contiguous(tensor(node)):
            copy = edit.call(A.clone.default, node, memory_format=torch.contiguous_format)
            output.replace_input_with(node, copy)


def _bind(node: Node, kernel: str) -> None:
    target = resolve(f"{kernel}.default")
    want = len(target._schema.arguments)  # type: ignore[attr-defined]
    args = (*node.args, *([None] * (want - len(node.args)))) if not node.kwargs else node.args
    edit = Editor(node.graph, node)
    edit.replace(node, edit.call(target, *args, **node.kwargs))
    node.graph.erase_node(node)  # a call that writes its cache is never dead, so it must go here
