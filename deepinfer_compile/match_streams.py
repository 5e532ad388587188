"""Recognise residual streams in ATen spelling: Sinkhorn's rounds, the mix they end, and sums over streams."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, only_user, tensor
from deepinfer_compile.match import (
    RESHAPES,
    Part,
    dtype_of,
    is_cast,
    is_last,
    is_tensor,
    operand,
    part,
    plus_number,
    products,
    same_sizes,
    sums,
    times_number,
    uncast,
    width,
)
from deepinfer_compile.ops import RMS_NORM

A = torch.ops.aten
WIDE = (torch.float32, torch.float64)
TRANSPOSES = (A.t.default, A.transpose.int, A.permute.default)


@dataclass(frozen=True)
class Balanced:
    """`node` holds balance_streams(logits, rounds, eps)."""

    node: Node
    logits: Node
    rounds: int
    eps: float


@dataclass(frozen=True)
class Mixed:
    """pre, post and comb are the nodes that mix_streams gives; `products` is the product with its weight."""

    products: Node
    streams: Node
    weight: Node
    base: Node
    scale: Node
    norm_eps: float
    pre: Node
    post: Node


@dataclass(frozen=True)
class Joined:
    """`node` holds join_streams(streams, y, post, comb)."""

    node: Node
    streams: Node
    y: Node
    post: Node
    comb: Node


@dataclass(frozen=True)
class Collapsed:
    """`node` holds collapse_streams(streams, pre)."""

    node: Node
    streams: Node
    pre: Node


# -- rounds -----------------------------------------------------------------------------------------------------------


def balanced(softmax: Node) -> Balanced | str | None:
    """The rounds that follow a softmax of square matrices; None where no column normalisation does, words where one
    does that is another."""
    if not is_op(softmax, A.softmax.int, A._softmax.default) or tensor(softmax).dim() < 3:
        return None
    matrix = tensor(softmax).shape[-2:]
    if not (isinstance(matrix[0], int) and matrix[0] == matrix[1]):
        return None
    start, eps = next(((u, found[1]) for u in softmax.users if (found := plus_number(u))), (softmax, 0.0))
    end = _normalized(start, -2)
    if end is None:
        return None
    if not is_last(softmax, int(argument(softmax, "dim"))):
        return "the softmax is not over rows"
    logits = operand(softmax)
    if dtype_of(softmax) not in WIDE or dtype_of(logits) != dtype_of(softmax):
        return f"the rounds are computed in {dtype_of(softmax)} of {dtype_of(logits)}, balance_streams is wide"
    if start is softmax or end[1] != eps:
        return "another number than that of the rounds is added to the softmax"
    node, rounds = end[0], 1
    while (row := _normalized(node, -1)) and (column := _normalized(row[0], -2)) and row[1] == column[1] == eps:
        node, rounds = column[0], rounds + 1
    return Balanced(node, logits, rounds, eps)


def _normalized(x: Node, dim: int) -> tuple[Node, float] | None:
    """(x / (sum of x over dim + eps), eps)."""
    rank = tensor(x).dim()
    for user in x.users:
        if not is_op(user, A.div.Tensor) or operand(user) is not x or not is_tensor(user.args[1]):
            continue
        total, eps = plus_number(operand(user, 1)) or (None, 0.0)
        if (
            total is None
            or not is_op(total, A.sum.dim_IntList)
            or operand(total) is not x
            or not argument(total, "keepdim")
        ):
            continue
        if [d % rank for d in argument(total, "dim") or ()] == [rank + dim]:
            return user, eps
    return None


# -- mixes ------------------------------------------------------------------------------------------------------------


def mixed(found: Balanced) -> Mixed | str:
    """What made the logits of a balance, up to the streams; words where it is something else."""
    size = width(found.node)
    comb = found.logits
    if (
        size is None
        or not is_op(comb, *RESHAPES)
        or not same_sizes(tensor(comb).shape, (*tensor(operand(comb)).shape[:-1], size, size))
    ):
        return "its logits are no row of numbers seen as a matrix"
    third = _scaled(operand(comb), 2, 2 * size, size * size)
    if third is None:
        return "its logits are no scaled part of a product plus a part of a bias"
    values, scale, base = third
    fit = width(values) == width(base) == 2 * size + size * size and tensor(base).dim() == 1
    if not fit or list(tensor(scale).shape) != [3]:
        return "the product has other parts than those of three weights"
    pre = _gate(values, scale, base, 0, size)
    post = _gate(values, scale, base, 1, size)
    pre = next((u for u in pre.users if plus_number(u) == (pre, found.eps)), None) if pre else None
    post = next((u for u in post.users if times_number(u) == (post, 2.0)), None) if post else None
    if pre is None or post is None:
        return "no sigmoid plus the eps of the rounds and no twice a sigmoid are made of the product's other parts"
    source = _weighted(values)
    if source is None:
        return "the product is not of normalised streams and a weight, wide"
    streams, weight, norm_eps = source
    shape = tensor(streams).shape
    if len(shape) < 3 or shape[-2] != size or not same_sizes(shape[:-1], tensor(pre).shape):
        return "what is normalised is not as many streams"
    return Mixed(values, streams, weight, base, scale, norm_eps, pre, post)


def _scaled(node: Node, index: int, start: int, count: int) -> tuple[Node, Node, Node] | None:
    """(values, scale, base) of values[start: start + count] * scale[index] + base[start: start + count]."""
    for total, bias in sums(node):
        base = _part(bias, start, count)
        for left, right in products(total):
            values, scale = _part(left, start, count), _entry(right, index)
            if base is not None and values is not None and scale is not None:
                return values, scale, base
    return None


def _part(node: Node, start: int, count: int) -> Node | None:
    """What a node shows so many elements of."""
    found = part(node)
    fits = found is not None and (found.start, found.stop, found.step) == (start, start + count, 1)
    return found.source if found is not None and fits else None


def _entry(node: Node, index: int) -> Node | None:
    """The vector that a node is one entry of."""
    fits = is_op(node, A.select.int) and argument(node, "index") == index and tensor(operand(node)).dim() == 1
    return operand(node) if fits else None


def _gate(values: Node, scale: Node, base: Node, index: int, size: int) -> Node | None:
    """The sigmoid of a scaled part of the product plus that of the bias."""
    for piece in _readers(values):
        if part(piece) != Part(values, index * size, (index + 1) * size, 1):
            continue
        for product in piece.users:
            for total in product.users:
                if _scaled(total, index, index * size, size) == (values, scale, base):
                    return next((u for u in total.users if is_op(u, A.sigmoid.default)), None)
    return None


def _readers(node: Node) -> Iterator[Node]:
    """Users, and users of users, which parts are taken by."""
    for user in node.users:
        yield user
        yield from user.users


def _weighted(node: Node) -> tuple[Node, Node, float] | None:
    """(streams, weight, eps) of rms_norm(reshape(streams)) @ weight^T, wide."""
    if is_op(node, A.linear.default) and argument(node, "bias") is None:
        flat, weight = operand(node), operand(node, 1)
    elif is_op(node, A.matmul.default) and is_op(operand(node, 1), *TRANSPOSES):
        flat, weight = operand(node), operand(operand(node, 1))
    else:
        return None
    if dtype_of(node) not in WIDE or tensor(weight).dim() != 2 or not is_op(flat, RMS_NORM.overload):
        return None
    source, factor, eps = flat.args[:3]
    if factor is not None or dtype_of(flat) != dtype_of(node):
        return None
    source = uncast(source)  # type: ignore[arg-type]
    if not is_op(source, *RESHAPES, A.flatten.using_ints):
        return None
    streams = operand(source)
    joined = width(streams)
    if joined is None or width(source) != joined * tensor(streams).shape[-2]:
        return None
    if not same_sizes(tensor(streams).shape[:-2], tensor(source).shape[:-1]):
        return None
    return uncast(streams), uncast(weight), float(eps)  # type: ignore[arg-type]


# -- sums over streams ------------------------------------------------------------------------------------------------


def collapsed(node: Node) -> Collapsed | str | None:
    """sum(streams * pre[..., None]) over streams, cast back to their dtype."""
    if not is_op(node, A.sum.dim_IntList) or tensor(operand(node)).dim() != 4:
        return None
    if [d % 4 for d in argument(node, "dim") or ()] != [2] or argument(node, "keepdim"):
        return None
    for streams, weights in products(operand(node)):
        pre = _unsqueezed(weights, -1)
        if pre is None or not same_sizes(tensor(pre).shape, tensor(streams).shape[:-1]) or not _fixed(streams):
            continue
        if dtype_of(operand(node)) not in WIDE or dtype_of(node) != dtype_of(operand(node)):
            return f"streams are summed in {dtype_of(operand(node))}, collapse_streams is wide"
        narrow = uncast(streams)
        end = _ending(node, dtype_of(narrow))
        return "the sum does not get the dtype of streams" if end is None else Collapsed(end, narrow, uncast(pre))
    return None


def joined(node: Node) -> Joined | str | None:
    """post[..., None] * y[..., None, :] + comb^T @ streams, found at the product, cast back to their dtype."""
    found = _combined(node)
    if found is None:
        return None
    comb, wide = found
    if dtype_of(node) not in WIDE or dtype_of(comb) != dtype_of(node):
        return f"streams are mixed in {dtype_of(node)}, join_streams is wide"
    narrow = uncast(wide)
    for total, term in ((u, t) for u in node.users for o, t in sums(u) if o is node):
        for left, right in products(term):
            post, y = _unsqueezed(left, -1), _unsqueezed(right, -2)
            if post is None or y is None or not _fits(wide, y, post, comb):
                continue
            if not dtype_of(total) == dtype_of(term) == dtype_of(node):
                return "streams and what is added to them differ in their dtype"
            end = _ending(total, dtype_of(narrow))
            if end is None:
                return "the sum does not get the dtype of streams"
            return Joined(end, narrow, uncast(y), uncast(post), comb)
    return "nothing that a sublayer returned is added to the mixed streams"


def _combined(node: Node) -> tuple[Node, Node] | None:
    """(comb, streams) of the sum over j of comb[..., j, k] * streams[..., j, :]."""
    if is_op(node, A.einsum.default):
        sides = operand(node).replace(" ", "").split("->")
        given = sides[0].split(",")
        if len(sides) != 2 or len(given) != 2 or not len(given[0]) == len(given[1]) > 1:
            return None
        (*lead, j, k), (*same, one, d) = given
        differ = len({*lead, j, k, d}) == len(lead) + 3
        plain = lead == same and one == j and sides[1] == "".join((*lead, k, d)) and differ
        comb, streams = list(operand(node, 1))
    elif is_op(node, A.matmul.default, A.bmm.default) and is_op(operand(node), A.transpose.int):
        comb, streams = operand(operand(node)), operand(node, 1)
        rank = tensor(comb).dim()
        plain = {int(d) % rank for d in operand(node).args[1:]} == {rank - 2, rank - 1}
    else:
        return None
    sizes = tensor(comb).shape[-2:]
    square = len(sizes) == 2 and isinstance(sizes[0], int) and sizes[0] == sizes[1]
    return (comb, streams) if plain and square and _fixed(streams) else None


def _fixed(streams: Node) -> bool:
    """Whether the number of streams and of channels is known."""
    return all(isinstance(n, int) for n in tensor(streams).shape[-2:])


def _fits(streams: Node, y: Node, post: Node, comb: Node) -> bool:
    *lead, count, channels = tensor(streams).shape
    wanted = ((y, (*lead, channels)), (post, (*lead, count)), (comb, (*lead, count, count)))
    return all(same_sizes(tensor(n).shape, shape) for n, shape in wanted)


def _unsqueezed(node: Node, dim: int) -> Node | None:
    """x of x with a dimension more at `dim`, counted from the right, through widening casts."""
    source = uncast(node)
    fits = is_op(source, A.unsqueeze.default) and int(argument(source, "dim")) % tensor(source).dim() == (
        tensor(source).dim() + dim
    )
    return operand(source) if fits else None


def _ending(node: Node, dtype: torch.dtype) -> Node | None:
    """The node itself where it has the dtype, else its one cast to it."""
    if dtype_of(node) == dtype:
        return node
    user = only_user(node)
    return user if user is not None and is_cast(user) and dtype_of(user) == dtype else None
