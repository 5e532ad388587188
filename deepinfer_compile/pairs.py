"""Values that run over pairs of tokens, a row for the token that reads and a column for the one that is read.

Attention that no pass has raised is a region of such values: scores and masks are made of rows and columns, masked,
ordered, chosen, joined with those of other keys, and end in a product over the columns. What a row may see is an upper
bound: a mask made of positions is run, a mask that others are and-ed with can only hide more. So a choice among keys
that depends on data is known to see no more than what it chooses from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, tensor, value
from deepinfer_compile.lags import every, lags, table
from deepinfer_compile.match import CASTS
from deepinfer_compile.match_mask import HIDDEN, lengths_for
from deepinfer_compile.match_moe import Concrete, NearMiss, numbers
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import Kind, Rows

A = torch.ops.aten
Edge = tuple[Node, Node]
"""An operand and the call that reads it as columns."""
AND = (A.__and__.Tensor, A.bitwise_and.Tensor, A.logical_and.default)
NOT = (A.bitwise_not.default, A.logical_not.default)
OTHERS = (A.__or__.Tensor, A.bitwise_or.Tensor, A.logical_or.default, A.__xor__.Tensor, A.bitwise_xor.Tensor)
POINTWISE = (*CASTS, *AND, *OTHERS, A.where.self, A.where.ScalarOther, A.masked_fill.Scalar, A.floor_divide.default)
ORDERS = (A.argsort.default, A.argsort.stable, A.cumsum.default, A.flip.default)
PICKS = (A.gather.default, A.scatter.src, A.scatter.value, A.scatter_reduce.two, A.scatter_add.default)
MORE = 7
"""Tokens by which the longest trial of a mask exceeds the one before."""


@dataclass(frozen=True)
class Part:
    """Columns of one set of keys. causal: a row sees none behind itself. window: how many tokens back it sees at most,
    itself included, 0 for all. edges: where these columns were read. Of how many there are, for counting work: a row
    with n tokens up to it sees at most n // every, and at most `most`, 0 for any number."""

    causal: bool = False
    window: int = 0
    edges: frozenset[Edge] = frozenset()
    every: int = 1
    most: int = 0

    def within(self, other: Part) -> Part:
        """The same, seen where the other is, too."""
        window, most = (min((n for n in ns if n), default=0) for ns in zip(self.limits, other.limits))
        every = max(self.every, other.every)
        return replace(self, causal=self.causal or other.causal, window=window, every=every, most=most)

    @property
    def limits(self) -> tuple[int, int]:
        """How many columns a row sees at most, by its window and in number; 0 for any number."""
        return self.window, self.most


@dataclass(frozen=True)
class Pair:
    """A tensor whose dimension `rows` runs over tokens and whose dimension `cols` over the columns of `parts`, one
    element a token each, and `tail` more that belong to no token. rows None: only columns, keys set side by side.

    form says what a part's bounds are of: where a mask is true ("seen"), where it is false ("hidden"), where numbers
    are not minus infinity ("dead" elsewhere), where they are not 0 ("zero" elsewhere), or nothing ("plain").
    """

    rows: int | None
    cols: int
    parts: tuple[Part, ...]
    tail: int = 0
    form: str = "plain"

    def plain(self) -> Pair:
        """The same without bounds."""
        return replace(self, form="plain", parts=tuple(Part(edges=p.edges) for p in self.parts))


@dataclass(frozen=True)
class Exit:
    """The product over the columns: rows again. rows: the dimension that runs over tokens."""

    rows: int
    parts: tuple[Part, ...]


