"""Raise attention over an up-projected latent (MLA) to the op that knows the latent.

The sign of MLA is one linear whose output is split per head into the key's position-free part and the value, beside one
rotary key shared by all heads. Spelled out, each step re-expands the whole context; the op keeps the latent, so that a
cache holds `latent + rope` numbers a token and the form of the products can be chosen later. The up-projections stay
views of the checkpoint's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, target_name, tensor, value
from deepinfer_compile.match import RESHAPES
from deepinfer_compile.match_moe import NearMiss, item_of, operand, operands
from deepinfer_compile.ops import ATTENTION, LATENT_ATTENTION
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program

A = torch.ops.aten


@dataclass(frozen=True)
class _Slice:
    """Columns start..start+length-1 of a tensor's last axis."""

    source: Node
    start: int
    length: int


@dataclass(frozen=True)
class _Projection:
    """Columns of each head of a linear's output: linear(x, w) viewed as [B, T, H, width], as [B, H, T, length]."""

    linear: Node
    heads: int
    width: int
    start: int
    length: int


@register
@dataclass(frozen=True)
class RaiseLatentAttention:
    """Replace attention over an expanded latent by deepinfer::latent_attention.

    Before: `kv = linear(c, kv_b); k_nope, v = split(per head(kv), [dn, dv]); k = cat(k_nope, expand(k_rope));
            q = cat(q_nope, q_rope); o = attention(q, k, v, None, None, scale, 0, 0.0, True)`
    After:  `w = reshape(kv_b, [H, dn + dv, dl]); w_uk = w[:, :dn]; w_uv = transpose(w[:, dn:]);
            o = latent_attention(q_nope, q_rope, c, k_rope, w_uk, w_uv, scale)`
    Left alone: an up-projection with a bias, rotary keys of their own per head, queries that are not two parts, and
    attention with a mask, a window, a softcap, sinks or without causality.
    With `short`, a mask may take the place of causality, and attention is left alone whose queries are not known to be
    so few that reading the latent costs less than expanding it.
    With `require`, a block that bears the sign of MLA (a linear split into latent and rope, beside attention) and does
    not match is an error.
    """

    name: ClassVar[str] = "raise-latent-attention"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    require: bool = False
    short: bool = False

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if not is_op(node, ATTENTION.overload):
                continue
            try:
                up = _projection(operand(node, 2))
            except NearMiss:
                continue
            try:
                parts = _match(node, up, self.short)
                if self.short and not _absorbing_pays(up, parts):
                    raise NearMiss("expanding the latent costs less for as many queries, or for an unknown number")
            except NearMiss as reason:
                ctx.miss(node, str(reason))
                continue
            latent = int(tensor(operand(up.linear, 1)).shape[1])
            if ctx.claim(node, f"latent {latent}, rope {tensor(parts.k_rope).shape[-1]}, {up.heads} heads"):
                _rewrite(node, up, parts)

    def expected(self, program: Program) -> dict[str, int]:
        """Blocks that must match, by their number of attentions; none unless `require`."""
        if not self.require:
            return {}
        return {name: _attentions(gm) for name, gm in program.blocks.items() if _attentions(gm) and _bears_sign(gm)}


def _attentions(gm: GraphModule) -> int:
    return sum(is_op(n, ATTENTION.overload, LATENT_ATTENTION.overload) for n in gm.graph.nodes)


def _bears_sign(gm: GraphModule) -> bool:
    """Whether some linear's output is split in two unequal parts, the first of which reaches another linear."""
    for node in gm.graph.nodes:
        if not is_op(node, A.split_with_sizes.default) or not is_op(node.args[0], A.linear.default):
            continue
        sizes = node.args[1]
        first = next((u for u in node.users if item_of(u, 0) is node), None)
        if len(sizes) == 2 and sizes[0] != sizes[1] and first is not None and _reaches_linear(first):
            return True
    return False


def _reaches_linear(node: Node) -> bool:
    """Whether a value reaches a linear through ops that keep its width (its norm)."""
    width, queue, seen = tensor(node).shape[-1], [node], {node}
    for current in queue:
        for user in current.users:
            if is_op(user, A.linear.default):
                return True
            held = value(user)
            if user not in seen and isinstance(held, Tensor) and held.dim() and held.shape[-1] in (width, 1):
                seen.add(user)
                queue.append(user)
    return False


def _slice(node: Node) -> _Slice | None:
    """The columns that a node takes of a tensor's last axis, or None."""
    if is_op(node, A.slice.Tensor):
        source = operand(node)
        last = tensor(source).dim() - 1
        start, length = argument(node, "start") or 0, tensor(node).shape[-1]
        if argument(node, "dim") in (last, -1) and argument(node, "step") == 1 and isinstance(length, int):
            return _Slice(source, int(start) % int(tensor(source).shape[-1]), length)
        return None
    split = node.args[0] if node.args else None
    index = node.args[1] if len(node.args) > 1 else None
    if not isinstance(index, int) or item_of(node, index) is None or not isinstance(split, Node):
        return None
    if not is_op(split, A.split_with_sizes.default, A.split.Tensor):
        return None
    source = operand(split)
    if argument(split, "dim") not in (-1, tensor(source).dim() - 1):
        return None
    widths = [int(v.shape[-1]) for v in value(split)]
    return _Slice(source, sum(widths[:index]), widths[index])


