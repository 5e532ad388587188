"""Residual streams: how they are mixed, read and written, as ops. What is matched is in `match_streams`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor
from deepinfer_compile.match import after, order_of, width
from deepinfer_compile.match_streams import Balanced, Mixed, balanced, collapsed, joined, mixed
from deepinfer_compile.ops import BALANCE_STREAMS, COLLAPSE_STREAMS, JOIN_STREAMS, MIX_STREAMS
from deepinfer_compile.passbase import NONE, PassContext, register


@register
@dataclass(frozen=True)
class RaiseHyperConnections:
    """Replace the spelled-out hyper-connections of residual streams by their ops.

    Before: `m = rms_norm(reshape(streams[1,T,K,D])) @ t(w); pre = sigmoid(m[:K] * s[0] + b[:K]) + eps; post = 2 *
            sigmoid(m[K:2K] * s[1] + b[K:2K]); c = softmax(m[2K:] * s[2] + b[2K:] as [K,K]) + eps; c = c / (sum(c, -2)
            + eps); c = c / (sum(c, -1) + eps); ...; x = sum(streams * pre[..., None], 2); new = post[..., None] * y +
            einsum('btjk,btjd->btkd', c, streams)`
    After:  `pre, post, c = mix_streams(streams, w, b, s, norm_eps, rounds, eps); x = collapse_streams(streams, pre);
            new = join_streams(streams, y, post, c)`
    The number of rounds is read off the graph. Where only the rounds fit, they become balance_streams.
    Left alone: rounds that start with rows or add another eps, sums over streams in half precision, mixed streams that
    nothing is added to.
    """

    name: ClassVar[str] = "raise-hyper-connections"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            _raise_rounds(node, ctx)
        for node in list(gm.graph.nodes):
            _raise_collapse(node, ctx)
            _raise_join(node, ctx)


def _raise_rounds(node: Node, ctx: PassContext) -> None:
    found = balanced(node)
    if found is None:
        return
    if isinstance(found, str):
        ctx.miss(node, found)
        return
    whole = mixed(found)
    if isinstance(whole, Mixed) and not _in_order(whole):
        whole = "a weight or bias is made after the product"
    streams = f"{width(found.node)} streams, {found.rounds} rounds"
    if isinstance(whole, str):
        ctx.miss(found.logits, f"{whole}: only its rounds are one op")
        if ctx.claim(node, f"balance of {streams}"):
            edit = Editor(node.graph, found.node)
            edit.replace(found.node, edit.call(BALANCE_STREAMS.overload, found.logits, found.rounds, found.eps))
    elif ctx.claim(node, f"mix of {streams}"):
        _emit_mix(found, whole)


def _in_order(found: Mixed) -> bool:
    order = order_of(found.products.graph)
    return all(order[n] < order[found.products] for n in (found.weight, found.base, found.scale))


def _emit_mix(found: Balanced, whole: Mixed) -> None:
    edit = Editor(whole.products.graph, after(whole.products))
    given = (whole.streams, whole.weight, whole.base, whole.scale)
    made = edit.call(MIX_STREAMS.overload, *given, whole.norm_eps, found.rounds, found.eps)
    for i, old in enumerate((whole.pre, whole.post, found.node)):
        edit.replace(old, edit.item(made, i))


def _raise_collapse(node: Node, ctx: PassContext) -> None:
    found = collapsed(node)
    if isinstance(found, str):
        ctx.miss(node, found)
    elif found is not None and ctx.claim(node, "sum of streams"):
        edit = Editor(node.graph, found.node)
        edit.replace(found.node, edit.call(COLLAPSE_STREAMS.overload, found.streams, found.pre))


def _raise_join(node: Node, ctx: PassContext) -> None:
    found = joined(node)
    if isinstance(found, str):
        ctx.miss(node, found)
    elif found is not None and ctx.claim(node, "new streams"):
        edit = Editor(node.graph, found.node)
        given = (found.streams, found.y, found.post, found.comb)
        edit.replace(found.node, edit.call(JOIN_STREAMS.overload, *given))