class Pairs:
    """Reads calls as operations on pairs; knows which values are made of positions alone, and runs them."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.placed: set[Node] = set()
        self.runs: dict[int, Concrete] = {}

    def note(self, node: Node) -> None:
        """Take a node into account; called for every node in graph order."""
        if node.op == "placeholder":
            ref = self.program.weights.get(node.name)
            known = node.name == "position_ids" or (ref is not None and ref.value is not None)
        else:
            known = all(i in self.placed or isinstance(value(i), torch.SymInt) for i in node.all_input_nodes)
        if known:
            self.placed.add(node)

    def read(self, node: Node, env: dict[Node, Any]) -> Pair | Exit | None:
        """What a call makes of pairs, or None where no rule fits."""
        if not isinstance(value(node), Tensor):
            return None
        if is_op(node, A.einsum.default):
            return self._einsum(node, env)
        if is_op(node, A.cat.default):
            return _cat(node, env)
        if torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, *POINTWISE):
            return self._pointwise(node, env)
        if is_op(node, A.expand.default):
            return _expand(node, env)
        source = env.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        return _along(node, source, env) if isinstance(source, Pair) and source.rows is not None else None

    # -- elementwise --------------------------------------------------------------------------------------------------

    def _pointwise(self, node: Node, env: dict[Node, Any]) -> Pair | None:
        rank = tensor(node).dim()
        inputs = node.all_input_nodes[:1] if is_op(node, A.type_as.default) else node.all_input_nodes
        held = [(i, _placed(env.get(i), rank - tensor(i).dim())) for i in inputs if _is_tensor(i)]
        pairs = [h for _, h in held if isinstance(h, Pair)]
        axes = sorted({h.dim for _, h in held if isinstance(h, Rows)})
        if not pairs and len(axes) == 2:
            pairs = [Pair(axes[0], axes[1], (Part(),))]
        if not pairs or len({(p.rows, p.cols, len(p.parts), p.tail) for p in pairs}) != 1:
            return None
        found = pairs[0].plain()
        for source, one in held:
            if isinstance(one, Pair):
                found = _joined(found, [p.edges for p in one.parts])
            elif (
                isinstance(one, Rows)
                and one.axis == "tokens"
                and one.inner == 1
                and one.dim in (found.rows, found.cols)
            ):
                if one.dim == found.cols:
                    if len(found.parts) != 1 or found.tail:
                        return None
                    found = _joined(found, [frozenset({(source, node)})])
            elif one is not Kind.CONST:
                return None
        return self._bounded(node, found, dict(held))

    def _bounded(self, node: Node, found: Pair, held: dict[Node, Any]) -> Pair:
        """The result of an elementwise call with what is known of where it matters."""
        first = held.get(node.args[0]) if isinstance(node.args[0], Node) else None
        if is_op(node, *CASTS) and isinstance(first, Pair):
            return _with(found, first.form, [first])
        if is_op(node, *NOT) and isinstance(first, Pair):
            return _with(found, {"seen": "hidden", "hidden": "seen"}.get(first.form, "plain"), [first])
        if is_op(node, A.masked_fill.Scalar) and float(argument(node, "value")) <= HIDDEN:
            return self._masked(found, node.args[1], "hidden", held, first)
        if is_op(node, A.where.ScalarOther) and float(node.args[2]) <= HIDDEN:  # type: ignore[arg-type]
            return self._masked(found, node.args[0], "seen", held, held.get(node.args[1]))  # type: ignore[arg-type]
        if is_op(node, A.mul.Tensor, A.div.Tensor) and isinstance(first, Pair) and first.form in ("dead", "zero"):
            by = node.args[1]
            if first.form == "zero" or (isinstance(by, (int, float)) and by > 0):
                return _with(found, first.form, [first])
        if is_op(node, A.add.Tensor, A.sub.Tensor) and isinstance(first, Pair) and first.form == "dead":
            return _with(found, "dead", [first])
        if value(node).dtype != torch.bool:
            return found
        if node in self.placed:
            return self._run(node, found, False)
        if is_op(node, A.lt.Scalar) and isinstance(first, Pair) and _is_rank(node.args[0], first):
            return _with(found, "seen", [replace(found, parts=(Part(most=int(node.args[1])),))])  # type: ignore[arg-type]
        seen = [h for h in held.values() if isinstance(h, Pair) and h.form == "seen"]
        return _with(found, "seen", seen) if is_op(node, *AND) and seen else found

    def _masked(self, found: Pair, mask: Any, form: str, held: dict[Node, Any], scores: Any) -> Pair:
        """Scores that a mask hides, on top of what was hidden of them."""
        by = held.get(mask)
        if not isinstance(by, Pair):
            return found
        if by.form != form and mask in self.placed:
            by = self._run(mask, by, form == "hidden")
        if by.form != form:
            return found
        dead = [scores] if isinstance(scores, Pair) and scores.form == "dead" else []
        return _with(found, "dead", [by, *dead])

    def _run(self, node: Node, found: Pair, negated: bool) -> Pair:
        """A mask of positions, run at several lengths: how far back it, or its opposite, is ever true."""
        assert found.rows is not None
        if len(found.parts) != 1 or found.tail:
            return found
        try:
            lengths = lengths_for(numbers(node, _sizes(node)))
            lengths.append(lengths[-1] + MORE)
            tables = {n: table(self._value(node, n), found.rows, found.cols, negated) for n in lengths}
        except NearMiss:
            return found
        behind = {n: lags(seen) for n, seen in tables.items()}
        reach = {n: high + 1 for n, (_, high) in behind.items()}
        widest = reach[lengths[-1]]
        # a window shows as many tokens as there are, then stays: anything else may grow with the length
        steady = 0 < widest < lengths[-2] and all(r == min(n, widest) for n, r in reach.items())
        causal = all(low >= 0 for low, _ in behind.values())
        rare = every(tables[lengths[-1]]) if causal and not steady else 1
        part = Part(causal, widest if steady else 0, found.parts[0].edges, rare)
        return replace(found, form="hidden" if negated else "seen", parts=(part,))

    def _value(self, node: Node, length: int) -> Tensor:
        if length not in self.runs:
            self.runs[length] = Concrete(length, missing=lambda hole: self._hole(hole, length))
        found: Tensor = self.runs[length].value(node)
        return found

    def _hole(self, hole: Node, length: int) -> Tensor:
        ref = self.program.weights.get(hole.name)
        if ref is None:
            return torch.arange(length)[None]
        if ref.value is None or ref.value.is_meta:
            raise NearMiss(f"the mask reads {ref.name}")
        return ref.value

    # -- products -----------------------------------------------------------------------------------------------------

    def _einsum(self, node: Node, env: dict[Node, Any]) -> Pair | Exit | None:
        left, arrow, out = str(node.args[0]).replace(" ", "").partition("->")
        labels, operands = left.split(","), list(node.args[1])  # type: ignore[arg-type]
        if not arrow or "." in left or len(operands) != 2:
            return None
        a, b = (env.get(o) for o in operands)
        columns = _columns(b, operands[1], node)
        if columns is None:
            return None
        key = labels[1][columns.cols]
        if isinstance(a, Rows) and a.axis == "tokens" and a.inner == 1:
            token = labels[0][a.dim]
            if token != key and token in out and key in out:
                return replace(columns, rows=out.index(token), cols=out.index(key))
            return None
        if not isinstance(a, Pair) or a.rows is None or labels[0][a.cols] != key or key in out or a.tail:
            return None
        if len(a.parts) != len(columns.parts) or labels[0][a.rows] not in out:
            return None
        bound = a.form == "zero"
        seen = a.parts if bound else a.plain().parts
        parts = tuple(replace(p, edges=p.edges | k.edges) for p, k in zip(seen, columns.parts, strict=True))
        return Exit(out.index(labels[0][a.rows]), parts)


def _is_tensor(node: Node) -> bool:
    return isinstance(value(node), Tensor)


def _placed(held: Any, behind: int) -> Any:
    """What an operand is in the dimensions of a result with `behind` more of them."""
    if isinstance(held, Rows):
        return Rows(held.axis, held.dim + behind, held.inner)
    if isinstance(held, Pair):
        return replace(held, rows=None if held.rows is None else held.rows + behind, cols=held.cols + behind)
    return held


def _sizes(node: Node) -> list[Node]:
    """The sizes that a value is made with; what has these sizes is no part of it."""
    found, left, seen = list[Node](), [node], set[Node]()
    while left:
        for operand in left.pop().all_input_nodes:
            if operand not in seen:
                seen.add(operand)
                (found if is_op(operand, A.sym_size.int) else left).append(operand)
    return found


def _joined(pair: Pair, edges: Iterable[frozenset[Edge]]) -> Pair:
    parts = (replace(p, edges=p.edges | e) for p, e in zip(pair.parts, edges, strict=True))
    return replace(pair, parts=tuple(parts))


def _with(found: Pair, form: str, bounds: Iterable[Pair]) -> Pair:
    """A pair of a form, bounded by all of the given."""
    parts = found.plain().parts
    for bound in bounds:
        parts = tuple(p.within(q) for p, q in zip(parts, bound.parts, strict=True))
    return replace(found, form=form, parts=parts) if form != "plain" else found


def _is_rank(node: Any, pair: Pair) -> bool:
    """Whether a node holds each column's place in an order of them: what is sorted by it once more."""
    orders = ORDERS[:2]
    return len(pair.parts) == 1 and is_op(node, *orders) and is_op(node.args[0], *orders)


