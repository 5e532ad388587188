"""Make the output projection read only the rows whose logits are wanted, whether or not the model chose them itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, target_name, tensor
from deepinfer_compile.match import equal_size, is_cast, is_tensor, operand
from deepinfer_compile.ops import OUTPUT_PROJECTION
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program
from deepinfer_compile.skeleton import block_input, fresh, program_input, revalue, revalue_calls, tokens_of

A = torch.ops.aten
TRANSPOSES = (A.t.default, A.transpose.int, A.permute.default, A.numpy_T.default)
EXAMPLE_ROWS = 3


@dataclass(frozen=True)
class _Final:
    """The end of the graph: what the linear reads, its weight, and the row selection on either side of it."""

    node: Node
    weight: Node
    bias: Node | None
    before: Node | None
    behind: Node | None


@register
@dataclass(frozen=True)
class RaiseOutputProjection:
    """Replace row selection and final linear by deepinfer::output_projection.

    Before: `linear(index(x[1,T,H], [None, rows]), w)`, or `linear(x[1,T,H], w)` in a model that gives all logits
    After:  `output_projection(x, rows, w, None)`
    Where the model selects nothing, the program gets the input `rows` i64[N] and the output becomes [N, V]. Softcap,
    scale and casts after the linear stay as they are, on N rows; a batch dimension of one is dropped.
    Left alone: a selection further in front of the linear, which saves more, and programs with several results. Where
    the result comes of no linear, the rows are selected from the finished logits.
    """

    name: ClassVar[str] = "raise-output-projection"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        call = operand(_output(program.skeleton))
        if not isinstance(call, Node) or call.op != "call_module":
            ctx.graph = "skeleton"
            ctx.miss(_output(program.skeleton), "the program's result is not the one output of a block")
            return program
        name = str(call.target)
        ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
        gm = program.blocks[name]
        if _on_wanted_rows(program, name, ctx) or _batched(gm, ctx):
            revalue(gm)
            _drop_batch(gm)
            revalue_calls(program, name)
        return program


def _on_wanted_rows(program: Program, name: str, ctx: PassContext) -> bool:
    """Rewrite the end of a block; whether it changed."""
    result = operand(_output(program.blocks[name]))
    found = _final(result)
    if isinstance(found, _Final):
        if not (found.before or found.behind or _over_tokens(program, operand(found.node))):
            ctx.miss(found.node, "the rows are selected before other work on them")
            return False
        return ctx.claim(found.node, "final linear on the wanted rows") and _project(program, name, found)
    if found:
        ctx.miss(result, found)
    if not found or not _over_tokens(program, result) or not ctx.claim(result, "wanted rows of finished logits"):
        return False
    out = _output(program.blocks[name])
    out.args = (Editor(out.graph, out).call(A.index_select.default, result, -2, _rows(program, name)),)
    return True


def _batched(gm: GraphModule, ctx: PassContext) -> bool:
    """Whether a result that is on the wanted rows already has a batch dimension to drop."""
    result = operand(_output(gm))
    return tensor(result).dim() == 3 and ctx.claim(result, "one sequence has no batch dimension")


def _output(gm: GraphModule) -> Node:
    node: Node = next(n for n in reversed(gm.graph.nodes) if n.op == "output")
    return node


def _over_tokens(program: Program, node: Node) -> bool:
    shape = tensor(node).shape
    return len(shape) >= 2 and equal_size(shape[-2], tokens_of(program))


def _final(node: Node) -> _Final | str:
    """The final linear above a result; words if there is none; nothing if it is raised already."""
    behind: Node | None = None
    while not is_op(node, A.linear.default, A.matmul.default, A.mm.default):
        if is_op(node, OUTPUT_PROJECTION.overload):
            return ""
        if _selection(node) is not None and behind is None:
            behind = node
        elif not _rowwise_tail(node):
            return f"the result comes of {target_name(node)}, not of a linear"
        node = operand(node)
    weight, bias = operand(node, 1), argument(node, "bias")
    if not is_op(node, A.linear.default):
        if not is_op(weight, *TRANSPOSES) or tensor(weight).dim() != 2:
            return "the result comes of a product with a matrix that is not a transposed weight"
        weight = operand(weight)
    before = operand(node) if _selection(operand(node)) is not None else None
    return _Final(node, weight, bias, before, behind)


def _rowwise_tail(node: Node) -> bool:
    """Whether a node only scales, caps or casts logits, or drops the batch dimension."""
    if node.op != "call_function" or not is_tensor(node) or not node.args or not is_tensor(operand(node)):
        return False
    if is_op(node, A.select.int, A.squeeze.dim):
        return int(argument(node, "dim")) == 0 and tensor(operand(node)).dim() == 3
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    return len(node.all_input_nodes) == 1 and (pointwise or is_cast(node))


def _selection(node: Node) -> Node | None:
    """The indices with which a node picks rows of its operand's second dimension from the right."""
    if is_op(node, A.index.Tensor):
        dim = tensor(operand(node)).dim() - 2
        *front, last = operand(node, 1)
        return last if len(front) == dim and not any(front) and is_tensor(last) and tensor(last).dim() == 1 else None
    if is_op(node, A.index_select.default) and argument(node, "dim") in (-2, tensor(operand(node)).dim() - 2):
        return operand(node, 2)  # type: ignore[no-any-return]
    return None


def _project(program: Program, block: str, found: _Final) -> bool:
    """Put the op in place of the linear, and take away the selection that it does itself."""
    x, chosen = operand(found.node), found.before or found.behind
    if found.before is not None:
        x = operand(found.before)
    rows = _selection(chosen) if chosen is not None else _rows(program, block)
    edit = Editor(found.node.graph, found.node)
    edit.replace(found.node, edit.call(OUTPUT_PROJECTION.overload, x, rows, found.weight, found.bias))
    if found.behind is not None and found.before is None:
        edit.replace(found.behind, operand(found.behind))
    return True


def _rows(program: Program, block: str) -> Node:
    """The block's input for the indices of wanted rows."""
    source = program_input(program, "rows", fresh(program, "rows", (EXAMPLE_ROWS,), torch.int64, (0,)))
    return block_input(program, block, source)


def _drop_batch(gm: GraphModule) -> None:
    """[1, N, V] -> [N, V] at the end of the graph."""
    out = _output(gm)
    result = operand(out)
    if tensor(result).dim() == 3:
        out.args = (Editor(gm.graph, out).call(A.select.int, result, 0, 0),)
