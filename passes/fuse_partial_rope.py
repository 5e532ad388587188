"""Join rotary embedding of a part of each head with the parts that stay, so that heads are written once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor
from deepinfer_compile.match import Part, is_last, operand, part, width
from deepinfer_compile.ops import PARTIAL_ROPE, ROPE
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@register
@dataclass(frozen=True)
class FusePartialRope:
    """Replace a rope of some channels and the cat that puts them back by deepinfer::partial_rope.

    Before: `r = rope(x[..., 12:], cos, neg(sin), 'pair'); y = cat([x[..., :12], r], -1)`
    After:  `y = partial_rope(x, cos, sin, 'pair', 12, 8, True)`; with sin itself, the last is False
    The turned channels may be the first, the last or between others. Where they are all, the cat goes: the other parts
    are empty.
    Left alone: parts of another tensor, in another order or not all of it, and turned channels that others read too.
    """

    name: ClassVar[str] = "fuse-partial-rope"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.FUSED})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if not is_op(node, A.cat.default) or not is_last(node, argument(node, "dim")):
                continue
            turned = [p for p in operand(node) if is_op(p, ROPE.overload)]
            if not turned:
                continue
            piece = _turned_part(node, turned)
            if isinstance(piece, str):
                ctx.miss(node, piece)
            elif ctx.claim(node, f"{piece.stop - piece.start} of {width(node)} channels"):
                _fuse(node, turned[0], piece)


def _turned_part(cat: Node, turned: list[Node]) -> Part | str:
    """The channels of one tensor that are turned, or why the cat is not that tensor with some of them turned."""
    if len(turned) > 1 or only_user(turned[0]) is None:
        return "turned channels are read elsewhere or joined with others that are"
    found, at = _part(operand(turned[0])), 0
    pieces = [found if p is turned[0] else part(p) for p in operand(cat)]
    for piece in pieces:
        if piece is None or piece.source is not found.source or piece.step != 1 or piece.start != at:
            return "the joined channels are not those of one tensor in their order"
        at = piece.stop
    if at != width(found.source) or tensor(found.source).dim() != tensor(cat).dim():
        return "the joined channels are not all of one tensor"
    return found


def _part(node: Node) -> Part:
    """The channels of another tensor that a node shows, else all its own."""
    return part(node) or Part(node, 0, width(node) or 0, 1)


def _fuse(cat: Node, rope: Node, piece: Part) -> None:
    _, cos, sin, style = rope.args
    inverse = is_op(sin, A.neg.default)
    sin = operand(sin) if inverse else sin
    edit = Editor(cat.graph, cat)
    if (piece.start, piece.stop) == (0, width(cat)):
        edit.replace(cat, rope)
        return
    args = (piece.source, cos, sin, style, piece.start, piece.stop - piece.start, inverse)
    edit.replace(cat, edit.call(PARTIAL_ROPE.overload, *args))