def _columns(held: Any, source: Node, user: Node) -> Pair | None:
    """An operand read as columns."""
    if isinstance(held, Rows) and held.axis == "tokens" and held.inner == 1:
        return Pair(None, held.dim, (Part(edges=frozenset({(source, user)})),))
    return held if isinstance(held, Pair) and held.rows is None else None


def _cat(node: Node, env: dict[Node, Any]) -> Pair | None:
    """Columns beside columns: keys beside keys, or scores beside scores and at the end what belongs to no token."""
    operands: Any = node.args[0]
    dim, held = int(argument(node, "dim")) % tensor(node).dim(), [env.get(o) for o in operands]
    if all(isinstance(h, Rows) and h.axis == "tokens" and h.inner == 1 and h.dim == dim for h in held):
        return Pair(None, dim, tuple(Part(edges=frozenset({(o, node)})) for o in operands))
    pairs = [h for h in held if isinstance(h, Pair)]
    if (
        not pairs
        or len({(p.rows, p.cols, p.form) for p in pairs}) != 1
        or pairs[0].rows is None
        or pairs[0].cols != dim
    ):
        return None
    rest = held[len(pairs) :]
    if held[: len(pairs)] != pairs or any(p.tail for p in pairs):
        return None
    extra = [tensor(o).shape[dim] for o in operands[len(pairs) :]]
    fits = all(h is Kind.CONST or (isinstance(h, Rows) and h.dim == pairs[0].rows) for h in rest)
    if not fits or not all(isinstance(n, int) for n in extra):
        return None
    return replace(pairs[0], parts=tuple(p for q in pairs for p in q.parts), tail=sum(extra))


