"""Raise the experts of mixture-of-experts layers to one op, however the model batches them.

Structure finds two projections around a gate (`match_experts`). Which token meets which expert with which weight is
index arithmetic with many spellings, so it is proven by running it on random choices and comparing with the definition:
row r belongs to token t and expert e, its weight is that of (t, e), and the output sums the rows of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor, value
from deepinfer_compile.match_experts import Expert, Projection, count_of, experts_of, name_of, projections
from deepinfer_compile.match_moe import (
    CASTS,
    Concrete,
    NearMiss,
    ancestors,
    dense_weights,
    given_choice,
    id_candidates,
    operand,
    same_values,
    weight_candidates,
)
from deepinfer_compile.ops import EXPERTS
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@dataclass(frozen=True)
class _Mixture:
    """A choice of experts and their weighted sum. experts: one, batched, or one a module, in order of their ids.

    extra: what else the sum adds, behind the experts. ends: the node that holds the sum.
    """

    experts: tuple[Expert, ...]
    ids: Node
    weights: Node
    x: Node
    ends: Node
    extra: tuple[Node, ...] = ()


@register
@dataclass(frozen=True)
class RaiseExperts:
    """Replace spelled-out experts by deepinfer::experts.

    Before: `out = 0; for e: out = out + (weights * (ids == e)).sum(-1) * w2_e(silu(w1_e(x)) * w3_e(x))`, or rows sorted
            by expert through `_grouped_mm`, or weights gathered by id through `bmm`, or einsums over all experts
    After:  `out = experts(x, ids, weights, w13, w2, b13, b2, 'silu', ...)`
    Left alone: experts without a top-k choice, activations unknown to `ops/activation.py`, capacity-limited dispatch and
    anything whose weighting is not the definition.
    Weights of separate tensors are stacked or joined in the graph: a derivation, which the remark names.
    """

    name: ClassVar[str] = "raise-experts"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        modules: dict[Node, list[Expert]] = {}
        for found in experts_of(projections(gm.graph)):
            down = found.down if isinstance(found, Expert) else found[0]
            single = down.by == "all" and down.axis is None
            if isinstance(found, tuple):
                if not single or share_of(down) is not None:
                    ctx.miss(down.out, str(found[1]))
            elif not single:
                _attempt(down.out, [found], ctx)
            elif share_of(down) is not None:
                modules.setdefault(found.x, []).append(found)
        for group in modules.values():
            _attempt(group[-1].down.out, group, ctx)


def _attempt(node: Node, experts: Sequence[Expert], ctx: PassContext) -> None:
    first = experts[0]
    try:
        mixture = (
            _by_row(first)
            if first.down.by != "all"
            else _on_all(first)
            if first.down.axis is not None
            else _modules(experts)
        )
        derived = _derivation(mixture.experts)
    except NearMiss as reason:
        ctx.miss(node, str(reason))
        return
    count = len(experts) if len(experts) > 1 else count_of(first.down)
    if ctx.claim(mixture.ends, f"{name_of(first.down)}, {count} experts, {first.gate.kind}{derived}"):
        _rewrite(mixture)


def _derivation(experts: Sequence[Expert]) -> str:
    if len({e.gate for e in experts}) > 1 or len({len(e.ups) for e in experts}) > 1:
        raise NearMiss("the experts differ in their activation")
    if experts[0].gate.swapped:
        raise NearMiss("the fused projection holds up before gate")
    if len(experts) > 1:
        return f"; derived weights: stacks of {len(experts)} modules"
    return "; derived weight: gate and up joined" if len(experts[0].ups) == 2 else ""


def _by_row(expert: Expert) -> _Mixture:
    """Experts applied to one row per token and choice."""
    product, factor = weighted(expert.down.out)
    rows: Any = expert.down.rows
    count = count_of(expert.down)
    sources = [n for n in ancestors(expert.x) if isinstance(value(n), Tensor) and tensor(n).is_floating_point()]
    for ids in id_candidates(rows):
        for weights in weight_candidates(factor, ids):
            for x in (n for n in sources if tensor(n).dim() == 2 and _tokens(n) == _tokens(ids)):
                ends = summed(product, x)
                if same_values(
                    lambda seed: rows_agree(expert, (ids, weights, x), (factor, product, ends), count, seed)
                ):
                    return _Mixture((expert,), ids, weights, x, ends)
    raise NearMiss("rows, ids and weights do not belong together as tokens and their chosen experts")


def _on_all(expert: Expert) -> _Mixture:
    """All experts applied to all tokens in one batched product, then combined."""
    down, x = expert.down, expert.x
    axis = down.axis or 0
    if tensor(x).dim() != tensor(down.out).dim() - 1:
        raise NearMiss("the experts see a dispatched selection of the tokens, not all of them")
    ends = summed(down.out, x)
    for ids in id_candidates(ends, (down.out,)):
        for weights in weight_candidates(ends, ids):
            if same_values(lambda seed: all_agree(down, ids, weights, ends, axis, seed)):
                return _Mixture((expert,), ids, weights, x, ends)
    if not id_candidates(ends, (down.out,)):
        raise NearMiss("no top-k choice of experts is behind it, every token reaches every expert")
    raise NearMiss("the combination of the experts is not the chosen experts' weighted sum")


def _modules(experts: Sequence[Expert]) -> _Mixture:
    """One module an expert, each applied to all tokens and weighted, summed up."""
    terms = [weighted(e.down.out) for e in experts]
    root, leaves = sum_of([t for t, _ in terms])
    count = len(experts)
    for ids in id_candidates(terms[0][1]):
        for weights in weight_candidates(terms[0][1], ids):
            order = order_of([f for _, f in terms], ids, weights, count)
            if order is not None:
                ranked = tuple(e for _, e in sorted(zip(order, experts), key=lambda pair: pair[0]))
                return _Mixture(ranked, ids, weights, experts[0].x, root, leaves)
    raise NearMiss(f"the factors of the {count} experts are not their weights in a choice among {count}")


def _rewrite(m: _Mixture) -> None:
    edit = Editor(m.ends.graph, m.ends)
    gate = m.experts[0].gate
    width = int(tensor(m.x).shape[-1])
    flat = tensor(m.x).dim() == 2
    x = m.x if flat else edit.call(A.reshape.default, m.x, [-1, width])
    ids, weights = (
        n if tensor(n).dim() == 2 else edit.call(A.reshape.default, n, [-1, int(tensor(n).shape[-1])])
        for n in (m.ids, m.weights)
    )
    w13, b13, turned = _joined(edit, [e.ups for e in m.experts])
    w2, b2, turned2 = _joined(edit, [(e.down,) for e in m.experts])
    if turned2 != turned:
        w2 = edit.call(A.transpose.int, w2, 1, 2)
    form = (gate.kind, gate.alpha, gate.limit, gate.interleaved, turned)
    out = edit.call(EXPERTS.overload, x, ids, weights, w13, w2, b13, b2, *form)
    if not flat:
        shape = [d if isinstance(d, int) else -1 for d in tensor(m.ends).shape]
        out = edit.call(A.reshape.default, out, shape)
    for other in m.extra:
        out = edit.call(A.add.Tensor, out, other)
    edit.replace(m.ends, out)


def _joined(edit: Editor, parts: Sequence[Sequence[Projection]]) -> tuple[Node, Node | None, bool]:
    """(weight, bias, transposed) of all experts: [E, sum of O, I] and [E, sum of O] from [expert][part]."""
    turned = parts[0][0].transposed
    weights, biases = [], []
    for each in zip(*parts):
        weights.append(each[0].weight if len(each) == 1 else edit.call(A.stack.default, [p.weight for p in each]))
        given = [p.bias for p in each if p.bias is not None]
        if given:
            biases.append(given[0] if len(each) == 1 else edit.call(A.stack.default, given))
    if len(weights) == 1:
        return weights[0], biases[0] if biases else None, turned
    bias = edit.call(A.cat.default, biases, 1) if biases else None
    return edit.call(A.cat.default, weights, 2 if turned else 1), bias, turned
