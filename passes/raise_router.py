"""Raise the routers of mixture-of-experts layers to one op.

A router is anchored at the top-k over experts. What is ranked gives the scores, the balancing bias and the group limit;
what is done with the chosen scores gives normalisation and scaling. Steps are folded from the top-k outwards and only
while nobody else reads the value between them, so a step that does not fit simply stays in the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, target_name, tensor
from deepinfer_compile.match import CASTS, RESHAPES
from deepinfer_compile.match_moe import Concrete, NearMiss, ancestors, before_f32, item_of, operand
from deepinfer_compile.ops import EXPERTS, ROUTE
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten
NEVER_CHOSEN = -1e9
"""Scores filled with this or less lose against every real score."""


@dataclass(frozen=True)
class _Router:
    """A router as far as it was understood. `scores`: the unbiased scores; `ends`: the last node of its weights."""

    logits: Node
    scores: Node
    ends: Node
    kind: str = "softmax_topk"
    bias: Node | None = None
    groups: int = 1
    kept: int = 1
    rank: str = "none"
    normalize: bool = False
    eps: float = 0.0
    scale: float = 1.0


@register
@dataclass(frozen=True)
class RaiseRouter:
    """Replace a spelled-out router by deepinfer::route.

    Before: `s = sigmoid(logits); c = s + bias; <keep 2 of 3 groups of c>; _, ids = topk(c, 4); w = gather(s, ids);
            w = w / (sum(w) + 1e-20) * 2.5`
    After:  `ids, w = route(logits, bias, 'sigmoid', 4, 3, 2, 'top2', True, 1e-20, 2.5)`
    Left alone: ids looked up by token (hash routing), scores of another kind, weights taken from biased scores,
    excluded groups filled with 0 under a bias (they can win there), f64 logits, a learned scale (stays behind the op).
    Where the model rounds its scores to 16 bits before the choice, the op keeps them in f32.
    """

    name: ClassVar[str] = "raise-router"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        inner: set[Node] = set()
        products = [n for n in gm.graph.nodes if is_op(n, A.linear.default, A.matmul.default, A.mm.default)]
        for node in reversed(list(gm.graph.nodes)):
            if is_op(node, A.gather.default) and _looked_up(node):
                ctx.miss(node, "the experts are looked up in a table, not chosen by score")
            if node in inner or not _is_candidate(node):
                continue
            inner.update(n for n in ancestors(node.args[0], products) if is_op(n, A.topk.default))
            try:
                router = _match(node)
            except NearMiss as reason:
                ctx.miss(node, str(reason))
                continue
            kept = "" if tensor(router.scores).dtype == torch.float32 else ", scores kept in f32"
            if ctx.claim(node, f"{router.kind} router, top {node.args[1]} of {tensor(router.logits).shape[-1]}{kept}"):
                _rewrite(node, router)


def _is_candidate(node: Node) -> bool:
    """A top-k along a static last axis: over experts, not over keys."""
    if not is_op(node, A.topk.default) or not isinstance(node.args[0], Node):
        return False
    scores, k = tensor(node.args[0]), node.args[1]
    last = argument(node, "dim") in (-1, scores.dim() - 1)
    count = scores.shape[-1]
    return bool(last and argument(node, "largest") and isinstance(k, int) and isinstance(count, int) and k <= count)


def _looked_up(node: Node) -> bool:
    """A gather from scores at ids that come out of a table."""
    scores, ids = node.args[0], node.args[2]
    while is_op(ids, *CASTS, *RESHAPES):
        ids = ids.args[0]  # type: ignore[union-attr]
    table = is_op(ids, A.index.Tensor, A.embedding.default) and tensor(ids).dtype == torch.int64  # type: ignore[arg-type]
    return bool(table and is_op(scores, A.sqrt.default, A.sigmoid.default, A.softmax.int))


def _match(topk: Node) -> _Router:
    router = _choice(operand(topk))
    if tensor(router.logits).dtype == torch.float64:
        raise NearMiss("the logits are f64 and the router op works in f32")
    return _weights(topk, router)


def _choice(ranked: Node) -> _Router:
    """What is ranked: scores [+ bias] [with groups excluded]."""
    groups = _Router(ranked, ranked, ranked)
    excluded = _exclusion(ranked)
    if excluded is not None:
        ranked, mask, fill = excluded
        groups = _groups(ranked, mask)
    ranked, bias = _split_bias(ranked)
    kind, logits = _kind(ranked)
    if excluded is not None and fill > NEVER_CHOSEN and (bias is not None or fill > 0 or kind == "softmax_topk"):
        raise NearMiss(f"experts of excluded groups are filled with {fill}, which can beat a real score")
    return replace(groups, logits=logits, scores=ranked, kind=kind, bias=bias)


def _exclusion(node: Node) -> tuple[Node, Node, float] | None:
    """(choice, mask, fill) of a masking; the mask may mean kept or excluded."""
    if is_op(node, A.masked_fill.Scalar):
        return operand(node), operand(node, 1), float(argument(node, "value"))
    if is_op(node, A.where.ScalarOther):
        return operand(node, 1), operand(node), float(argument(node, "other"))
    if is_op(node, A.mul.Tensor) and all(isinstance(a, Node) for a in node.args):
        for choice, mask in ((operand(node), operand(node, 1)), (operand(node, 1), operand(node))):
            if any(is_op(n, A.scatter.value) for n in ancestors(mask)):
                return choice, mask, 0.0
    return None


def _groups(choice: Node, mask: Node) -> _Router:
    """The group limit behind a mask, proven by evaluating the mask for random kept groups."""
    inner = next((n for n in ancestors(mask) if is_op(n, A.topk.default)), None)
    if inner is None:
        raise NearMiss("what masks the scores is not a choice of groups")
    kept, ranked = int(argument(inner, "k")), operand(inner)
    rank, source = _group_rank(ranked)
    if source is not choice:
        raise NearMiss("groups are ranked by other scores than their experts")
    groups = int(tensor(ranked).shape[-1])
    index = next((u for u in inner.users if item_of(u, 1) is inner), None)
    if index is None or tensor(choice).shape[-1] % groups:
        raise NearMiss("what masks the scores is not a choice of groups")
    shown = [_shown(choice, mask, index, ranked, kept, seed) for seed in range(8)]  # a graph may have one token only
    if not any(all(torch.equal(got, alive ^ excluded) for got, alive in shown) for excluded in (False, True)):
        raise NearMiss("the mask over experts is not that of the kept groups")
    return _Router(choice, choice, choice, groups=groups, kept=kept, rank=rank if groups > 1 else "none")


def _shown(choice: Node, mask: Node, index: Node, ranked: Node, kept: int, seed: int) -> tuple[Tensor, Tensor]:
    """(the mask over experts, which experts are in kept groups) for random kept groups."""
    probe, gen = Concrete(5), torch.Generator().manual_seed(seed)
    drawn = torch.rand(probe.shape(ranked), generator=gen).argsort(-1)[..., :kept]
    probe.given.update({index: drawn, **{n: torch.zeros(probe.shape(n)) for n in (ranked, choice)}})
    alive = torch.zeros(probe.shape(ranked), dtype=torch.bool).scatter(-1, drawn, True)
    return probe.value(mask).bool(), alive.repeat_interleave(probe.shape(choice)[-1] // alive.shape[-1], -1)


def _group_rank(ranked: Node) -> tuple[str, Node]:
    """How groups are ranked, and the scores that they are ranked by."""
    best = item_of(ranked.args[0], 0) if is_op(ranked, A.sum.dim_IntList) else None
    if best is not None and is_op(best, A.topk.default) and argument(best, "k") == 2:
        return "top2", _ungrouped(operand(best))
    best = item_of(ranked, 0)
    if best is not None and is_op(best, A.max.dim):
        return "max", _ungrouped(operand(best))
    if is_op(ranked, A.amax.default):
        return "max", _ungrouped(operand(ranked))
    raise NearMiss("groups are ranked neither by their best expert nor by the sum of their best two")


def _ungrouped(node: Node) -> Node:
    while is_op(node, *RESHAPES):
        node = operand(node)
    return node


def _split_bias(ranked: Node) -> tuple[Node, Node | None]:
    """scores + bias, in either order, the bias a vector over experts."""
    if not is_op(ranked, A.add.Tensor) or not all(isinstance(a, Node) for a in ranked.args[:2]):
        return ranked, None
    if argument(ranked, "alpha") != 1:
        raise NearMiss("the bias is added with a factor")
    a, b = operand(ranked), operand(ranked, 1)
    for scores, bias in ((a, b), (b, a)):
        if tensor(bias).shape == tensor(ranked).shape[-1:] and tensor(scores).dim() == tensor(ranked).dim():
            return scores, bias
    raise NearMiss("what is added to the scores is not one bias per expert")


def _kind(scores: Node) -> tuple[str, Node]:
    """The scoring function and its logits."""
    plain = before_f32(scores)
    if is_op(plain, A.softmax.int, A._softmax.default):
        if plain.args[1] not in (-1, tensor(plain).dim() - 1):
            raise NearMiss("the softmax does not run over the experts")
        return "softmax", before_f32(operand(plain))
    if is_op(plain, A.sigmoid.default):
        return "sigmoid", before_f32(operand(plain))
    root = is_op(plain, A.sqrt.default) or (is_op(plain, A.pow.Tensor_Scalar) and plain.args[1] == 0.5)
    if root and is_op(plain.args[0], A.softplus.default):
        softplus = operand(plain)
        if (argument(softplus, "beta"), argument(softplus, "threshold")) != (1, 20):
            raise NearMiss("the softplus has another slope or threshold")
        return "sqrt_softplus", before_f32(operand(softplus))
    return "softmax_topk", plain


def _weights(topk: Node, router: _Router) -> _Router:
    """What happens to the chosen scores, from the top-k outwards."""
    values = next((u for u in topk.users if item_of(u, 0) is topk and u.users), None)
    index = next((u for u in topk.users if item_of(u, 1) is topk and u.users), None)
    if index is None:
        raise NearMiss("nobody reads which experts were chosen")
    gathers = [u for u in index.users if is_op(u, A.gather.default) and u.args[2] is index and _rank_of(u, topk)]
    if (gathers and values is not None) or len(gathers) > 1:
        raise NearMiss("the chosen scores are read in two ways")
    if gathers:
        if before_f32(operand(gathers[0])) is not before_f32(router.scores):
            raise NearMiss("the weights are taken from other scores than the unbiased ones")
        start = gathers[0]
    elif values is None:
        raise NearMiss("nobody reads the weights of the chosen experts")
    elif router.bias is not None:
        raise NearMiss("the biased scores serve as weights")
    else:
        start = values
    if router.kind == "softmax_topk":
        router, start = _after_choice(start, router)
    router, start = _normalised(start, router)
    return _scaled(start, router)


def _rank_of(gather: Node, topk: Node) -> bool:
    """Whether a gather runs over the experts."""
    return gather.args[1] in (-1, tensor(operand(topk)).dim() - 1)


def _after_choice(start: Node, router: _Router) -> tuple[_Router, Node]:
    """Logits were ranked: the softmax over the chosen, or a sigmoid of them, makes the weights."""
    user = _sole(start)
    while user is not None and is_op(user, *CASTS):
        user = _sole(user)
    softmax = user is not None and is_op(user, A.softmax.int, A._softmax.default)
    if user is not None and softmax and user.args[1] in (-1, tensor(user).dim() - 1):
        return router, user
    if user is not None and is_op(user, A.sigmoid.default):
        return replace(router, kind="sigmoid"), user
    raise NearMiss(f"the scores are {target_name(router.scores)} and their chosen values meet no softmax")


def _sole(node: Node, also: Sequence[Node] = ()) -> Node | None:
    """The only reader of a node apart from those in `also`."""
    users = [u for u in node.users if u not in also]
    return users[0] if len(users) == 1 else None


def _normalised(start: Node, router: _Router) -> tuple[_Router, Node]:
    """w / (sum(w) + eps), folded if nobody else reads w or the sum."""
    total = next((u for u in start.users if is_op(u, A.sum.dim_IntList) and u.args[0] is start), None)
    if total is None or argument(total, "keepdim") is not True or argument(total, "dtype") is not None:
        return router, start
    if argument(total, "dim") not in ([-1], [tensor(start).dim() - 1]):
        return router, start
    eps, below = 0.0, _sole(total)
    if below is not None and is_op(below, A.add.Tensor) and isinstance(below.args[1], (int, float)):
        eps, total, below = float(below.args[1]), below, _sole(below)
    if below is None or not is_op(below, A.div.Tensor) or below.args != (start, total) or len(start.users) != 2:
        return router, start
    return replace(router, normalize=True, eps=eps), below


def _scaled(start: Node, router: _Router) -> _Router:
    """A constant factor, folded only where it directly follows."""
    user = _sole(start)
    if user is not None and is_op(user, A.mul.Tensor) and isinstance(user.args[1], (int, float)):
        return replace(router, scale=float(user.args[1]), ends=user)
    return replace(router, ends=start)


def _rewrite(topk: Node, r: _Router) -> None:
    edit = Editor(topk.graph, topk)
    args = (r.logits, r.bias, r.kind, topk.args[1], r.groups, r.kept, r.rank, r.normalize, r.eps, r.scale)
    made = edit.call(ROUTE.overload, *args)
    ids, weights = edit.item(made, 0), edit.item(made, 1)
    for old in [u for u in topk.users if item_of(u, 1) is topk]:
        others = [u for u in old.users if not is_op(u, EXPERTS.overload)]
        wide = edit.call(A._to_copy.default, ids, dtype=tensor(old).dtype) if others else ids
        old.replace_all_uses_with(wide)
        for user in [u for u in wide.users if is_op(u, EXPERTS.overload)]:
            user.replace_input_with(wide, ids)
    dtype = tensor(r.ends).dtype
    edit.replace(r.ends, weights if dtype == torch.float32 else edit.call(A._to_copy.default, weights, dtype=dtype))
