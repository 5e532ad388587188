"""How much of a program is matrix products: FLOPs of each row that a block works on, read off the weights.

Attention is left out, since what it costs depends on the context; so is what is smaller than a product.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.graph import argument, is_op, tensor
from deepinfer_compile.ops import EXPERTS, MIX_STREAMS, OUTPUT_PROJECTION, WIDE_LINEAR
from deepinfer_compile.program import Program

A = torch.ops.aten


def row_flops(program: Program, calls: Iterable[Node]) -> int:
    """FLOPs of the products with weights that the calls do for one row, a multiply-add counting two."""
    return sum(_block_flops(program.blocks[str(call.target)]) for call in calls)


def projection_flops(program: Program, calls: Iterable[Node]) -> int:
    """The part of it that is the output projection."""
    nodes = (n for c in calls for n in program.blocks[str(c.target)].graph.nodes)
    return sum(_node_flops(n) for n in nodes if is_op(n, OUTPUT_PROJECTION.overload))


def _block_flops(gm: GraphModule) -> int:
    return sum(_node_flops(node) for node in gm.graph.nodes)


def _node_flops(node: Node) -> int:
    if is_op(node, A.linear.default, WIDE_LINEAR.overload, OUTPUT_PROJECTION.overload, MIX_STREAMS.overload):
        return 2 * _numel(tensor(argument(node, "weight")))
    if is_op(node, A.mm.default, A.matmul.default, A.addmm.default):
        factors: list[Tensor] = [tensor(n) for n in node.all_input_nodes if "weight" in n.meta]
        return 2 * sum(_numel(t) for t in factors if t.dim() == 2)
    if is_op(node, EXPERTS.overload):
        chosen = int(tensor(argument(node, "ids")).shape[-1])
        return 2 * chosen * sum(_numel(tensor(argument(node, name))[0]) for name in ("w13", "w2"))
    return 0


def _numel(t: Tensor) -> int:
    count = 1
    for size in t.shape:
        count *= int(size)
    return count
