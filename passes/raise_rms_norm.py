"""Find RMSNorm in ATen spelling. The anchor is the inverse root of a mean of squares, since every spelling has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, tensor
from deepinfer_compile.match import (
    dtype_of,
    factors_of,
    is_cast,
    is_last,
    number,
    operand,
    plus_number,
    products,
    times_number,
    uncast,
    width,
)
from deepinfer_compile.ops import RMS_NORM
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program

A = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Root:
    """node = rsqrt(mean(x^2) + eps), or the same sqrt where `divides`."""

    node: Node
    x: Node
    eps: float
    divides: bool


@dataclass(frozen=True)
class _End:
    """One value that rms_norm gives: `node` holds norm(x) with this weight (before any offset was told apart)."""

    node: Node
    weight: Node | None
    cast_first: bool


@register
@dataclass(frozen=True)
class RaiseRmsNorm:
    """Replace spelled-out RMSNorm by deepinfer::rms_norm.

    Before: `w * to(f32(x) * rsqrt(mean(pow(f32(x), 2), [-1], True) + eps), bf16)`
    After:  `rms_norm(x, w, eps, 0.0, True)`
    Also: the cast after the weight, no cast, no weight, `1 + w`, x * x or square, division by sqrt, aten.rms_norm.
    Left alone: LayerNorm, a mean over other dimensions or without keepdim, eps that is not under the root, a mean of
    squares taken in half precision (rms_norm would give other bits). `required`: sites that every layer must have.
    """

    name: ClassVar[str] = "raise-rms-norm"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    breaks: ClassVar[frozenset[Fact]] = NONE
    required: int = 0

    def expected(self, program: Program) -> dict[str, int]:
        """How many sites each layer block must have."""
        return {name: self.required for name in program.blocks if program.layers_of(name)}

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if is_op(node, A.rms_norm.default):
                _raise_native(node, ctx)
            elif is_op(node, A.layer_norm.default, A.native_layer_norm.default):
                ctx.miss(node, "LayerNorm subtracts the mean")
            else:
                _raise_spelled(node, ctx)


def _raise_native(node: Node, ctx: PassContext) -> None:
    x = operand(node)
    shape, weight, eps = argument(node, "normalized_shape"), argument(node, "weight"), argument(node, "eps")
    if len(shape) != 1:
        ctx.miss(node, f"normalises over the last {len(shape)} dimensions, not one")
    elif ctx.claim(node, "aten.rms_norm"):
        wide = torch.float32 if dtype_of(x) in HALF else dtype_of(x)
        eps = torch.finfo(wide).eps if eps is None else float(eps)
        _replace(node, x, weight, eps, 0.0, False)


def _raise_spelled(node: Node, ctx: PassContext) -> None:
    root = _root(node)
    if root is None:
        return
    if isinstance(root, str):
        ctx.miss(node, root)
        return
    scaled = list(_normalized(root))
    if not scaled:
        ctx.miss(node, "the root is not multiplied with, or divided into, the value it was taken of")
    for y, x in scaled:
        narrow = uncast(x)
        ends = _ends(y, dtype_of(narrow))
        if ends is None:
            narrow, ends = _wide(y, x), _ends_here(y, dtype_of(y), True)
        for end in ends:
            if ctx.claim(end.node, "mean of squares, eps, root, " + ("weight" if end.weight else "no weight")):
                weight, offset = _weight_and_offset(end)
                _replace(end.node, narrow, weight, root.eps, offset, end.cast_first)


def _root(node: Node) -> _Root | str | None:
    """The inverse root at a node; words if it is close to one; None if it is something else."""
    divides = is_op(node, A.sqrt.default)
    power = is_op(node, A.pow.Tensor_Scalar) and number(operand(node, 1)) == -0.5
    if not (divides or power or is_op(node, A.rsqrt.default)):
        return None
    inner = operand(node)
    mean, eps = plus_number(inner) or (inner, None)
    if is_op(mean, A.var.correction, A.var.dim, A.var.default):
        return "the variance is about the mean: this is LayerNorm"
    if not is_op(mean, A.mean.dim):
        return None
    squares = operand(mean)
    x = _squared(squares)
    if x is None:
        return "the mean is not of squares"
    if is_op(x, A.sub.Tensor) and is_op(operand(x, 1), A.mean.dim):
        return "the mean is subtracted first: this is LayerNorm"
    dims = list(argument(mean, "dim") or [])
    if len(dims) != 1 or not is_last(squares, dims[0]):
        return f"the mean is over dimensions {dims} of {tensor(squares).dim()}, not the last alone"
    if not argument(mean, "keepdim"):
        return "the mean drops its dimension (keepdim is false)"
    if dtype_of(squares) in HALF:
        return "the mean of squares is taken in half precision, rms_norm takes it in fp32"
    return "no eps is added under the root" if eps is None else _Root(node, x, eps, divides)


def _squared(node: Node) -> Node | None:
    """x of pow(x, 2), square(x) or x * x."""
    if is_op(node, A.square.default) or (is_op(node, A.pow.Tensor_Scalar) and number(operand(node, 1)) == 2):
        source: Node = operand(node)
        return source
    return next((a for a, b in products(node) if a is b), None)


def _normalized(root: _Root) -> Iterator[tuple[Node, Node]]:
    """(y, x) where y = x * root, or x / root where it divides, x being what was squared up to a cast."""
    wanted, inverse = uncast(root.x), [] if root.divides else [root.node]
    for user in root.node.users if root.divides else ():
        if is_op(user, A.reciprocal.default):
            inverse += [user, *(u for u in user.users if (times_number(u) or (u, 0.0))[1] == 1)]
        elif is_op(user, A.div.Tensor) and operand(user, 1) is root.node and uncast(operand(user)) is wanted:
            yield user, operand(user)
    for scale in inverse:
        yield from ((user, x) for user, x in factors_of(scale) if uncast(x) is wanted)


def _wide(y: Node, x: Node) -> Node:
    """x in the dtype of y = x * root."""
    if dtype_of(x) == dtype_of(y):
        return x
    return Editor(y.graph, y).call(A._to_copy.default, x, dtype=dtype_of(y))


def _ends(y: Node, narrow: torch.dtype) -> list[_End] | None:
    """Values of x's dtype that come of y; None if some use of y stays in the wide dtype."""
    if dtype_of(y) == narrow:
        return _ends_here(y, narrow, True)
    ends: list[_End] = []
    for user in y.users:
        weight = _weight(user, y)
        if is_cast(user) and dtype_of(user) == narrow:
            ends += _ends_here(user, narrow, True)
        elif weight is not None and user.users and all(is_cast(u) and dtype_of(u) == narrow for u in user.users):
            ends += [_End(u, weight, False) for u in user.users]
        else:
            return None
    return ends


