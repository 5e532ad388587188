"""Raise the experts of mixture-of-experts layers to one op, however the model batches them.

Structure finds two projections around a gate (`match_experts`). Which token meets which expert with which weight is
index arithmetic with many spellings, so it is proven by running it on random choices and comparing with the definition:
row r belongs to token t and expert e, its weight is that of (t, e), and the output sums the rows of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor, value
from deepinfer_compile.match import CASTS
from deepinfer_compile.match_experts import (
    PROBE_TOKENS,
    Choice,
    Expert,
    Projection,
    all_agree,
    count_of,
    experts_of,
    name_of,
    order_of,
    projections,
    rows_agree,
    share_of,
    sum_of,
    summed,
    weighted,
)
from deepinfer_compile.match_moe import (
    NearMiss,
    ancestors,
    id_candidates,
    operand,
    operands,
    same_values,
    weight_candidates,
)
from deepinfer_compile.match_spread import spread_out
from deepinfer_compile.ops import EXPERTS
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@dataclass(frozen=True)
class _Mixture:
    """A choice among experts (one that is batched, or one a module in order of their ids) and its weighted sum.

    extra: what else the sum adds, behind the experts. ends: the node that holds the sum.
    """

    experts: tuple[Expert, ...]
    choice: Choice
    ends: Node
    extra: tuple[Node, ...] = ()


@register
@dataclass(frozen=True)
class RaiseExperts:
    """Replace spelled-out experts by deepinfer::experts.

    Before: `out = 0; for e: out = out + (weights * (ids == e)).sum(-1) * w2_e(silu(w1_e(x)) * w3_e(x))`, or rows sorted
            by expert through `_grouped_mm`, or weights gathered by id through `bmm`, or einsums over all experts
    After:  `out = experts(x, ids, weights, w13, w2, b13, b2, 'silu', ...)`
    Left alone: experts without a top-k choice, activations unknown to `ops/activation.py`, dispatch with a capacity,
    and anything whose weighting is not the definition.
    Weights of separate tensors are stacked or joined in the graph: a derivation, which the remark names.
    """

    name: ClassVar[str] = "raise-experts"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        modules: dict[tuple[Node, Node | None], list[Expert]] = {}
        spread = [s for n in list(gm.graph.nodes) if (s := spread_out(n)) is not None]
        for found in experts_of(projections(gm.graph)):
            down = found.down if isinstance(found, Expert) else found[0]
            batched = down.by != "all" or down.axis is not None
            stack = only_user(down.out)
            stack = stack if is_op(stack, A.stack.default) else None
            if not batched and stack is None and share_of(down) is None:
                continue
            if isinstance(found, tuple):
                ctx.miss(down.out, str(found[1]))
            elif batched:
                _attempt([found], None, ctx)
            else:
                modules.setdefault((found.x, stack), []).append(found)
        for (_, stack), group in modules.items():
            _attempt(group, stack, ctx)
        for whole, total in spread:
            if is_op(total.args[0], A.reshape.default, EXPERTS.overload):
                whole.replace_all_uses_with(total)


def _attempt(experts: Sequence[Expert], stack: Node | None, ctx: PassContext) -> None:
    down = experts[0].down
    try:
        _check_alike(experts)
        if down.by != "all":
            found = _by_row(experts[0])
        elif down.axis is not None:
            found = _on_all(experts, down.out, down.axis)
        elif stack is not None:
            found = _stacked(experts, stack)
        else:
            found = _modules(experts)
    except NearMiss as reason:
        ctx.miss(experts[-1].down.out, str(reason))
        return
    count = len(experts) if down.by == "all" and down.axis is None else count_of(down)
    if ctx.claim(found.ends, f"{name_of(down)}, {count} experts, {experts[0].gate.kind}{_derived(experts)}"):
        _rewrite(found)


def _check_alike(experts: Sequence[Expert]) -> None:
    """One activation and one set of biases for all experts, which is what the op can say."""
    if len({e.gate for e in experts}) > 1 or len({len(e.ups) for e in experts}) > 1:
        raise NearMiss("the experts differ in their activation")
    if experts[0].gate.swapped:
        raise NearMiss("the fused projection holds up before gate")
    if len({p.bias is None for e in experts for p in e.ups}) > 1 or len({e.down.bias is None for e in experts}) > 1:
        raise NearMiss("only some of the experts' projections have a bias")


def _derived(experts: Sequence[Expert]) -> str:
    """What the op's weights are computed from, where they are not the checkpoint's own."""
    if experts[0].down.axis is None and experts[0].down.by == "all":
        return f"; derived weights: stacks of {len(experts)} modules"
    return "; derived weight: gate and up joined" if len(experts[0].ups) == 2 else ""


def _by_row(expert: Expert) -> _Mixture:
    """Experts applied to one row per token and choice."""
    product, factor = weighted(expert.down.out)
    rows = expert.down.rows
    if rows is None:
        raise NearMiss("nothing says which expert a row meets")
    width, count = tensor(expert.x).shape[-1], count_of(expert.down)
    sources = [n for n in ancestors(expert.x) if isinstance(v := value(n), Tensor) and v.dim() == 2]
    sources = [n for n in sources if tensor(n).shape[-1] == width and tensor(n).is_floating_point()]
    for ids in id_candidates(rows):
        tokens = str(tensor(ids).shape[0])
        for weights in weight_candidates(factor, ids):
            for x in (n for n in sources if str(tensor(n).shape[0]) == tokens):
                choice, ends = Choice(ids, weights, x), summed(product, x)
                if same_values(partial(rows_agree, expert, choice, factor, product, ends), ids, count, PROBE_TOKENS):
                    return _Mixture((expert,), choice, ends)
    raise NearMiss("rows, ids and weights do not belong together as tokens and their chosen experts")


def _on_all(experts: Sequence[Expert], outputs: Node, axis: int) -> _Mixture:
    """All experts applied to all tokens, their outputs in one tensor, then combined."""
    x, count = experts[0].x, int(tensor(outputs).shape[axis])
    if tensor(x).dim() != tensor(outputs).dim() - 1:
        raise NearMiss("the experts see a dispatched selection of the tokens, not all of them")
    ends = summed(outputs, x)
    candidates = id_candidates(ends, (outputs,))
    for ids in candidates:
        for weights in weight_candidates(ends, ids):
            choice = Choice(ids, weights, x)
            if same_values(partial(all_agree, outputs, axis, choice, ends), ids, count, PROBE_TOKENS):
                return _Mixture(tuple(experts), choice, ends)
    if not candidates:
        raise NearMiss("no top-k choice of experts is behind it, every token reaches every expert")
    raise NearMiss("the combination of the experts is not the chosen experts' weighted sum")


def _stacked(experts: Sequence[Expert], stack: Node) -> _Mixture:
    """One module an expert, the outputs stacked along an expert axis."""
    by_out = {e.down.out: e for e in experts}
    outputs = operands(stack)
    if any(n not in by_out for n in outputs):
        raise NearMiss("something that is not an expert of the same input is stacked with the experts")
    return _on_all([by_out[n] for n in outputs], stack, int(argument(stack, "dim")) % tensor(stack).dim())


def _modules(experts: Sequence[Expert]) -> _Mixture:
    """One module an expert, each applied to all tokens and weighted, summed up term by term."""
    terms = [weighted(e.down.out) for e in experts]
    ends, extra = sum_of([product for product, _ in terms])
    x = experts[0].x
    if tensor(ends).dtype != tensor(x).dtype or str(tensor(ends).shape) != str(tensor(x).shape):
        raise NearMiss("the experts' outputs are not summed to a tensor like their input")
    factors = [factor for _, factor in terms]
    for ids in id_candidates(factors[0]):
        for weights in weight_candidates(factors[0], ids):
            order = order_of(factors, ids, weights)
            if order is not None:
                ranked = [e for _, e in sorted(zip(order, experts), key=lambda pair: pair[0])]
                return _Mixture(tuple(ranked), Choice(ids, weights, x), ends, extra)
    raise NearMiss(f"the factors of the {len(terms)} experts are not their weights in a choice among them")


def _rewrite(m: _Mixture) -> None:
    edit = Editor(m.ends.graph, m.ends)
    gate = m.experts[0].gate
    x, ids, weights = (
        n if tensor(n).dim() == 2 else edit.call(A.reshape.default, n, [-1, int(tensor(n).shape[-1])])
        for n in (m.choice.x, _narrow(m.choice.ids), m.choice.weights)
    )
    w13, b13, turned = _joined(edit, [e.ups for e in m.experts])
    w2, b2, turned2 = _joined(edit, [(e.down,) for e in m.experts])
    if turned2 != turned:
        w2 = edit.call(A.transpose.int, w2, 1, 2)
    form = (gate.kind, gate.alpha, gate.limit, gate.interleaved, turned)
    out = edit.call(EXPERTS.overload, x, ids, weights, w13, w2, b13, b2, *form)
    if tensor(m.choice.x).dim() != 2:
        shape = [d if isinstance(d, int) else -1 for d in tensor(m.ends).shape]
        out = edit.call(A.reshape.default, out, shape)
    for other in m.extra:
        out = edit.call(A.add.Tensor, out, other)
    edit.replace(m.ends, out)


def _narrow(ids: Node) -> Node:
    """Ids before a cast from one integer type to another: the op takes any."""
    while is_op(ids, *CASTS) and tensor(operand(ids)).dtype in (torch.int32, torch.int64):
        ids = operand(ids)
    return ids


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
