"""Bring captured graphs to one spelling, so that later passes match meaning and not habit."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, evaluate, fake_mode_of, is_op, tensor, value
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.verify import same

A = torch.ops.aten
IDENTITY = (
    A.alias.default,
    A.detach.default,
    A.lift_fresh_copy.default,
    A.dropout.default,
    A.contiguous.default,
    A.clone.default,
)
VIEWS = (A.view.default, A.reshape.default, A._unsafe_view.default)


@register
@dataclass(frozen=True)
class Canonicalize:
    """Remove assertions, copies, no-op views, factors of 1 and guards against ids that a top-k never gives; write every
    reshape once and with -1 for its symbolic dimension, if it has one.

    Before: `_assert_tensor_metadata(x); y = clone(x); z = view(y, [1, %sym_size, -1, 16]); w = to(z, f32)` (z is f32)
    After:  `z = reshape(x, [1, -1, 6, 16])`
    Left alone: dropout in training mode.
    """

    name: ClassVar[str] = "canonicalize"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.SHAPES, Fact.FUNCTIONAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        views: dict[object, Node] = {}
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if "assert" in str(node.target):
                gm.graph.erase_node(node)
            elif (source := _identity_source(node)) is not None:
                if ctx.claim(node, "changes nothing"):
                    node.replace_all_uses_with(source)
            elif _guards_nothing(node):
                if ctx.claim(node, "ids of a top-k are below its width"):
                    node.replace_all_uses_with(node.args[0])
            elif is_op(node, *VIEWS):
                _rewrite_view(node, views, ctx)
            else:
                _pin_device(node)


def _identity_source(node: Node) -> Node | None:
    """The operand that `node` only repeats, or None."""
    if not node.args or not isinstance(node.args[0], Node) or not isinstance(value(node), Tensor):
        return None
    source = node.args[0]
    if not isinstance(value(source), Tensor) or not same(value(source), value(node)):
        return None
    if is_op(node, A.dropout.default) and node.args[2]:
        return None
    if is_op(node, *IDENTITY) or _by_one(node):
        return source
    if is_op(node, A._to_copy.default, A.to.dtype, A.to.dtype_layout, A.to.device, A.type_as.default):
        return source
    if is_op(node, A.slice.Tensor) and argument(node, "step") == 1:
        start, end = argument(node, "start"), argument(node, "end")
        return source if (start or 0) == 0 and (end is None or end == sys.maxsize) else None
    return source if is_op(node, A.expand.default, *VIEWS) else None


def _by_one(node: Node) -> bool:
    """Whether a node multiplies with 1 or divides by it. A quotient that is rounded is the number only if whole."""
    whole = is_op(node, A.floor_divide.default) and not tensor(node).is_floating_point()
    if not whole and not is_op(node, A.mul.Tensor, A.div.Tensor):
        return False
    return isinstance(node.args[1], (int, float)) and node.args[1] == 1


def _guards_nothing(node: Node) -> bool:
    """Whether `node` guards against ids of a top-k over `width` that are `width` or more: there are none.

    Models that can be partitioned mark rows of other ranks with such ids, mask the rows (masked_fill with `ids >= E`)
    and clamp the ids (to E - 1).
    """
    if is_op(node, A.clamp.default):
        width, low, high = _top_k_width(node.args[0]), argument(node, "min"), argument(node, "max")
        return width is not None and (low is None or low <= 0) and (high is None or high >= width - 1)
    if not is_op(node, A.masked_fill.Scalar) or not isinstance(node.args[1], Node):
        return False
    test = _through(node.args[1], (A.unsqueeze.default, A.expand.default, *VIEWS))
    width = _top_k_width(test.args[0]) if is_op(test, A.ge.Scalar) else None
    bound = test.args[1] if width is not None else None
    return isinstance(bound, (int, float)) and width is not None and width <= bound


def _top_k_width(ids: Any) -> int | None:
    """The number of scores from which a top-k took these ids, sorted or not; None if they come from elsewhere."""
    while isinstance(ids, Node):
        ids = _through(ids, (*VIEWS, A.clone.default, A.contiguous.default))
        if not is_op(ids, operator.getitem) or not isinstance(ids.args[0], Node):
            return None
        source, index = ids.args
        if is_op(source, A.topk.default) and index == 1:
            dim = argument(source, "dim")
            width = tensor(source.args[0]).shape[-1 if dim is None else dim]
            return width if isinstance(width, int) else None
        ids = source.args[0] if is_op(source, A.sort.default, A.sort.stable) and index == 0 else None
    return None


def _through(node: Node, views: tuple[Any, ...]) -> Node:
    """What `node` shows in another shape."""
    while is_op(node, *views) and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


def _rewrite_view(node: Node, views: dict[object, Node], ctx: PassContext) -> None:
    """Every reshape as aten.reshape with numbers, and -1 for the one dimension that is symbolic.

    views: those seen, by what they reshape to what. A functional trace makes a view again after each write.
    """
    shape = tensor(node).shape
    symbolic = [i for i, d in enumerate(shape) if not isinstance(d, int)]
    wanted: list[Any] = [d if isinstance(d, int) else -1 for d in shape]
    if len(symbolic) > 1 or 0 in wanted:  # only one can be -1, and not beside a 0
        wanted = list(node.args[1])  # type: ignore[arg-type]
    new, key = node, (node.args[0], tuple(wanted))
    if key in views:
        if ctx.claim(node, "the same reshape again"):
            node.replace_all_uses_with(views[key])
        return
    if not is_op(node, A.reshape.default) or list(argument(node, "shape")) != wanted:
        if not ctx.claim(node, "one spelling of reshape"):
            return
        new = Editor(node.graph, node).call(A.reshape.default, node.args[0], wanted)
        node.replace_all_uses_with(new)
    views[key] = new


def _pin_device(node: Node) -> None:
    """Graphs name no device but the one the program runs on, which is the executor's business."""
    if not any(isinstance(a, torch.device) for a in (*node.args, *node.kwargs.values())):
        return
    swap: dict[Any, Any] = {torch.device("meta"): torch.device("cpu")}
    node.args = tuple(swap.get(a, a) if isinstance(a, torch.device) else a for a in node.args)
    node.kwargs = {k: swap.get(v, v) if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    node.meta["val"] = evaluate(node.target, node.args, node.kwargs, fake_mode_of(node.graph))  # type: ignore[arg-type]
