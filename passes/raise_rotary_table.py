"""Find the tables of rotary embedding in ATen spelling: a cosine and a sine of positions times frequencies.

Which dimension of the angles runs over what is followed through views, so that no name and no size has to be trusted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, only_user, tensor
from deepinfer_compile.match import (
    CASTS,
    alike,
    dtype_of,
    equal_size,
    is_cast,
    is_last,
    is_tensor,
    operand,
    order_of,
    products,
    same_sizes,
    times_number,
    width,
)
from deepinfer_compile.ops import ROTARY_TABLE
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten
WHOLE = (torch.int64, torch.int32)
WIDE = (torch.float32, torch.float64)


@dataclass(frozen=True)
class _Angles:
    """positions [..., T] times inv_freq [F], in a form of `ops.rope.FORMS`. added: dimensions of size 1 that the table
    has besides, in the order in which they are added."""

    positions: Node
    inv_freq: Node
    form: str
    added: tuple[int, ...] = ()


@dataclass(frozen=True)
class _View:
    """source's elements in other places: dimension i of source is dimension `dims[i]` here, counted from the right."""

    source: Node
    dims: tuple[int, ...]


@dataclass(frozen=True)
class _End:
    """The last node of a table: its function of the angles, times `scaling`."""

    node: Node
    scaling: float = 1.0


@register
@dataclass(frozen=True)
class RaiseRotaryTable:
    """Replace the computation of rotary tables by deepinfer::rotary_table.

    Before: `f = transpose(to(inv_freq[None, :, None], f32) @ to(position_ids[:, None, :], f32), 1, 2); e = cat([f, f]);
            cos = to(cos(e) * 1.0, bf16); sin = to(sin(e) * 1.0, bf16)`
    After:  `cos, sin = rotary_table(position_ids, inv_freq, 1.0, 'halves', bf16)`
    Also: the product of position_ids[..., None] and inv_freq, repeated angles ("pairs") or single ones ("once"), no
    scaling, no cast. Scaling or cast that differ between cosine and sine, and an axis for heads, stay behind the op.
    Left alone: a cosine without its sine, positions that are not whole numbers, angles in half precision, angles that
    are shifted or are no such product. Complex tables (polar) are no candidates.
    """

    name: ClassVar[str] = "raise-rotary-table"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        order = order_of(gm.graph)
        sines = [n for n in gm.graph.nodes if is_op(n, A.sin.default)]
        for cosine in [n for n in gm.graph.nodes if is_op(n, A.cos.default)]:
            sine = next((n for n in sines if alike(operand(n), operand(cosine))), None)
            if sine is None:
                ctx.miss(cosine, "there is no sine of the same angles")
                continue
            sines.remove(sine)
            angles = _angles(operand(cosine))
            if isinstance(angles, str):
                ctx.miss(cosine, angles)
            elif ctx.claim(cosine, f"cosine and sine of positions times {width(angles.inv_freq)} frequencies"):
                _emit(angles, cosine, sine, min(cosine, sine, key=lambda n: order[n]))
        for sine in sines:
            ctx.miss(sine, "there is no cosine of the same angles")


def _angles(node: Node) -> _Angles | str:
    """What angles are made of, or why they are no product of positions and frequencies."""
    added: list[int] = []
    while is_op(node, A.unsqueeze.default):
        added.insert(0, int(argument(node, "dim")) % tensor(node).dim())
        if added[0] == tensor(node).dim() - 1:
            return "the angles have a dimension more than those of frequencies"
        node = operand(node)
    form, product = "once", node
    if is_op(node, A.cat.default) and is_last(node, argument(node, "dim")):
        pieces = list(operand(node))
        if len(pieces) != 2 or not alike(*pieces):
            return "the angles are joined of different parts"
        form, product = "halves", pieces[0]
    elif is_op(node, A.repeat_interleave.self_int) and is_last(node, argument(node, "dim")):
        if operand(node, 1) != 2:
            return f"the angles are repeated {operand(node, 1)} times, not twice"
        form, product = "pairs", operand(node)
    if dtype_of(product) not in WIDE:
        return f"the angles are taken in {dtype_of(product)}, rotary_table takes them in fp32"
    found = _of_mul(product) or _of_matmul(product)
    if found is None:
        return "the angles are no product of positions and frequencies"
    positions, inv_freq = found
    if dtype_of(positions) not in WHOLE:
        return f"the positions are {dtype_of(positions)}, not whole numbers"
    if dtype_of(product) != (torch.float64 if dtype_of(inv_freq) == torch.float64 else torch.float32):
        return f"the angles are taken in {dtype_of(product)} of frequencies in {dtype_of(inv_freq)}"
    return _Angles(positions, inv_freq, form, tuple(added))


