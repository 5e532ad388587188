"""Multiply-adds of a prompt's prefill, whole and split at a boundary, counted from the flat graph.

Counted are products (linear layers, matrix products, attention, experts); a multiply-add is two operations. A product
is counted for what of it is needed: scores where the mask that is laid over them shows any, experts where a token has
a weight, so that a model written with dense masks costs what its meaning costs. What stands behind the layers (the
output projection) is counted for one row, since a prompt gives one next token. Lengths are numbers, never example
sizes, so that a million tokens cost no more to count than a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.boundary import Boundary, find_boundary
from deepinfer_compile.graph import argument, is_op, tensor, value
from deepinfer_compile.match import expr
from deepinfer_compile.mixing import classify
from deepinfer_compile.ops import ATTENTION, EXPERTS, LATENT_ATTENTION
from deepinfer_compile.pairs import Pair, Part
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import Rows
from deepinfer_compile.skeleton import tokens_of

A = torch.ops.aten
PRODUCTS = (A.linear.default, A.matmul.default, A.mm.default, A.bmm.default, A.addmm.default)
MASKS: dict[object, int] = {A.masked_fill.Scalar: 1, A.where.ScalarOther: 0}
"""Calls that hide scores, with the position of the mask among their operands."""
KEEPS_COLUMNS = (A.sum.dim_IntList, A.mean.dim, A.unsqueeze.default)
"""Calls beside the elementwise ones of which a column depends on that column of their first operand."""
SPLITS = (A.split.Tensor, A.split_with_sizes.default, A.chunk.default)
FILLS = (A.zeros.default, A.zeros_like.default, A.new_zeros.default)


@dataclass(frozen=True)
class Extent:
    """How many tokens a part's rows are: the last `rows` of a prompt of `tokens`. Windows of the part hold its rows."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class Saving:
    """Operations of one prompt's prefill: all layers on all tokens, cut inside the boundary layer, cut behind it."""

    tokens: int
    whole: int
    inside: int
    after: int

    def saved(self, cut: int) -> float:
        """The part of the whole that a cut saves."""
        return 1 - cut / self.whole