def _expand(node: Node, env: dict[Node, Any]) -> Pair | None:
    """Columns, or pairs, repeated along new dimensions."""
    source: Any = node.args[0]
    held = _placed(env.get(source), tensor(node).dim() - tensor(source).dim())
    if isinstance(held, Pair) and held.rows is not None:
        return held
    over = [i for i, d in enumerate(tensor(node).shape) if isinstance(d, torch.SymInt)]
    if not isinstance(held, Rows) or held.inner != 1 or len(over) != 2 or held.dim not in over:
        return None
    if held.dim == over[0]:
        return Pair(over[0], over[1], (Part(),))
    return Pair(over[0], over[1], (Part(edges=frozenset({(source, node)})),))


def _along(node: Node, source: Pair, env: dict[Node, Any]) -> Pair | None:
    """Calls that keep rows apart, whatever they do with columns."""
    assert source.rows is not None
    rank = tensor(node.args[0]).dim()  # type: ignore[arg-type]
    if is_op(node, A.full_like.default, A.zeros_like.default, A.ones_like.default, A.empty_like.default):
        return replace(source, form="plain", parts=tuple(Part() for _ in source.parts))
    if is_op(node, A.unsqueeze.default):
        at = int(argument(node, "dim")) % (rank + 1)
        return replace(source, rows=source.rows + (at <= source.rows), cols=source.cols + (at <= source.cols))
    dim = argument(node, "dim", None)
    if isinstance(dim, (list, tuple)):
        dim = dim[0] if len(dim) == 1 else None
    if not isinstance(dim, int) or dim % rank == source.rows:
        return None
    dim %= rank
    if is_op(node, A.softmax.int, A._softmax.default) and dim == source.cols:
        return _with(source.plain(), "zero", [source]) if source.form == "dead" else source.plain()
    if is_op(node, A.slice.Tensor):
        return _cut(node, source, dim)
    if is_op(node, *ORDERS) and dim == source.cols and not source.tail:
        return source.plain()
    if is_op(node, *PICKS) and dim == source.cols and not source.tail:
        found = source.plain()
        for other in (env.get(n) for n in node.all_input_nodes[1:]):
            if not isinstance(other, Pair) or len(other.parts) != len(source.parts):
                return None
            found = _joined(found, [p.edges for p in other.parts])
        return found
    if (
        is_op(node, A.sum.dim_IntList, A.mean.dim, A.amax.default)
        and dim != source.cols
        and not argument(node, "keepdim")
    ):
        lower = (source.rows - (dim < source.rows), source.cols - (dim < source.cols))
        return replace(source.plain(), rows=lower[0], cols=lower[1])
    return None


def _cut(node: Node, source: Pair, dim: int) -> Pair | None:
    """A slice of another dimension, or one that drops columns of no token."""
    if dim != source.cols:
        return source
    end = argument(node, "end")
    drops = -end if isinstance(end, int) and end < 0 else math.inf
    return None if argument(node, "start") or drops > source.tail else replace(source, tail=source.tail - int(drops))
