"""Take token positions from the input: row numbers are positions only while a batch is one sequence from its start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import NotRowwise
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import (
    Editor,
    argument,
    fake_mode_of,
    is_op,
    place_of,
    remove_dead,
    target_name,
    tensor,
    value,
)
from deepinfer_compile.match import equal_size, expr, operand
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program
from deepinfer_compile.skeleton import block_input, program_input, tokens_of

A = torch.ops.aten
ARANGES = (A.arange.default, A.arange.start, A.arange.start_step)
SHAPES = ("size", "shape", "sizes", "repeats")
"""Names of arguments that say how large a result is."""
SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


@register
@dataclass(frozen=True)
class BindPositions:
    """Replace positions that a model makes of row numbers by the input position_ids.

    Before: `p = arange(T)` and `t = slice(table, 0, 0, T)`, T the number of tokens and table made of weights alone
    After:  `p = select(position_ids, 0, 0)` and `t = index_select(table, 0, p)`
    Also with a fixed offset (`arange(2, T + 2)`), and for tables of any dimension, real or complex.
    Left alone: T as the size of a result, and slices to T of a dimension that is T long.
    Refused: every other use of T as a value (a length-dependent scale, the last row): packed requests would share it.
    """

    name: ClassVar[str] = "bind-positions"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.POSITIONS})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        constants = _constants(program)
        for name, gm in program.blocks.items():
            ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
            binder = _Binder(program, name, constants[name], ctx)
            for node in list(gm.graph.nodes):
                binder.bind(node)
            remove_dead(gm.graph)
            for node in gm.graph.nodes:
                _check_size(node, expr(tokens_of(program)))
        return program


class _Binder:
    """Rewrites one block; the positions enter it once, at its top."""

    def __init__(self, program: Program, block: str, constants: set[Node], ctx: PassContext) -> None:
        self.program, self.block, self.constants, self.ctx = program, block, constants, ctx
        self.tokens = tokens_of(program)
        self.rows: dict[int, Node] = {}

    def bind(self, node: Node) -> None:
        """Rewrite a node if it makes positions of row numbers."""
        if is_op(node, *ARANGES):
            offset = self._offset(argument(node, "start", 0), argument(node, "end"), argument(node, "step", 1))
            if offset is not None and self.ctx.claim(node, "row numbers are positions"):
                self._replace(node, self._positions(offset))
        elif is_op(node, A.slice.Tensor):
            self._bind_slice(node)

    def _bind_slice(self, node: Node) -> None:
        source, dim = operand(node), int(argument(node, "dim"))
        offset = self._offset(argument(node, "start") or 0, argument(node, "end"), argument(node, "step"))
        if offset is None:
            return
        if offset == 0 and equal_size(tensor(source).shape[dim], self.tokens):
            if self.ctx.claim(node, "a slice of all tokens changes nothing"):
                node.replace_all_uses_with(source)
        elif source in self.constants and self.ctx.claim(node, "the first rows of a table are those of the positions"):
            picked = Editor(node.graph, node).call(A.index_select.default, source, dim, self._positions(offset))
            self._replace(node, picked)

    def _offset(self, start: Any, end: Any, step: Any) -> int | None:
        """a of the range a .. T + a, None for any other range."""
        numbers = [value(x) if isinstance(x, Node) else x for x in (start, end)]
        if step != 1 or not isinstance(numbers[0], int) or not isinstance(numbers[1], torch.SymInt):
            return None
        return numbers[0] if equal_size(numbers[1] - numbers[0], self.tokens) else None

    def _positions(self, offset: int) -> Node:
        """i64[T] positions plus a number, made once a block."""
        if offset not in self.rows:
            graph = self.program.blocks[self.block].graph
            with fake_mode_of(graph):
                val = torch.empty(1, self.tokens, dtype=torch.int64)  # type: ignore[arg-type]
            hole = block_input(self.program, self.block, program_input(self.program, "position_ids", val))
            edit = Editor(graph, next(n for n in graph.nodes if n.op != "placeholder"))
            row = edit.call(A.select.int, hole, 0, 0) if tensor(hole).dim() == 2 else hole
            self.rows[offset] = edit.call(A.add.Tensor, row, offset) if offset else row
        return self.rows[offset]

    def _replace(self, node: Node, new: Node) -> None:
        if tensor(new).dtype != tensor(node).dtype:
            new = Editor(node.graph, node).call(A._to_copy.default, new, dtype=tensor(node).dtype)
        node.replace_all_uses_with(new)


def _check_size(node: Node, tokens: Any) -> None:
    """Refuse a use of a number that depends on T anywhere but in the shape of a result."""
    size = value(node)
    if not isinstance(size, SYMBOLIC) or tokens not in size.node.expr.free_symbols:
        return
    for user in node.users:
        if isinstance(value(user), SYMBOLIC) or _only_shapes(user, node):
            continue
        raise NotRowwise(
            node=user.name,
            target=target_name(user),
            reason="it uses the number of packed tokens as a value",
            where=place_of(user),
        )


def _only_shapes(user: Node, size: Node) -> bool:
    """Whether a call takes a number only as part of a shape."""
    schema = getattr(user.target, "_schema", None)
    if schema is None:
        return False
    for i, spec in enumerate(schema.arguments):
        held = user.args[i] if i < len(user.args) else user.kwargs.get(spec.name)
        if _holds(held, size) and spec.name not in SHAPES:
            return False
    return True


def _holds(arg: Any, node: Node) -> bool:
    return arg is node or (isinstance(arg, (list, tuple)) and any(a is node for a in arg))


def _constants(program: Program) -> dict[str, set[Node]]:
    """For every block, the nodes that are made of weights alone at every call of it."""
    known: dict[Node, Any] = {}
    found: dict[str, set[Node]] = {}
    for node in program.skeleton.graph.nodes:
        if node.op == "placeholder":
            known[node] = node.name in program.weights
        elif node.op == "call_module":
            name = str(node.target)
            gm = program.blocks[name]
            inner = _constants_of(gm, [known[a] for a in node.args])  # type: ignore[index]
            found[name] = found.get(name, inner) & inner
            out = operand(next(n for n in reversed(gm.graph.nodes) if n.op == "output"))
            known[node] = [o in inner for o in out] if isinstance(out, (tuple, list)) else out in inner
        elif node.op == "call_function":
            known[node] = known[operand(node)][operand(node, 1)]
    return found


def _constants_of(gm: GraphModule, given: list[bool]) -> set[Node]:
    """Nodes that depend on nothing but the inputs marked in `given`."""
    holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    held = {hole for hole, constant in zip(holes, given) if constant}
    for node in gm.graph.nodes:
        if node.op == "call_function" and all(n in held for n in node.all_input_nodes):
            held.add(node)
    return held