@dataclass
class PrefillWork:
    """Counts the work of a program whose attention is raised or not and reads no caches.

    found: its boundary. Raises NoBoundary where there is none.
    """

    program: Program

    @cached_property
    def found(self) -> Boundary:
        """Where it is cut."""
        return find_boundary(self.program)

    @cached_property
    def _values(self) -> dict[Node, Any]:
        held: dict[Node, Any] = {}
        classify(self.found.sides.flat, self.program, held)
        return held

    @cached_property
    def _needs(self) -> dict[Node, tuple[Part, ...]]:
        return _needs(list(self.found.sides.flat.graph.nodes), self._values)

    @cached_property
    def _few(self) -> dict[Node, dict[int, int]]:
        return _few(list(self.found.sides.flat.graph.nodes))

    def saving(self, tokens: int, keep: int) -> Saving:
        """Of a prompt of `tokens` tokens whose last `keep` go through the decoder."""
        sides, rows = self.found.sides, min(keep, tokens)
        full, last = Extent(tokens, tokens), Extent(tokens, rows)
        below, above = sides.encoder | sides.boundary, sides.decoder
        edge = {n for n in above if sides.origins[n][0].meta.get("layer") == self.found.layer}
        return Saving(
            tokens,
            whole=self.count(below | above, full),
            inside=self.count(below, full) + self.count(above - below, last),
            after=self.count(below | edge, full) + self.count(above - below - edge, last),
        )

    def count(self, nodes: Iterable[Node], extent: Extent) -> int:
        """Operations of some calls of the flat graph."""
        wanted = nodes if isinstance(nodes, (set, frozenset)) else set(nodes)
        return sum(self._cost(n, extent) for n in self._products if n in wanted)

    @cached_property
    def _products(self) -> list[Node]:
        kinds = (*PRODUCTS, A.einsum.default, ATTENTION.overload, LATENT_ATTENTION.overload, EXPERTS.overload)
        return [n for n in self.found.sides.flat.graph.nodes if is_op(n, *kinds)]

    @cached_property
    def _behind(self) -> set[Node]:
        """Calls of no layer that are made of layers' results."""
        origins, found = self.found.sides.origins, set[Node]()
        layered: set[Node] = set()
        for node in self.found.sides.flat.graph.nodes:
            inside = node in origins and origins[node][0].meta.get("layer") is not None
            if inside or any(i in layered for i in node.all_input_nodes):
                layered.add(node)
                if not inside:
                    found.add(node)
        return found

    def _cost(self, node: Node, extent: Extent) -> int:
        if node in self._behind:
            extent = replace(extent, rows=1)
        if is_op(node, A.einsum.default):
            return self._einsum(node, extent)
        if is_op(node, ATTENTION.overload, LATENT_ATTENTION.overload):
            return self._attention(node, extent)
        if is_op(node, EXPERTS.overload):
            ids, w13, w2 = (tensor(argument(node, n)) for n in ("ids", "w13", "w2"))
            return 2 * self._size(ids.shape, extent.rows) * (w13[0].numel() + w2[0].numel())
        left = 1 if is_op(node, A.addmm.default) else 0
        inner = int(tensor(node.args[left]).shape[-1])  # type: ignore[arg-type]
        return 2 * self._size(tensor(node).shape, extent.rows) * inner

    def _size(self, shape: Iterable[Any], rows: int) -> int:
        """Elements of a shape in which the number of tokens, or a multiple of it, is one of rows."""
        total = 1
        for size in shape:
            if isinstance(size, int):
                total *= size
                continue
            times = expr(size) / self._tokens
            total *= rows * (int(times) if times.is_Integer else 1)
        return total

    @cached_property
    def _tokens(self) -> Any:
        return expr(tokens_of(self.program))

    def _attention(self, node: Node, extent: Extent) -> int:
        """Scores and sums of an attention that is one operation."""
        mix = self.found.sides.mixing[node]
        seen = _columns((Part(causal=mix.kind != "not causal", window=mix.window),), extent)
        if is_op(node, ATTENTION.overload):
            q, v = tensor(argument(node, "q")), tensor(argument(node, "v"))
            return 2 * int(q.shape[1]) * int(q.shape[-1] + v.shape[-1]) * seen
        q = tensor(argument(node, "q_nope"))
        width = int(q.shape[-1] + tensor(argument(node, "q_rope")).shape[-1])
        up, down = tensor(argument(node, "w_uk")), tensor(argument(node, "w_uv"))
        made = 2 * (up.numel() + down.numel()) * extent.tokens
        return 2 * int(up.shape[0]) * (width + int(down.shape[-1])) * seen + made

    def _einsum(self, node: Node, extent: Extent) -> int:
        """The product of all label's sizes: rows for tokens, what is needed for columns and experts."""
        left, _, out = str(node.args[0]).replace(" ", "").partition("->")
        labels, operands = left.split(","), list(node.args[1])  # type: ignore[arg-type]
        sizes: dict[str, int] = {}
        rows: set[str] = set()
        fewer: dict[str, int] = {}
        for names, operand in zip((*labels, out), (*operands, node)):
            held = self._values.get(operand)
            for dim, (name, size) in enumerate(zip(names, tensor(operand).shape)):
                sizes[name] = size if isinstance(size, int) else 0
                axis = held.rows if isinstance(held, Pair) else held.dim if isinstance(held, Rows) else None
                if dim == axis and (isinstance(held, Pair) or operand is not operands[-1]):
                    rows.add(name)
                limit = self._few.get(operand, {}).get(dim)
                if limit is not None:
                    fewer[name] = min(limit, fewer.get(name, limit))
        columns = [n for n, size in sizes.items() if size == 0 and n not in rows]
        known = math.prod(min(size, fewer.get(n, size)) for n, size in sizes.items() if size)
        if columns:
            return 2 * known * _columns(self._seen(node, operands), extent)
        return 2 * known * (extent.rows if any(sizes[n] == 0 for n in rows) else 1)

    def _seen(self, node: Node, operands: list[Any]) -> tuple[Part, ...]:
        """The columns of a product over pairs that matter."""
        first = self._values.get(operands[0])
        if isinstance(first, Pair) and first.form == "zero":
            return first.parts
        pair = next(h for h in (self._values.get(node), first) if isinstance(h, Pair))
        return self._needs.get(node, pair.plain().parts)


def _columns(parts: tuple[Part, ...], extent: Extent) -> int:
    """How many columns all rows of a part see together."""
    return sum(_seen(replace(p, edges=frozenset()), extent) for p in parts)


@lru_cache(maxsize=1024)
def _seen(part: Part, extent: Extent) -> int:
    first = extent.tokens - extent.rows
    up_to = np.arange(first + 1, extent.tokens + 1, dtype=np.int64)
    seen = up_to // part.every if part.causal else np.full_like(up_to, extent.tokens)
    if part.window:
        seen = np.minimum(np.minimum(seen, up_to - first), part.window)
    return int((np.minimum(seen, part.most) if part.most else seen).sum())


# -- what of a value is needed ----------------------------------------------------------------------------------------