def _ends_here(y: Node, narrow: torch.dtype, cast_first: bool) -> list[_End]:
    """The products of y with weights; y itself where it is used otherwise."""
    found = [_End(u, w, cast_first) for u in y.users if (w := _weight(u, y)) is not None and dtype_of(u) == narrow]
    return found if found and len(found) == len(y.users) else [*found, _End(y, None, cast_first)]


def _weight(user: Node, y: Node) -> Node | None:
    """The vector that `user` multiplies y with along the last dimension."""
    others = [b for a, b in products(user) if a is y]
    return next(
        (w for w in others if tensor(w).dim() == 1 and width(w) is not None and width(w) == width(y) != 1), None
    )


def _weight_and_offset(end: _End) -> tuple[Node | None, float]:
    """The weight that is stored and what is added to it, where rms_norm adds it in the same dtype."""
    if end.weight is None:
        return None, 0.0
    base, offset = plus_number(end.weight) or (end.weight, 0.0)
    if end.cast_first:
        return base, offset
    if offset != 0 and dtype_of(base) in HALF:
        return end.weight, 0.0
    return uncast(base), offset


def _replace(node: Node, x: Node, weight: Node | None, eps: float, offset: float, cast_first: bool) -> None:
    edit = Editor(node.graph, node)
    edit.replace(node, edit.call(RMS_NORM.overload, x, weight, eps, offset, cast_first))
