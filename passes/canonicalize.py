"""Bring captured graphs to one spelling, so that later passes match meaning and not habit."""

from __future__ import annotations

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
    """Remove assertions, copies and no-op views; write every reshape with -1 for its symbolic dimension.

    Before: `_assert_tensor_metadata(x); y = clone(x); z = view(y, [1, %sym_size, -1, 16]); w = to(z, f32)` (z is f32)
    After:  `z = reshape(x, [1, -1, 6, 16])`
    Left alone: dropout in training mode and reshapes with two symbolic dimensions.
    """

    name: ClassVar[str] = "canonicalize"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.SHAPES, Fact.FUNCTIONAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if node.op != "call_function":
                continue
            if "assert" in str(node.target):
                gm.graph.erase_node(node)
            elif (source := _identity_source(node)) is not None:
                if ctx.claim(node, "changes nothing"):
                    node.replace_all_uses_with(source)
            elif is_op(node, *VIEWS):
                _rewrite_view(node, ctx)
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
    if is_op(node, *IDENTITY):
        return source
    if is_op(node, A._to_copy.default, A.to.dtype, A.to.dtype_layout, A.to.device, A.type_as.default):
        return source
    if is_op(node, A.slice.Tensor) and argument(node, "step") == 1:
        start, end = argument(node, "start"), argument(node, "end")
        return source if (start or 0) == 0 and (end is None or end == sys.maxsize) else None
    return source if is_op(node, A.expand.default, *VIEWS) else None


def _rewrite_view(node: Node, ctx: PassContext) -> None:
    """Every reshape as aten.reshape with numbers, and -1 for the one dimension that is symbolic."""
    shape = tensor(node).shape
    symbolic = [i for i, d in enumerate(shape) if not isinstance(d, int)]
    if len(symbolic) > 1:
        ctx.miss(node, f"{len(symbolic)} dimensions are symbolic")
        return
    wanted = [d if isinstance(d, int) else -1 for d in shape]
    if is_op(node, A.reshape.default) and list(argument(node, "shape")) == wanted:
        return
    if ctx.claim(node, "one spelling of reshape"):
        new = Editor(node.graph, node).call(A.reshape.default, node.args[0], wanted)
        node.replace_all_uses_with(new)


def _pin_device(node: Node) -> None:
    """Graphs name no device but the one the program runs on, which is the executor's business."""
    if not any(isinstance(a, torch.device) for a in (*node.args, *node.kwargs.values())):
        return
    swap: dict[Any, Any] = {torch.device("meta"): torch.device("cpu")}
    node.args = tuple(swap.get(a, a) if isinstance(a, torch.device) else a for a in node.args)
    node.kwargs = {k: swap.get(v, v) if isinstance(v, torch.device) else v for k, v in node.kwargs.items()}
    node.meta["val"] = evaluate(node.target, node.args, node.kwargs, fake_mode_of(node.graph))  # type: ignore[arg-type]