def _needs(order: list[Node], values: dict[Node, Any]) -> dict[Node, tuple[Part, ...]]:
    """Of each value over pairs, the columns that what is made of it depends on, where they are fewer than all."""
    found: dict[Node, tuple[Part, ...]] = {}
    for node in reversed(order):
        held = values.get(node)
        if not isinstance(held, Pair) or held.rows is None or not node.users:
            continue
        wanted = [_wanted(user, node, values, found) for user in node.users]
        parts = wanted[0]
        for other in wanted[1:]:
            parts = parts if parts is None or other is None else tuple(map(_either, parts, other))
        if parts is not None and len(parts) == len(held.parts):
            found[node] = parts
    return found


def _wanted(
    user: Node, node: Node, values: dict[Node, Any], found: dict[Node, tuple[Part, ...]]
) -> tuple[Part, ...] | None:
    """The columns of `node` that one of its users needs, None for all."""
    made = values.get(user)
    mask = MASKS.get(user.target)
    if mask is not None and user.args[mask] is not node:
        return made.parts if isinstance(made, Pair) and made.form == "dead" else found.get(user)
    if is_op(user, A.cat.default) and isinstance(made, Pair) and user in found:
        joined: Any = user.args[0]
        before = sum(len(values[p].parts) for p in joined[: joined.index(node)])
        return found[user][before : before + len(values[node].parts)]
    same = torch.Tag.pointwise in getattr(user.target, "tags", ()) or is_op(user, *KEEPS_COLUMNS)
    return found.get(user) if same and isinstance(made, Pair) else None


def _either(a: Part, b: Part) -> Part:
    """Bounds that hold for what one or the other needs."""
    window, most = (0 if 0 in pair else max(pair) for pair in zip(a.limits, b.limits))
    return Part(a.causal and b.causal, window, frozenset(), min(a.every, b.every), most)


def _few(order: list[Node]) -> dict[Node, dict[int, int]]:
    """Dimensions of which only so many elements matter for each row: others are 0, or are multiplied by 0."""
    zero: dict[Node, dict[int, int]] = {}
    for node in order:
        made = _zeros(node, zero)
        if made:
            zero[node] = made
    needed: dict[Node, dict[int, int]] = dict(zero)
    for node in reversed(order):
        if node in zero or not node.users or not isinstance(value(node), (Tensor, tuple, list)):
            continue
        wanted = [_multiplied(user, node, zero, needed) for user in node.users]
        common = set.intersection(*(set(w) for w in wanted))
        if common:
            needed[node] = {dim: max(w[dim] for w in wanted) for dim in common}
    return needed


def _zeros(node: Node, zero: dict[Node, dict[int, int]]) -> dict[int, int]:
    """Of which dimensions of a call's result all but so many elements are 0."""
    if is_op(node, A.scatter.src, A.scatter.value) and is_op(node.args[0], *FILLS):
        dim, index = int(argument(node, "dim")) % tensor(node).dim(), tensor(argument(node, "index"))
        size = index.shape[dim]
        return {dim: size} if isinstance(size, int) else {}
    known = {n: zero[n] for n in node.all_input_nodes if n in zero}
    if not known:
        return {}
    if is_op(node, A.unsqueeze.default):
        ((source, held),) = known.items()
        at = int(argument(node, "dim")) % (tensor(source).dim() + 1)
        return {dim + (at <= dim): n for dim, n in held.items()}
    if is_op(node, A.mul.Tensor, A._to_copy.default, A.to.dtype):
        rank = tensor(node).dim()
        found: dict[int, int] = {}
        for source, held in known.items():
            found |= {dim + rank - tensor(source).dim(): n for dim, n in held.items()}
        return found
    return {}


def _multiplied(
    user: Node, node: Node, zero: dict[Node, dict[int, int]], needed: dict[Node, dict[int, int]]
) -> dict[int, int]:
    """The dimensions of a value of which a user needs a few elements only."""
    limits = needed.get(user, {})
    if is_op(user, *SPLITS):
        dim = int(argument(user, "dim")) % tensor(node).dim()
        return {d: n for d, n in limits.items() if d != dim}
    made = value(user)
    whole = isinstance(made, Tensor) and isinstance(value(node), Tensor) and made.dim() == tensor(node).dim()
    if whole and torch.Tag.pointwise in getattr(user.target, "tags", ()):
        return limits
    if whole and is_op(user, A._to_copy.default, A.to.dtype):
        return limits
    if getattr(user.target, "__name__", "") == "getitem" or is_op(user, A.slice.Tensor):
        cut = int(argument(user, "dim")) % tensor(node).dim() if is_op(user, A.slice.Tensor) else None
        return {d: n for d, n in limits.items() if d != cut}
    return {}


__all__ = ["Extent", "PrefillWork", "Saving"]
