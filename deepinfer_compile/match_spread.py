"""Experts whose sum hides in a product: spelt out, so that what finds experts finds these too."""

from __future__ import annotations

from torch.fx import Node

from deepinfer_compile.graph import Editor, is_op, tensor
from deepinfer_compile.match import uncast
from deepinfer_compile.match_experts import is_weight
from deepinfer_compile.match_moe import A, operand, operands


def spread_out(node: Node) -> tuple[Node, Node] | None:
    """(sum, the same spelt out) of an einsum that weights inner values and sums over experts at once.

    `nei,edi->nd` of x * share[..., 1] and w is the sum over e of `nei,edi->ned` of x and w, times share. The latter is
    inserted before it, in the type of its operands before they were widened, and read by nobody yet.
    """
    if not is_op(node, A.einsum.default) or len(node.all_input_nodes) != 2:
        return None
    inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
    first, _, second = inputs.partition(",")
    inner, weight = operands(node, 1)
    known = len(first) == 3 and second == first[1] + out[1:] + first[2] and out[:1] == first[0] and len(out) == 2
    if not known or not is_op(inner, A.mul.Tensor) or not is_weight(uncast(weight), 3):
        return None
    factors = operand(inner), operand(inner, 1)
    for x, share in (factors, factors[::-1]):
        if tensor(share).shape[-1:] == (1,) and tensor(x).dim() == 3:
            edit = Editor(node.graph, node)
            each = edit.call(A.einsum.default, f"{first},{second}->{first[:2]}{out[1]}", [uncast(x), uncast(weight)])
            total = edit.call(A.sum.dim_IntList, edit.call(A.mul.Tensor, each, share), [1])
            kind = tensor(uncast(x)).dtype
            narrow = total if tensor(total).dtype == kind else edit.call(A._to_copy.default, total, dtype=kind)
            return node, edit.call(A._to_copy.default, narrow, dtype=tensor(node).dtype)
    return None
