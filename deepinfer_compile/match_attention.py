"""Find attention as models spell it out: SDPA, and softmax between two products.

The eager form is read from its softmax, backwards through masks, softcap and scale to the product of queries and keys,
and forwards to the product with the values. Whatever stands between that is not one of these makes it a near miss.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, only_user, target_name, tensor
from deepinfer_compile.match import CASTS, RESHAPES
from deepinfer_compile.match_mask import HIDDEN, Term
from deepinfer_compile.match_moe import A, NearMiss, ancestors, before_f32, item_of, operand, operands

SOFTMAX = (A.softmax.int, A._softmax.default)
PRODUCTS = (A.matmul.default, A.bmm.default, A.einsum.default)
ELEMENTWISE = (
    *(A.add.Tensor, A.sub.Tensor, A.mul.Tensor, A.div.Tensor, A.tanh.default),
    *(A.masked_fill.Scalar, A.where.ScalarOther, A.where.self, *CASTS),
)


@dataclass(frozen=True)
class Heads:
    """A tensor [B, H, T, D], or one of lower rank that is it without B and H. turned: it is stored [B, T, H, D]."""

    node: Node
    turned: bool = False


@dataclass(frozen=True)
class Found:
    """Attention in the graph. ends: the node with the result, stored [B, H, T, D] or, `out_turned`, [B, T, H, D]."""

    ends: Node
    q: Heads
    k: Heads
    v: Heads
    scale: float
    out_turned: bool = False
    softcap: float = 0.0
    sinks: Node | None = None
    terms: tuple[Term, ...] = field(default=())
    causal: bool = False


def is_candidate(node: Node, packed: bool = True) -> bool:
    """Whether a node is SDPA, or a softmax over keys: its last axis has no static size, or (not packed: keys may be
    those of a cache of fixed length) it has four axes."""
    if is_op(node, A.scaled_dot_product_attention.default):
        return True
    if not is_op(node, *SOFTMAX):
        return False
    shape = tensor(node).shape
    return len(shape) == 4 if not packed else len(shape) >= 2 and not isinstance(shape[-1], int)


def match(node: Node, packed: bool = True) -> Found:
    """The attention that a candidate belongs to; packed: queries and keys are the same tokens. Raises NearMiss."""
    found = _sdpa(node) if is_op(node, A.scaled_dot_product_attention.default) else _eager(node)
    queries, keys = _tokens(found.q), _tokens(found.k)
    if (packed or found.causal) and str(queries) != str(keys):
        raise NearMiss(f"{queries} queries meet {keys} keys: whose corner the mask has is not known")
    k, v = ungrouped(found.k), ungrouped(found.v)
    if _heads(k) == _heads(v):
        found = replace(found, k=k, v=v)
    return found


def _tokens(h: Heads) -> object:
    return tensor(h.node).shape[-3 if h.turned else -2]


def _heads(h: Heads) -> object:
    shape = tensor(h.node).shape
    return shape[-2 if h.turned else -3] if len(shape) > 2 else 1


def _sdpa(node: Node) -> Found:
    q, k, v = operand(node), operand(node, 1), operand(node, 2)
    if argument(node, "dropout_p") != 0.0:
        raise NearMiss("the attention drops weights at random")
    if tensor(q).dim() > 4:
        raise NearMiss(f"the queries have {tensor(q).dim()} dimensions")
    scale = argument(node, "scale")
    mask = argument(node, "attn_mask")
    terms = () if mask is None else (Term("visible" if tensor(mask).dtype == torch.bool else "added", mask),)
    return Found(
        node,
        *(Heads(q), Heads(k), Heads(v)),
        scale=float(scale) if scale is not None else float(tensor(q).shape[-1]) ** -0.5,
        terms=terms,
        causal=bool(argument(node, "is_causal")),
    )


def _eager(softmax: Node) -> Found:
    if softmax.args[1] not in (-1, tensor(softmax).dim() - 1):
        raise NearMiss("the softmax does not run over the keys")
    if tensor(softmax).dim() > 4:
        raise NearMiss(f"the scores have {tensor(softmax).dim()} dimensions")
    scores = _Scores(operand(softmax))
    ends, v, turned = _with_values(softmax, scores.sinks is not None)
    return Found(
        ends,
        *(scores.q, scores.k, v),
        scale=scores.scale,
        out_turned=turned,
        softcap=scores.softcap,
        sinks=scores.sinks,
        terms=tuple(scores.terms),
    )


class _Scores:
    """Reads scores backwards from the softmax to the product of queries and keys."""

    def __init__(self, node: Node) -> None:
        self.scale, self.softcap = 1.0, 0.0
        self.sinks: Node | None = None
        self.terms: list[Term] = []
        while not is_op(node, *PRODUCTS):
            node = self._step(node)
        self.q, self.k = _queries_keys(node)

    def _step(self, node: Node) -> Node:
        if is_op(node, *CASTS):
            return operand(node)
        if is_op(node, A.sub.Tensor) and _is_maximum(node.args[1], operand(node)):
            return operand(node)
        if is_op(node, A.cat.default):
            return self._with_sinks(node)
        if is_op(node, A.add.Tensor, A.masked_fill.Scalar, A.where.ScalarOther, A.where.self):
            return self._masked(node)
        return self._scaled(node)

    def _with_sinks(self, node: Node) -> Node:
        blocks = operands(node)
        sinks = blocks[-1]
        while is_op(sinks, *CASTS, *RESHAPES, A.expand.default, A.unsqueeze.default):
            sinks = operand(sinks)
        heads = tensor(node).shape[-3] if tensor(node).dim() > 2 else 1
        per_head = tuple(tensor(blocks[-1]).shape[-3:]) if len(blocks) == 2 else ()
        if len(per_head) != 3 or per_head[0] != heads or per_head[2] != 1 or tuple(tensor(sinks).shape) != (heads,):
            raise NearMiss("what is set beside the scores is not one sink per head")
        self.sinks = sinks
        return blocks[0]

    def _masked(self, node: Node) -> Node:
        if is_op(node, A.add.Tensor):
            sides = (operand(node), operand(node, 1))
            scores = next((n for n in sides if _leads_to_product(n)), sides[0])
            self._add(Term("added", sides[1] if scores is sides[0] else sides[0]), float("-inf"))
            return scores
        if is_op(node, A.masked_fill.Scalar):
            self._add(Term("hidden", operand(node, 1)), float(argument(node, "value")))
            return operand(node)
        fill = node.args[2]
        if isinstance(fill, Node):
            self._add(Term("visible", operand(node), fill), HIDDEN)
        else:
            self._add(Term("visible", operand(node)), float(fill))  # type: ignore[arg-type]
        return operand(node, 1)

    def _add(self, term: Term, fill: float) -> None:
        later = self.scale != 1.0 or self.softcap > 0
        if later and (self.softcap > 0 or term.kind == "added" or fill != float("-inf")):
            raise NearMiss("the mask is applied before the scale or the softcap")
        if fill > HIDDEN:
            raise NearMiss(f"hidden scores are filled with {fill}")
        self.terms.append(term)

    def _scaled(self, node: Node) -> Node:
        factor = _factor(node)
        if factor is None:
            raise NearMiss(f"{target_name(node)} stands between the scores and their softmax")
        inner = operand(node)
        if not is_op(inner, A.tanh.default):
            self.scale *= factor
            return inner
        below = _factor(operand(inner))
        if below is None or abs(below * factor - 1) > 1e-6 or self.scale != 1.0 or self.softcap > 0:
            raise NearMiss("the softcap divides and multiplies by different numbers")
        self.softcap = factor
        return operand(operand(inner))


def _factor(node: Node) -> float | None:
    """c of x * c or x / (1 / c)."""
    if is_op(node, A.mul.Tensor, A.div.Tensor) and isinstance(node.args[1], (int, float)):
        return float(node.args[1]) if is_op(node, A.mul.Tensor) else 1.0 / float(node.args[1])
    return None


def _is_maximum(node: object, of: Node) -> bool:
    """Whether a node is the row maximum of scores, which a softmax does not notice."""
    made = item_of(node, 0) or node
    return isinstance(made, Node) and is_op(made, A.max.dim, A.amax.default) and made.args[0] is of


def _leads_to_product(node: Node) -> bool:
    """Whether a tensor is made of a product by elementwise steps."""
    stops = [n for n in ancestors(node) if n.op != "call_function" or not is_op(n, *ELEMENTWISE)]
    return any(is_op(n, *PRODUCTS) for n in ancestors(node, stops))


def _queries_keys(node: Node) -> tuple[Heads, Heads]:
    if is_op(node, A.einsum.default):
        return _einsum_scores(node)
    q, turned_k = operand(node), operand(node, 1)
    dims = tensor(turned_k).dim()
    if not is_op(turned_k, A.transpose.int) or {int(d) % dims for d in turned_k.args[1:]} != {dims - 2, dims - 1}:  # type: ignore
        raise NearMiss(f"the keys are {target_name(turned_k)}, not the transpose of a tensor")
    return Heads(before_f32(q)), Heads(before_f32(operand(turned_k)))


def _labels(node: Node) -> tuple[list[str], str]:
    inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
    return inputs.split(","), out


def _einsum_scores(node: Node) -> tuple[Heads, Heads]:
    labels, out = _labels(node)
    if len(out) != 4 or len(labels) != 2:
        raise NearMiss(f"the scores are einsum {node.args[0]}")
    sides = dict(zip(labels, operands(node, 1)))
    found = []
    for token in out[2:]:
        of = next((x for x in labels if token in x), "")
        inner = [c for c in of if c not in out]
        if len(inner) != 1 or of not in (f"{out[:2]}{token}{inner[0]}", f"{out[0]}{token}{out[1]}{inner[0]}"):
            raise NearMiss(f"the scores are einsum {node.args[0]}")
        found.append(Heads(before_f32(sides[of]), of[1] == token))
    return found[0], found[1]


def _with_values(softmax: Node, has_sinks: bool) -> tuple[Node, Heads, bool]:
    """(product with the values, the values, whether the product is stored [B, T, H, D])."""
    weights, user = softmax, only_user(softmax)
    while user is not None and (is_op(user, *CASTS) or (has_sinks and _drops_sink(user))):
        has_sinks = has_sinks and not _drops_sink(user)
        weights, user = user, only_user(user)
    if user is None or has_sinks or not is_op(user, *PRODUCTS):
        raise NearMiss("the attention weights are read by something other than the product with the values")
    if not is_op(user, A.einsum.default):
        if operand(user) is not weights:
            raise NearMiss("the attention weights are not the left side of the product with the values")
        return user, Heads(operand(user, 1)), False
    labels, out = _labels(user)
    sides = operands(user, 1)
    place = next((i for i, n in enumerate(sides) if n is weights), 0)
    w, v = labels[place], labels[1 - place]
    if len(labels) == 2 and len(w) == 4 and v[-1:] == out[-1:]:
        b, h, t, s = tuple(w)
        if v[:-1] in (b + h + s, b + s + h) and out[:-1] in (b + h + t, b + t + h):
            return user, Heads(sides[1 - place], v[1] == s), out[1] == t
    raise NearMiss(f"the values are combined by einsum {user.args[0]}")


def _drops_sink(node: Node) -> bool:
    """Whether a slice drops the last column."""
    last = is_op(node, A.slice.Tensor) and argument(node, "dim") in (-1, tensor(node).dim() - 1)
    return last and not argument(node, "start") and argument(node, "end") == -1


def ungrouped(heads: Heads) -> Heads:
    """Keys or values before their heads were repeated for the groups of query heads; the same if they were not."""
    node, turned = heads.node, heads.turned
    if not turned and is_op(node, A.transpose.int) and {int(d) % 4 for d in node.args[1:]} == {1, 2}:  # type: ignore
        node, turned = operand(node), True
    if tensor(heads.node).dim() != 4:
        return heads
    axis = 2 if turned else 1
    if is_op(node, A.repeat_interleave.self_int) and argument(node, "dim") in (axis, axis - 4):
        return Heads(operand(node), turned)
    expand = operand(node) if is_op(node, *RESHAPES) else node
    if not is_op(expand, A.expand.default) or not is_op(expand.args[0], A.unsqueeze.default):
        return heads
    lifted = operand(expand)
    source, wide = tensor(operand(lifted)).shape, tensor(expand).shape
    grouped = len(source) == 4 and lifted.args[1] in (axis + 1, axis + 1 - 5) and wide[axis] == source[axis]
    if grouped and tensor(node).shape[axis] == wide[axis] * wide[axis + 1]:
        return Heads(operand(lifted), turned)
    return heads
