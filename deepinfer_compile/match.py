"""Matching helpers of the raise and fuse passes: see through casts, operand orders and ways to take a part of a tensor.

Everything here only reads. A helper answers None (or nothing) where it is not sure, so that a pass which is built on
it misses a rewrite and never makes a wrong one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from deepinfer_compile.graph import argument, is_op, tensor, value

A = torch.ops.aten
RESHAPES = (A.reshape.default, A.view.default, A._unsafe_view.default)
CASTS = (A._to_copy.default, A.to.dtype, A.to.dtype_layout, A.to.device, A.type_as.default)


def is_tensor(arg: object) -> bool:
    """Whether an argument is a node that holds one tensor."""
    return isinstance(arg, Node) and isinstance(value(arg), Tensor)


def operand(node: Any, index: int = 0) -> Any:
    """Positional argument of a node."""
    return node.args[index]


def dtype_of(node: Node) -> torch.dtype:
    """Dtype of a tensor node."""
    return tensor(node).dtype


def width(node: Node) -> int | None:
    """Size of the last dimension, None if there is none or it is symbolic."""
    shape = tensor(node).shape
    return int(shape[-1]) if len(shape) and isinstance(shape[-1], int) else None


def is_last(node: Node, dim: int) -> bool:
    """Whether `dim` names the last dimension of a tensor node."""
    return dim in (-1, tensor(node).dim() - 1)


def expr(size: Any) -> Any:
    """A size as an integer or a symbolic expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else size


def equal_size(a: Any, b: Any) -> bool:
    """Whether two sizes are the same number or the same expression."""
    a, b = expr(a), expr(b)
    return bool(a == b) or (not isinstance(a - b, int) and bool((a - b).simplify() == 0))


