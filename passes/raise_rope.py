"""Find rotary embedding in ATen spelling: by the rotated half, by two crossed products, or by complex numbers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import DTYPE_NAMES, Editor, argument, is_op, only_user, place_of
from deepinfer_compile.match import (
    RESHAPES,
    Part,
    after,
    alike,
    alternating,
    dtype_of,
    factors_of,
    halves,
    is_cast,
    is_last,
    operand,
    order_of,
    part,
    products,
    same_shape,
    sums,
    terms_of,
    uncast,
    width,
)
from deepinfer_compile.ops import COMPLEX_ROPE_TABLE, ROPE
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


_Tables = dict[tuple[Node, Node], tuple[Node, Node]]
"""Tables as the model has them -> cos and sin as the op takes them."""


@dataclass(frozen=True)
class _Site:
    """`node` holds rope(x, cos, sin, style). spread: the tables repeat each angle for adjacent channels."""

    node: Node
    x: Node
    cos: Node
    sin: Node
    style: str
    spread: bool = False


@register
@dataclass(frozen=True)
class RaiseRope:
    """Replace spelled-out rotary embedding by deepinfer::rope.

    Before: `x * cos + cat([neg(x[..., D/2:]), x[..., :D/2]], -1) * sin`
    After:  `rope(x, cos, sin, "half")`
    Also: the crossed products `cat([a * cos - b * sin, b * cos + a * sin])` of halves ("half"), of adjacent pairs read
    into halves ("pair_to_half") or stacked back ("pair"); adjacent pairs turned by a complex table ("pair"), which
    complex_rope_table splits into cos and sin in its own precision. Slices and cats of partial rotary stay around it.
    Left alone: halves of unequal parts, tables that do not fit, a conjugated table, crossed products in other signs.
    Refused: a complex table cast to a real dtype, which would lose its imaginary part.
    """

    name: ClassVar[str] = "raise-rope"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        tables: _Tables = {}
        order = order_of(gm.graph)
        for node in list(gm.graph.nodes):
            _refuse_real_table(node)
            site = _crossed(node) or _rotated(node) or _complex(node)
            if isinstance(site, _Site) and (reason := _unfit(site)):
                site = reason
            if isinstance(site, str):
                ctx.miss(node, site)
            elif site is not None and ctx.claim(site.node, f"rotary embedding, {site.style}"):
                _emit(site, tables, order)


def _refuse_real_table(node: Node) -> None:
    if is_cast(node) and dtype_of(operand(node)).is_complex and not dtype_of(node).is_complex:
        raise UnsupportedConstruct(
            construct=f"a complex value cast to {_name(node)}, which drops its imaginary part",
            fix="keep the rotary table complex, or split it by torch.view_as_real before the cast",
            where=place_of(node),
        )


def _joined(node: Node) -> list[Any]:
    """The pieces of a cat along the last dimension, or of a stack that makes one."""
    if not is_op(node, A.cat.default, A.stack.default) or argument(node, "dim") not in (-1, _rank(node) - 1):
        return []
    return list(operand(node))


def _flattened(node: Node) -> Node | None:
    """The cat itself, or what a stack is reshaped to."""
    final = only_user(node) if is_op(node, A.stack.default) else node
    return final if is_op(final, A.cat.default, *RESHAPES) else None


def _rotated(node: Node) -> _Site | str | None:
    """x * cos + rotated * sin, found at rotated = cat([neg(x2), x1]) or at the same stacked and flattened."""
    pieces = _joined(node)
    if len(pieces) != 2 or not is_op(pieces[0], A.neg.default):
        return None
    p1, p2 = part(pieces[1]), part(operand(pieces[0]))
    style, stacked = _read_style(p1, p2), is_op(node, A.stack.default)
    if style is None or p1 is None or stacked != (style == "pair"):
        return "the rotated parts are not the two halves of one value, or its even and odd elements"
    rotated = _flattened(node)
    if rotated is None or not same_shape(rotated, p1.source):
        return "the rotated parts are not put back to the value's shape"
    for turned, sin in factors_of(rotated):
        for total, term in terms_of(turned):
            cos = next((c for x, c in products(term) if x is p1.source), None)
            if cos is not None:
                return _Site(total, p1.source, cos, sin, style, spread=stacked)
    return "the rotated value is not multiplied by a table and added to the value times another table"


def _crossed(node: Node) -> _Site | str | None:
    """cat or stack of [a * cos - b * sin, b * cos + a * sin]."""
    pieces = _joined(node)
    if len(pieces) < 2 or not is_op(pieces[0], A.sub.Tensor) or not sums(pieces[1]):
        return None
    if argument(pieces[0], "alpha") != 1:
        return None
    terms, stacked = [products(t) for t in pieces[0].args[:2]], is_op(node, A.stack.default)
    if not all(terms):
        return None
    for (a, cos), (b, sin) in itertools.product(*terms):
        p1, p2 = part(a), part(b)
        style = _read_style(p1, p2)
        if style is None or p1 is None or p2 is None or not _is_cross_sum(pieces[1], p1, p2, cos, sin):
            continue
        if stacked and style == "half":
            return "halves are read and adjacent pairs are written"
        final = _flattened(node)
        if final is None or not same_shape(final, p1.source):
            return "the rotated parts are not put back to the value's shape, or stand beside others"
        return _Site(final, p1.source, cos, sin, "pair_to_half" if style == "pair" and not stacked else style)
    return "the crossed products are not a rotation of two parts of one value"


def _read_style(p1: Part | None, p2: Part | None) -> str | None:
    if p1 is None or p2 is None:
        return None
    return "half" if halves(p1, p2) else "pair" if alternating(p1, p2) else None


def _is_cross_sum(total: Any, p1: Part, p2: Part, cos: Node, sin: Node) -> bool:
    """Whether total is b * cos + a * sin, in any order, for the parts a and b."""
    for left, right in sums(total):
        one = any(part(x) == p2 and alike(c, cos) for x, c in products(left))
        two = any(part(x) == p1 and alike(s, sin) for x, s in products(right))
        if one and two:
            return True
    return False


def _complex(node: Node) -> _Site | str | None:
    """reshape(view_as_real(view_as_complex(reshape(x, [..., D / 2, 2])) * table), x's shape)."""
    if not is_op(node, A.view_as_real.default):
        return None
    turned = operand(node)
    found = [(z, t) for z, t in products(turned) if is_op(z, A.view_as_complex.default) and same_shape(z, turned)]
    if not found:
        return "the real view is not of a complex view times a table"
    z, table = found[0]
    if not dtype_of(table).is_complex:
        raise UnsupportedConstruct(
            construct=f"a rotary table in {_name(table)} multiplied with complex pairs: a cast has dropped "
            "its imaginary part",
            fix="keep the table complex: cast the model without its rotary buffers, or compute the table again",
            where=place_of(node),
        )
    pairs, final = operand(z), only_user(node)
    if not is_op(pairs, *RESHAPES) or width(pairs) != 2:
        return "the complex view is not of adjacent pairs of one value"
    if final is None or not is_op(final, *RESHAPES) or not same_shape(final, operand(pairs)):
        return "the real view is not flattened back to the value's shape"
    if is_op(table, A._conj.default):
        return "the table is conjugated: the rotation is backwards"
    return _Site(final, operand(pairs), table, table, "pair")


def _name(node: Node) -> str:
    return DTYPE_NAMES.get(dtype_of(node), str(dtype_of(node)))


def _rank(node: Node) -> int:
    return int(node.meta["val"].dim())


def _unfit(site: _Site) -> str:
    """Why the rope op cannot stand for a site, or nothing."""
    if not same_shape(site.node, site.x):
        return "the tables are wider than the value they turn"
    size = width(site.x)
    widths = {width(site.cos), width(site.sin)}
    if size is None or len(widths) != 1 or not widths <= {size, size // 2}:
        return f"tables of width {sorted(map(str, widths))} do not fit a value of width {size}"
    return ""


def _emit(site: _Site, tables: _Tables, order: dict[Node, int]) -> None:
    """Insert the op in the dtype of the result; casts to and from it on both sides are what the op does itself."""
    node, x = site.node, site.x
    key = (site.cos, site.sin)
    if site.spread or dtype_of(site.cos).is_complex:
        made = (t for k, t in tables.items() if alike(k, key) and max(order[n] for n in k) < order[node])
        cos, sin = tables[key] = next(made, None) or _real_tables(site)
    else:
        cos, sin = key
    narrow = uncast(x)
    ends = [u for u in node.users if is_cast(u) and dtype_of(u) == dtype_of(narrow) != dtype_of(node)]
    formed = torch.promote_types(dtype_of(narrow), torch.promote_types(dtype_of(cos), dtype_of(sin)))
    if ends and len(ends) == len(node.users) and formed == dtype_of(node):
        x = narrow
    else:
        ends = [node]
    edit = Editor(node.graph, node)
    if dtype_of(x) != dtype_of(node) and ends == [node]:
        x = edit.call(A._to_copy.default, x, dtype=dtype_of(node))
    new = edit.call(ROPE.overload, x, cos, sin, site.style)
    for end in ends:
        edit.replace(end, new)


def _real_tables(site: _Site) -> tuple[Node, Node]:
    """cos and sin as the op takes them: the parts of a complex table, or spread tables with the repeats apart."""
    if dtype_of(site.cos).is_complex:
        edit = Editor(site.node.graph, after(site.cos))
        both = edit.call(COMPLEX_ROPE_TABLE.overload, site.cos)
        return edit.item(both, 0), edit.item(both, 1)
    doubled = [_undoubled(t) for t in (site.cos, site.sin)]
    if doubled[0] is not None and doubled[1] is not None:
        return doubled[0], doubled[1]
    return _gathered(site.cos), _gathered(site.sin)


def _undoubled(table: Node) -> Node | None:
    """t of a table that was made as repeat_interleave(t, 2, -1)."""
    doubled = (
        is_op(table, A.repeat_interleave.self_int) and operand(table, 1) == 2 and is_last(table, argument(table, "dim"))
    )
    return operand(table) if doubled else None


def _gathered(table: Node) -> Node:
    """[c0, c1, c2, c3, ...] for adjacent channels -> [c0, c2, ..., c1, c3, ...], which the op reads as two halves."""
    edit = Editor(table.graph, after(table))
    last, size = _rank(table) - 1, width(table)
    return edit.call(A.cat.default, [edit.call(A.slice.Tensor, table, last, i, size, 2) for i in (0, 1)], -1)
