"""Let a linear of widened operands read them as they are stored: the casts would write a copy of the weight a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor
from deepinfer_compile.match import dtype_of, operand, uncast
from deepinfer_compile.ops import WIDE_LINEAR
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@register
@dataclass(frozen=True)
class FuseLinearCasts:
    """Replace a linear of widened operands by deepinfer::wide_linear of the operands themselves.

    Before: `linear(to(x, f32), to(w, f32))`, x and w in bf16
    After:  `wide_linear(x, w, None, f32)`
    Also `matmul(to(x, f32), t(to(w, f32)))`. A bias is taken as it was before its cast, if it has one. The cast of x
    stays for others that read it.
    Left alone: a widened weight that others read too, a widened x or weight beside a wide one, and operands that were
    of different types.
    """

    name: ClassVar[str] = "fuse-linear-casts"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            wide = _operands(node)
            if wide is None:
                continue
            x, weight = map(uncast, wide)
            if weight is wide[1]:  # as nearly every linear is
                continue
            reason = _unfit(wide, x, weight)
            if reason:
                ctx.miss(node, reason)
            elif ctx.claim(node, f"linear in {dtype_of(node)} of operands in {dtype_of(weight)}"):
                bias = argument(node, "bias") if is_op(node, A.linear.default) else None
                edit = Editor(gm.graph, node)
                narrow = uncast(bias) if isinstance(bias, Node) else None
                edit.replace(node, edit.call(WIDE_LINEAR.overload, x, weight, narrow, dtype_of(node)))


def _operands(node: Node) -> tuple[Node, Node] | None:
    """x and the weight of a linear, or of a product with a weight that is turned over for it; None for others."""
    if is_op(node, A.linear.default):
        return operand(node), operand(node, 1)
    turned = operand(node, 1) if is_op(node, A.matmul.default, A.mm.default) else None
    if turned is None or not is_op(turned, A.t.default) or only_user(turned) is None or tensor(turned).dim() != 2:
        return None
    return operand(node), operand(turned)


def _unfit(wide: tuple[Node, Node], x: Node, weight: Node) -> str:
    """Why casts are kept, or nothing."""
    if only_user(wide[1]) is None:
        return "others read the widened weight too"
    if x is wide[0]:
        return "only the weight is widened"
    return "" if dtype_of(x) == dtype_of(weight) else f"x is {dtype_of(x)}, the weight {dtype_of(weight)}"
