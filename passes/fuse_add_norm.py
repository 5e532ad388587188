"""Join a residual addition with the norm that reads it, so that the stream is read once and written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, is_op
from deepinfer_compile.match import dtype_of, operand, order_of, same_shape, sums
from deepinfer_compile.ops import ADD_RMS_NORM, RMS_NORM
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program


@register
@dataclass(frozen=True)
class FuseAddNorm:
    """Replace a residual addition and the rms_norm of its sum by deepinfer::add_rms_norm.

    Before: `s = x + y; n = rms_norm(s, w, eps, 0.0, True)`, and s is used elsewhere (the residual stream)
    After:  `n, s = add_rms_norm(x, y, w, eps, 0.0, True)`
    Left alone: sums that broadcast or change dtype, sums that only the norm reads (nothing to save: the sum need not be
    written), second norms of one sum, and norms whose weight is made after the sum.
    `required`: sites that every layer must have.
    """

    name: ClassVar[str] = "fuse-add-norm"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.FUSED})
    breaks: ClassVar[frozenset[Fact]] = NONE
    required: int = 0

    def expected(self, program: Program) -> dict[str, int]:
        """How many sites each layer block must have."""
        return {name: self.required for name in program.blocks if program.layers_of(name)}

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        order = order_of(gm.graph)
        norms = [n for n in gm.graph.nodes if is_op(n, RMS_NORM.overload)]
        taken: set[Node] = set()
        for norm, total in [(n, operand(n)) for n in norms if sums(operand(n))]:
            weight = operand(norm, 1)
            reason = _unfit(total, norm)
            if total in taken:
                reason = "the sum is joined with another norm of it"
            elif isinstance(weight, Node) and order[weight] > order[total]:
                reason = "the norm's weight is made after the sum"
            if reason:
                ctx.miss(norm, reason)
            elif ctx.claim(norm, "residual addition and norm"):
                taken.add(total)
                _fuse(total, norm)


def _unfit(total: Node, norm: Node) -> str:
    """Why a sum and its norm are not joined, or nothing."""
    left, right = sums(total)[0]
    if not same_shape(left, right) or not same_shape(left, total):
        return "the sum broadcasts an operand"
    if not dtype_of(left) == dtype_of(right) == dtype_of(total):
        return "the sum changes a dtype"
    return "" if set(total.users) - {norm} else "only the norm reads the sum"


def _fuse(total: Node, norm: Node) -> None:
    """Put the joint op where the sum is, before every other use of it."""
    edit = Editor(total.graph, total)
    both = edit.call(ADD_RMS_NORM.overload, *total.args[:2], *norm.args[1:])
    normed, summed = edit.item(both, 0), edit.item(both, 1)
    edit.replace(norm, normed)
    edit.replace(total, summed)
