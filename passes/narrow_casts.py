"""Drop casts that change nothing: what is widened, at most added to something, and narrowed again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor
from deepinfer_compile.match import dtype_of, is_cast, is_tensor, operand, uncast
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten
SIMPLE = (A.add.Tensor, A.sub.Tensor, A.mul.Tensor)
"""Computed in fp32 and rounded once where operands are half-precision numbers: what the casts around them spell out."""
HALVES = (torch.bfloat16, torch.float16)


@register
@dataclass(frozen=True)
class NarrowCasts:
    """Replace what is widened and narrowed again by what it was, sums, differences and products of two such by theirs.

    Before: `to(to(x, f32), bf16)`; `to(add(to(x, f32), y), bf16)`, x and y in bf16
    After:  `x`; `add(x, y)`: the same bits
    Left alone: wide results that others read too, and what is computed in fp64.
    """

    name: ClassVar[str] = "narrow-casts"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if not is_cast(node) or not dtype_of(node).is_floating_point:
                continue
            wide, dtype = operand(node), dtype_of(node)
            source = uncast(wide)
            if source is not wide and dtype_of(source) == dtype:
                if ctx.claim(node, f"{dtype} all along"):
                    Editor(gm.graph, node).replace(node, source)
            elif _is_simple(wide, dtype) and ctx.claim(node, f"computed in {dtype_of(wide)} by itself"):
                edit = Editor(gm.graph, node)
                edit.replace(node, edit.call(wide.target, uncast(operand(wide)), uncast(operand(wide, 1))))  # type: ignore[arg-type]


def _is_simple(node: Node, dtype: torch.dtype) -> bool:
    """Whether a call gives in fp32 what it would give of operands of `dtype`, before rounding."""
    if not is_op(node, *SIMPLE) or dtype not in HALVES or dtype_of(node) != torch.float32:
        return False
    if only_user(node) is None or argument(node, "alpha", 1) != 1 or not all(map(is_tensor, node.args[:2])):
        return False
    sides = [uncast(operand(node, i)) for i in (0, 1)]
    # a number in a tensor without dimensions takes no part in the type
    return all(dtype_of(side) == dtype and tensor(side).dim() > 0 for side in sides)