def _of_mul(node: Node) -> tuple[Node, Node] | None:
    """(positions, frequencies) of positions[..., None] * frequencies."""
    for left, right in products(node):
        p, f = _view(left), _view(right)
        rank = len(p.dims)
        if f.dims == (-1,) and rank and p.dims == tuple(range(-rank - 1, -1)) and _fills(node, p, f):
            return p.source, f.source
    return None


def _of_matmul(node: Node) -> tuple[Node, Node] | None:
    """(positions, frequencies) of transpose(frequencies[None, :, None] @ positions[:, None, :], 1, 2)."""
    if not is_op(node, A.transpose.int) or tensor(node).dim() != 3:
        return None
    product = operand(node)
    if {int(d) % 3 for d in node.args[1:]} != {1, 2} or not is_op(product, A.matmul.default, A.bmm.default):  # type: ignore[arg-type]
        return None
    f, p = _view(operand(product)), _view(operand(product, 1))
    one_term = width(operand(product)) == 1
    if one_term and f.dims == (-2,) and p.dims == (-3, -1) and _fills(node, p, f):
        return p.source, f.source
    return None


def _fills(node: Node, p: _View, f: _View) -> bool:
    """Whether the angles have one row of frequencies a position, and nothing more."""
    return same_sizes(tensor(node).shape, (*tensor(p.source).shape, *tensor(f.source).shape))


def _view(node: Node) -> _View:
    """What a node shows through added, stretched and exchanged dimensions, and through casts that round nothing."""
    if not is_op(node, A.unsqueeze.default, A.expand.default, A.transpose.int, *CASTS) or not is_tensor(operand(node)):
        return _View(node, tuple(range(-tensor(node).dim(), 0)))
    inner, below = operand(node), _view(operand(node))
    rank = tensor(node).dim()
    if is_cast(node):
        return below if _keeps(dtype_of(inner), dtype_of(node)) else _View(node, tuple(range(-rank, 0)))
    if is_op(node, A.unsqueeze.default):
        at = int(argument(node, "dim")) % rank - rank
        return _View(below.source, tuple(d - (d <= at) for d in below.dims))
    if is_op(node, A.expand.default):
        kept = all(equal_size(tensor(inner).shape[d], tensor(node).shape[d]) for d in below.dims)
        return below if kept else _View(node, tuple(range(-rank, 0)))
    a, b = (int(d) % rank - rank for d in node.args[1:])  # type: ignore[arg-type]
    return _View(below.source, tuple({a: b, b: a}.get(d, d) for d in below.dims))


def _keeps(found: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether a cast keeps numbers, or is that of positions which the op does itself."""
    if found in WHOLE:
        return wanted in (torch.int64, *WIDE)
    return found.is_floating_point and torch.promote_types(found, wanted) == wanted


def _emit(angles: _Angles, cosine: Node, sine: Node, first: Node) -> None:
    """Insert the op in front of both functions, with what comes alike behind them."""
    ends, dtype = [_scaled(cosine), _scaled(sine)], dtype_of(cosine)
    if ends[0].scaling != ends[1].scaling:
        ends = [_End(cosine), _End(sine)]
    casts: list[Any] = [only_user(e.node) for e in ends]
    if all(is_cast(c) and dtype_of(c).is_floating_point for c in casts) and dtype_of(casts[0]) == dtype_of(casts[1]):
        ends, dtype = [_End(c, e.scaling) for c, e in zip(casts, ends)], dtype_of(casts[0])
    edit = Editor(first.graph, first)
    args = (angles.positions, angles.inv_freq, ends[0].scaling, angles.form, dtype)
    both = edit.call(ROTARY_TABLE.overload, *args)
    for i, end in enumerate(ends):
        table = edit.item(both, i)
        for dim in angles.added:
            table = edit.call(A.unsqueeze.default, table, dim)
        edit.replace(end.node, table)


def _scaled(node: Node) -> _End:
    """A function of the angles with the number that follows."""
    user = only_user(node)
    found = times_number(user)
    return _End(user, found[1]) if user is not None and found is not None else _End(node)