def _projection(node: Node) -> _Projection:
    """A node [B, H, T, length] that is columns of each head of a linear's output. Raises NearMiss."""
    taken: _Slice | None = None
    turned = False
    while True:
        found = _slice(node)
        if found is not None and taken is None:
            taken, node = found, found.source
        elif is_op(node, A.transpose.int) and not turned and {d % 4 for d in node.args[1:]} == {1, 2}:  # type: ignore
            turned, node = True, operand(node)
        else:
            break
    if taken is None or not turned or not is_op(node, *RESHAPES) or tensor(node).dim() != 4:
        raise NearMiss(f"{target_name(node)} is not a head's part of an up-projection")
    linear = operand(node)
    heads, width = tensor(node).shape[2:]
    if not is_op(linear, A.linear.default) or not isinstance(heads, int):
        raise NearMiss(f"{target_name(linear)} is not an up-projection")
    return _Projection(linear, heads, int(width), taken.start, taken.length)


@dataclass(frozen=True)
class _Parts:
    """The operands of the op as they are in the graph: q_* [B, H, T, d], c [..., T, dl], k_rope [B, 1, T, dr]."""

    q_nope: Node
    q_rope: Node
    c: Node
    k_rope: Node


def _match(node: Node, up: _Projection, may_mask: bool) -> _Parts:
    masked = may_mask and argument(node, "mask") is not None
    mask = argument(node, "mask") if masked else None
    for name, plain in (("mask", mask), ("sinks", None), ("window", 0), ("softcap", 0.0), ("causal", not masked)):
        if argument(node, name) != plain:
            raise NearMiss(f"the attention has {name} {argument(node, name)}")
    if len(up.linear.args) > 2 and up.linear.args[2] is not None:
        raise NearMiss("the up-projection of the latent has a bias")
    k_nope, k_rope = _two_parts(operand(node, 1), "key")
    key = _projection(k_nope)
    if key.linear is not up.linear or key.start != 0 or key.length != up.start or up.start + up.length != up.width:
        raise NearMiss("key and value are not the two parts of one up-projection")
    shared = operand(k_rope) if is_op(k_rope, A.expand.default) else k_rope
    if tensor(shared).dim() != 4 or tensor(shared).shape[1] != 1:
        raise NearMiss("the rotary key is not one row shared by all heads")
    q_nope, q_rope = _two_parts(operand(node), "query")
    widths = [tensor(n).shape[-1] for n in (q_nope, q_rope)]
    if widths != [key.length, tensor(shared).shape[-1]]:
        raise NearMiss(f"the query's parts {widths} are not as wide as the key's")
    if tensor(q_nope).shape[1] != up.heads:
        raise NearMiss(f"{tensor(q_nope).shape[1]} query heads share {up.heads} heads of the latent")
    return _Parts(q_nope, q_rope, operand(up.linear), shared)


def _absorbing_pays(up: _Projection, parts: _Parts) -> bool:
    """Multiply-adds a head and key: absorbed `T (2 dl + dr)`, expanded `dl (dn + dv) + T (dn + dr + dv)`."""
    queries = tensor(parts.q_nope).shape[2]
    latent, rope = int(tensor(operand(up.linear, 1)).shape[1]), int(tensor(parts.q_rope).shape[-1])
    expanded = latent * up.width + queries * (up.width + rope)
    return isinstance(queries, int) and bool(queries * (2 * latent + rope) < expanded)


def _two_parts(node: Node, what: str) -> tuple[Node, Node]:
    """The two column blocks that a tensor is made of, by concatenation or by writing both into an empty one."""
    if is_op(node, A.cat.default):
        blocks = operands(node)
        if argument(node, "dim") in (-1, tensor(node).dim() - 1) and len(blocks) == 2:
            return blocks[0], blocks[1]
    writes = sorted(_writes(node), key=lambda w: w[0])
    ends = [start + int(tensor(block).shape[-1]) for start, block in writes]
    if len(writes) == 2 and [w[0] for w in writes] == [0, ends[0]] and ends[1] == tensor(node).shape[-1]:
        return writes[0][1], writes[1][1]
    raise NearMiss(f"the {what} is {target_name(node)}, not two parts side by side")


def _writes(node: Node) -> Iterator[tuple[int, Node]]:
    """(first column, block) of each write to an uninitialised tensor; nothing if it is something else."""
    found = []
    while is_op(node, A.slice_scatter.default):
        block = operand(node, 1)
        if argument(node, "dim") not in (-1, tensor(node).dim() - 1) or argument(node, "step") != 1:
            return
        source = operand(block, 1) if is_op(block, A.copy.default) else block
        found.append((int(argument(node, "start") or 0), source))
        node = operand(node)
    if is_op(node, A.new_empty.default, A.empty.memory_format, A.empty_like.default):
        yield from found


def _rewrite(node: Node, up: _Projection, parts: _Parts) -> None:
    edit = Editor(node.graph, node)
    nope = up.start
    weight = operand(up.linear, 1)
    latent = int(tensor(weight).shape[1])
    per_head = edit.call(A.reshape.default, weight, [up.heads, up.width, latent])
    w_uk = edit.call(A.slice.Tensor, per_head, 1, 0, nope)
    w_uv = edit.call(A.transpose.int, edit.call(A.slice.Tensor, per_head, 1, nope, up.width), 1, 2)
    c = parts.c
    while is_op(c, *RESHAPES) and tensor(operand(c)).shape[-1] == latent:
        c = operand(c)
    if tensor(c).dim() == 4 and tensor(c).shape[1] == 1:
        c = edit.call(A.squeeze.dim, c, 1)
    if tensor(c).dim() != 3:
        c = edit.call(A.reshape.default, c, [int(tensor(node).shape[0]), -1, latent])
    k_rope = edit.call(A.squeeze.dim, parts.k_rope, 1)
    scale, mask = argument(node, "scale"), argument(node, "mask")
    operands_ = (parts.q_nope, parts.q_rope, c, k_rope, w_uk, w_uv, scale, *([mask] if mask is not None else []))
    edit.replace(node, edit.call(LATENT_ATTENTION.overload, *operands_))
