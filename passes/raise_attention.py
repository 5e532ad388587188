"""Raise attention that a model spells out itself to one op that knows what queries may see.

Models not captured through the attention interface carry masks as tensors [T, T]. Serving needs the meaning: causal, or
a causal window. It is found by running the mask (`match_mask`), for every call of a block, because layers of one block
may be handed different masks; such a block becomes one block per meaning. Masks that nobody reads any more are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, copy_module, is_op, tensor
from deepinfer_compile.match_attention import Found, Heads, is_candidate, match
from deepinfer_compile.match_mask import Masks, Sight, sight_of_sizes
from deepinfer_compile.match_moe import NearMiss
from deepinfer_compile.ops import ATTENTION
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program
from deepinfer_compile.prune import prune

A = torch.ops.aten


@register
@dataclass(frozen=True)
class RaiseAttention:
    """Replace spelled-out attention by deepinfer::attention.

    Before: `s = q @ transpose(repeat_kv(k)) * scale; s = s.masked_fill(~tril(ones(T, T)), -inf); p = softmax(s)`
            `o = transpose(p @ repeat_kv(v), 1, 2)`; or scaled_dot_product_attention with a mask
    After:  `o = attention(q, k, v, None, sinks, scale, window, softcap, True)`, keys and values with their own heads
    Left alone: weights read by others, products of more than four dimensions, dropout, masks before a softcap. A mask
    whose meaning is not known (it depends on tokens, or adds other numbers than 0 and -inf) stays an operand.
    Masks made of position_ids are taken to see consecutive positions, which is what a packed request has. With
    packed=False nothing is known of positions or lengths: a mask stays an operand unless sizes alone make it causal.
    """

    name: ClassVar[str] = "raise-attention"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    packed: bool = True

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        masks = Masks(program) if self.packed else None
        plans = {name: _plan(program, name, masks) for name in program.blocks}
        changed = False
        for name, plan in plans.items():
            for block, sights in _divide(program, name, plan):
                ctx.graph, ctx.layers = block, tuple(program.layers_of(block))
                changed |= _rewrite_block(program.blocks[block], sights, ctx, self.packed)
        if changed:
            prune(program)
        return program


_Sights = tuple[Sight | str, ...]
"""For each candidate of a block, what its masks let queries see, or why that is not known."""


def _plan(program: Program, name: str, masks: Masks | None) -> dict[_Sights, list[Node]]:
    """The calls of a block by what their masks mean."""
    sites = [node for node in program.blocks[name].graph.nodes if is_candidate(node, masks is not None)]
    plan: dict[_Sights, list[Node]] = {}
    for call in [c for c in program.calls() if c.target == name] if sites else []:
        plan.setdefault(tuple(_sight(call, node, masks) for node in sites), []).append(call)
    return plan


def _sight(call: Node, node: Node, masks: Masks | None) -> Sight | str:
    try:
        found = match(node, masks is not None)
        if masks is None:
            return _sight_alone(found)
        seen = masks.sight(call, found.terms)
    except NearMiss as reason:
        return str(reason)
    return Sight(seen.causal or found.causal, seen.window)


def _sight_alone(found: Found) -> Sight | str:
    """What is known without a program around: of a mask made of sizes alone, whether it is plainly causal."""
    if not found.terms:
        return Sight(found.causal)
    queries, keys = (tensor(h.node).shape[-3 if h.turned else -2] for h in (found.q, found.k))
    if str(queries) != str(keys):
        return "positions and lengths are the caller's"
    seen = sight_of_sizes(found.terms, queries)
    return "the caller's mask has a window" if seen.window else Sight(seen.causal or found.causal)


def _divide(program: Program, name: str, plan: dict[_Sights, list[Node]]) -> list[tuple[str, _Sights]]:
    """One block per meaning; the first keeps the name."""
    found: list[tuple[str, _Sights]] = []
    source = program.blocks[name]
    copies = [source, *(copy_module(source) for _ in range(len(plan) - 1))]
    for i, (sights, calls) in enumerate(plan.items()):
        block = name if i == 0 else f"{name}_{i}"
        program.blocks[block] = copies[i]
        if i > 0:
            program.skeleton.add_module(block, copies[i])
        for call in calls:
            call.target = block
        found.append((block, sights))
    return found


def _rewrite_block(gm: GraphModule, sights: Sequence[Sight | str], ctx: PassContext, packed: bool) -> bool:
    changed = False
    for node, seen in zip([n for n in gm.graph.nodes if is_candidate(n, packed)], sights):
        try:
            found = match(node, packed)
            if not packed and found.ends is not node and any(t.kind != "added" for t in found.terms):
                raise NearMiss("a row that sees no key would be 0, which the softmax makes NaN")
        except NearMiss as reason:
            ctx.miss(node, str(reason))
            continue
        if isinstance(seen, str) and (len(found.terms) > 1 or found.terms[0].fill is not None):
            ctx.miss(node, f"of {len(found.terms)} masks one is not known: {seen}")
            continue
        words = f"mask kept: {seen}" if isinstance(seen, str) else _words(seen)
        if ctx.claim(found.ends, f"{words}{', sinks' if found.sinks else ''}{', softcap' if found.softcap else ''}"):
            _rewrite(found, seen)
            changed = True
    return changed


def _words(seen: Sight) -> str:
    if not seen.causal:
        return "every key visible"
    return f"causal, window {seen.window}" if seen.window else "causal"


def _rewrite(found: Found, seen: Sight | str) -> None:
    edit = Editor(found.ends.graph, found.ends)
    q, k, v = (_spread(edit, h) for h in (found.q, found.k, found.v))
    mask: Any = None
    if isinstance(seen, str):
        mask = found.terms[0].node
        mask = edit.call(A.bitwise_not.default, mask) if found.terms[0].kind == "hidden" else mask
    window, causal = (0, found.causal) if isinstance(seen, str) else (seen.window, seen.causal)
    out = edit.call(ATTENTION.overload, q, k, v, mask, found.sinks, found.scale, window, found.softcap, causal)
    if tensor(out).dtype != tensor(found.ends).dtype:
        out = edit.call(A._to_copy.default, out, dtype=tensor(found.ends).dtype)
    if found.out_turned:
        edit.replace(found.ends, out)
        return
    rank = tensor(found.ends).dim()
    for user in [u for u in found.ends.users if rank == 4 and _turns(u)]:
        user.replace_all_uses_with(out)
    turned = edit.call(A.transpose.int, out, 1, 2)
    for _ in range(4 - rank):
        turned = edit.call(A.squeeze.dim, turned, 0)
    edit.replace(found.ends, turned)


def _spread(edit: Editor, heads: Heads) -> Node:
    """A tensor as [B, H, T, D]."""
    node = edit.call(A.transpose.int, heads.node, 1, 2) if heads.turned else heads.node
    for _ in range(4 - tensor(node).dim()):
        node = edit.call(A.unsqueeze.default, node, 0)
    return node


def _turns(node: Node) -> bool:
    """Whether a node exchanges heads and tokens."""
    return is_op(node, A.transpose.int) and {int(d) % 4 for d in node.args[1:]} == {1, 2}  # type: ignore