def same_sizes(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether two shapes are equal, be they numbers or expressions."""
    return len(a) == len(b) and all(map(equal_size, a, b))


def same_shape(a: Node, b: Node) -> bool:
    """Whether two tensor nodes have equal (symbolic) shapes."""
    return same_sizes(tensor(a).shape, tensor(b).shape)


def is_cast(node: Any) -> bool:
    """Whether a node repeats its operand in another dtype."""
    return is_op(node, *CASTS) and is_tensor(node) and is_tensor(node.args[0])


def uncast(node: Node) -> Node:
    """What widening casts of a floating tensor were applied to: the same numbers in the dtype they came in."""
    while is_cast(node):
        source = operand(node)
        narrow, wide = dtype_of(source), dtype_of(node)
        # types of one byte have no common type with others, and hold what is stored, not what is computed
        if not narrow.is_floating_point or min(narrow.itemsize, wide.itemsize) < 2:
            break
        if torch.promote_types(narrow, wide) != wide:
            break
        node = source
    return node


def number(arg: object) -> float | None:
    """An argument that is a plain number."""
    return float(arg) if isinstance(arg, (int, float)) and not isinstance(arg, bool) else None


def orders(node: Any, *targets: object) -> tuple[tuple[Node, Node], ...]:
    """Both orders of the operands of a call of a commutative target on two tensors; nothing for any other node."""
    if not is_op(node, *targets) or len(node.args) < 2 or argument(node, "alpha", 1) != 1:
        return ()
    a, b = node.args[:2]
    return ((a, b), (b, a)) if is_tensor(a) and is_tensor(b) else ()


def products(node: Any) -> tuple[tuple[Node, Node], ...]:
    """Operand orders of a product of two tensors."""
    return orders(node, A.mul.Tensor)


def sums(node: Any) -> tuple[tuple[Node, Node], ...]:
    """Operand orders of an unscaled sum of two tensors."""
    return orders(node, A.add.Tensor)


def factors_of(node: Node) -> Iterator[tuple[Node, Node]]:
    """(product, other factor) for every product of a tensor with another."""
    for user in node.users:
        yield from ((user, other) for a, other in products(user) if a is node)


def terms_of(node: Node) -> Iterator[tuple[Node, Node]]:
    """(sum, other term) for every unscaled sum of a tensor with another."""
    for user in node.users:
        yield from ((user, other) for a, other in sums(user) if a is node)


def with_number(node: Any, *targets: object) -> tuple[Node, float] | None:
    """(tensor, number) of a call like add(x, 1e-5) or mul(x, 0.5)."""
    if not is_op(node, *targets) or len(node.args) < 2 or argument(node, "alpha", 1) != 1:
        return None
    held = number(node.args[1])
    return (node.args[0], held) if held is not None and is_tensor(node.args[0]) else None


def plus_number(node: Any) -> tuple[Node, float] | None:
    """(x, c) of x + c."""
    return with_number(node, A.add.Tensor, A.add.Scalar)


def times_number(node: Any) -> tuple[Node, float] | None:
    """(x, c) of x * c."""
    return with_number(node, A.mul.Tensor, A.mul.Scalar)


@dataclass(frozen=True)
class Part:
    """Elements start, start + step, ... before stop of the last dimension of `source`."""

    source: Node
    start: int
    stop: int
    step: int


def part(node: object) -> Part | None:
    """What part of the last dimension of another tensor a node is, however it was taken."""
    if not isinstance(node, Node):
        return None
    if is_op(node, A.slice.Tensor):
        return _sliced(node)
    if is_op(node, A.select.int):
        return _paired(node.args[0], argument(node, "dim"), argument(node, "index"))
    if node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem":
        return _split(node.args[0], node.args[1])
    return None


def _sliced(node: Node) -> Part | None:
    source: Any = node.args[0]
    size, start, stop = width(source), argument(node, "start") or 0, argument(node, "end")
    stop = sys.maxsize if stop is None else stop
    if (
        not is_last(source, argument(node, "dim"))
        or size is None
        or not isinstance(start, int)
        or not isinstance(stop, int)
    ):
        return None
    start, stop = (max(0, i + size) if i < 0 else min(i, size) for i in (start, stop))
    return Part(source, start, stop, argument(node, "step"))


def _paired(pairs: Any, dim: int, index: int) -> Part | None:
    """Element `index` of the last dimension of reshape(x, [..., D / 2, 2]): every second element of x."""
    if not is_op(pairs, *RESHAPES) or not is_last(pairs, dim) or width(pairs) != 2:
        return None
    source = pairs.args[0]
    before, after = tensor(source).shape, tensor(pairs).shape
    if len(after) != len(before) + 1 or not all(map(equal_size, before[:-1], after[:-2])):
        return None
    size = width(source)
    return None if size is None else Part(source, index % 2, size, 2)


def _split(pieces: Any, index: Any) -> Part | None:
    if not isinstance(index, int) or not is_op(
        pieces, A.split.Tensor, A.split_with_sizes.default, A.split.sizes, A.chunk.default, A.unbind.int
    ):
        return None
    source = pieces.args[0]
    if not is_last(source, argument(pieces, "dim")):
        return None
    if is_op(pieces, A.unbind.int):
        return _paired(source, -1, index)
    sizes = [v.shape[-1] for v in value(pieces)]
    start = sum(sizes[:index])
    return Part(source, start, start + sizes[index], 1)


def halves(first: Part, second: Part) -> bool:
    """Whether two parts are the lower and the upper half of all of one tensor."""
    size = width(first.source)
    whole = first.source is second.source and (first.start, second.stop) == (0, size)
    return (
        whole
        and first.stop == second.start == second.stop // 2
        and first.step == second.step == 1
        and size == 2 * first.stop
    )


def alternating(first: Part, second: Part) -> bool:
    """Whether two parts are the even and the odd elements of all of one tensor."""
    size = width(first.source)
    if first.source is not second.source or size is None or size % 2:
        return False
    return (
        (first.start, first.step, second.start, second.step) == (0, 2, 1, 2)
        and first.stop >= size - 1
        and second.stop == size
    )


def alike(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two arguments are equal by construction: one node, or equal calls of pure ops on alike arguments."""
    if isinstance(a, Node) and isinstance(b, Node):
        if a is b:
            return True
        if depth == 0 or a.op != "call_function" or a.target is not b.target or a.kwargs != b.kwargs:
            return False
        pure = torch.Tag.nondeterministic_seeded not in getattr(a.target, "tags", ())
        return pure and len(a.args) == len(b.args) and all(alike(x, y, depth - 1) for x, y in zip(a.args, b.args))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(alike(x, y, depth) for x, y in zip(a, b))
    return type(a) is type(b) and bool(a == b)


def after(node: Node) -> Node:
    """The first node before which something computed from `node` may be inserted."""
    node = node.next
    while node.op == "placeholder":
        node = node.next
    return node


def order_of(graph: Graph) -> dict[Node, int]:
    """Place of every node in its graph."""
    return {node: i for i, node in enumerate(graph.nodes)}
