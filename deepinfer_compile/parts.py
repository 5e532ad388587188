"""The parts of a split program: how its skeleton is made of pieces of blocks, and each part as a program of its own.

A part computes some calls of the flat graph. Of every block it gets a block with those calls alone; pieces that are
equal as text are one block, so that a split program has no more blocks than layers of different kinds. Sizes are taken
from what a piece reads as rows: above the boundary a part may have fewer rows than there are tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.boundary import Sides
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import Editor, is_op, make_module, remove_dead, tensor, to_text, value
from deepinfer_compile.match import expr
from deepinfer_compile.ops import ATTENTION
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.skeleton import revalue

A = torch.ops.aten
PARTS = ("encoder", "boundary", "decoder")
MASK = 3
"""Position of an attention's mask among its operands."""


@dataclass(frozen=True)
class _Read:
    """A value that a piece takes from outside: a flat node, read for all tokens (`whole`) or for the part's rows."""

    node: Node
    whole: bool


@dataclass
class _Piece:
    """A block of one part, what it reads, and the flat nodes it gives."""

    gm: GraphModule
    reads: list[_Read]
    weights: list[Node]
    gives: list[Node]
    masked: bool


class Assembly:
    """Builds the skeleton and blocks of a split program, part after part."""

    def __init__(self, program: Program, sides: Sides) -> None:
        self.program, self.sides = program, sides
        self.graph = Graph()
        self.blocks: dict[str, GraphModule] = {}
        self.texts: dict[tuple[bool, str], str] = {}
        self.named: dict[str, str] = {}
        self.whole: dict[Node, Node] = {}
        self.rows: dict[Node, Node] = {}
        self.seen: Node | None = None
        """Of a decoder whose windows see some rows only: which ones, bool [T]."""
        self.holes = {n.name: n for n in sides.flat.graph.nodes if n.op == "placeholder"}
        for name, hole in self.holes.items():
            self.whole[hole] = self.graph.placeholder(name)
            self.whole[hole].meta = dict(hole.meta)
        self.tail = self.graph.output(())

    # -- parts --------------------------------------------------------------------------------------------------------

    def part(self, part: str) -> None:
        """Add the calls of a part. The decoder reads `rows`, which must hold what crosses."""
        nodes: frozenset[Node] = getattr(self.sides, part)
        env = self.rows if part == "decoder" else self.whole
        for call in self.program.calls():
            mine = [n for n in self.sides.flat.graph.nodes if n in nodes and self.sides.origins[n][0] is call]
            made = [n for n in mine if isinstance(value(n), (Tensor, tuple, list))]
            if not made or all(n in env for n in made):
                continue
            piece = self._piece(call, made, part)
            if piece.gives:
                self._add(call, piece, part, env)

    def _add(self, call: Node, piece: _Piece, part: str, env: dict[Node, Node]) -> None:
        block = self._block(piece.gm, str(call.target), part)
        args = [self.source(r, part) for r in piece.reads] + [self.whole[w] for w in piece.weights]
        if piece.masked and self.seen is not None:
            args.append(self.seen)
        outs = self.call(block, args, part, call.meta.get("layer"))
        env.update(zip(piece.gives, outs))

    def call(self, block: str, args: list[Node], part: str, layer: int | None = None) -> list[Node]:
        """Insert one block call at the end; returns a node per output."""
        with self.graph.inserting_before(self.tail):
            node = self.graph.call_module(block, tuple(args))
        vals = output_values(self.blocks[block])
        node.meta = {"val": vals[0] if len(vals) == 1 else tuple(vals), "layer": layer}
        self.named[node.name] = part
        if len(vals) == 1:
            return [node]
        return [Editor(self.graph, self.tail).item(node, i) for i in range(len(vals))]

    def source(self, read: _Read, part: str) -> Node:
        """The skeleton node of a value, as a part sees it."""
        env = self.whole if read.whole or part != "decoder" else self.rows
        if read.node not in env:
            raise UnsupportedConstruct(
                construct=f"the {part} reads {read.node.name}, which no part before it gives", fix="report the model"
            )
        return env[read.node]

    def _block(self, gm: GraphModule, wanted: str, part: str) -> str:
        """Name of the block with this text, added if new. Blocks of the decoder may have other sizes."""
        key = part == "decoder", to_text(gm)
        if key not in self.texts:
            name, number = wanted, 0
            while name in self.blocks:
                name = f"{wanted}_{part}" + (f"_{number}" if number else "")
                number += 1
            self.add_block(name, gm)
            self.texts[key] = name
        return self.texts[key]

    def add_block(self, name: str, gm: GraphModule) -> None:
        """Make a block known by a name."""
        self.blocks[name] = gm

    # -- pieces -------------------------------------------------------------------------------------------------------

    def _piece(self, call: Node, made: list[Node], part: str) -> _Piece:
        nodes: frozenset[Node] = getattr(self.sides, part)
        inside = set(made)
        gives = [n for n in made if self._is_taken(n, call, part, nodes)]
        reads, weights = self._outside(made, inside, part)
        graph, env = Graph(), dict[_Read, Node]()
        for i, read in enumerate(reads):
            env[read] = graph.placeholder(f"in{i}")
            env[read].meta = {"val": value(self.source(read, part))}
        short = {a.name: h for a, h in zip(call.args, _holes(self.program.blocks[str(call.target)]))}  # type: ignore[union-attr]
        for weight in weights:
            hole = short[weight.name]
            env[_Read(weight, False)] = graph.placeholder(hole.name)
            env[_Read(weight, False)].meta = dict(hole.meta)
        masked = self.seen is not None and part == "decoder" and any(map(self.is_window, made))
        seen = graph.placeholder("seen") if masked else None
        if seen is not None and self.seen is not None:
            seen.meta = {"val": value(self.seen)}
        out = graph.output(())
        self._copy(made, env, Editor(graph, out), seen)
        result = [env[_Read(n, False)] for n in gives]
        out.args = (result[0] if len(result) == 1 else tuple(result),)
        remove_dead(graph)
        gm = make_module(torch.nn.Module(), graph)
        if part == "decoder":
            revalue(gm)
        return _Piece(gm, reads, weights, gives, masked)

    def _is_taken(self, node: Node, call: Node, part: str, nodes: frozenset[Node]) -> bool:
        """Whether a node of a piece is read by another piece of its part, or leaves the part."""
        sides = self.sides
        out = next(n for n in reversed(sides.flat.graph.nodes) if n.op == "output")
        leaves = {"encoder": (*sides.crossing, *sides.globals), "boundary": sides.globals, "decoder": ()}[part]
        if node in leaves or out in node.users:
            return True
        return any(u in nodes and sides.origins[u][0] is not call for u in node.users if u.op == "call_function")

    def _outside(self, made: list[Node], inside: set[Node], part: str) -> tuple[list[_Read], list[Node]]:
        """What a piece reads: values in order of use, then weights."""
        reads: dict[_Read, None] = {}
        weights: dict[Node, None] = {}
        sized = False
        for node in made:
            for operand in node.all_input_nodes:
                if not isinstance(value(operand), (Tensor, tuple, list)):
                    sized = True
                elif operand.name in self.program.weights and operand.op == "placeholder":
                    weights[operand] = None
                elif operand not in inside or self._is_key(operand, node, part):
                    reads[_Read(operand, self._is_key(operand, node, part))] = None
        if sized and not any(not r.whole for r in reads):
            reads[self._ruler(part)] = None
        return list(reads), list(weights)

    def _ruler(self, part: str) -> _Read:
        """A value that a part has a row of for each of its rows."""
        if part != "decoder" or not self.sides.crossing:
            return _Read(self.holes["input_ids"], False)
        return _Read(self.sides.crossing[0], False)

    def _is_key(self, operand: Node, user: Node, part: str) -> bool:
        return part == "decoder" and (operand, user) in self.sides.whole

    def is_window(self, node: Node) -> bool:
        """Whether a node takes a mask of rows, or is one: attention over a window, or the mask of one."""
        mix = self.sides.mixing[node]
        return mix.sees is not None or (mix.kind == "window" and is_op(node, ATTENTION.overload))

    def _copy(self, made: list[Node], env: dict[_Read, Node], edit: Editor, seen: Node | None) -> None:
        """Copy flat calls under the names they have in their block."""
        rulers = [(r.node, hole) for r, hole in env.items() if not r.whole and "weight" not in hole.meta]
        sizes: dict[Node, Node] = {}

        def known(user: Node, operand: Node) -> Node:
            if not isinstance(value(operand), (Tensor, tuple, list)):
                if operand not in sizes:
                    sizes[operand] = _size(operand, rulers, edit)
                return sizes[operand]
            key = _Read(operand, True)
            return env[key] if key in env and (operand, user) in self.sides.whole else env[_Read(operand, False)]

        for node in made:
            args, kwargs = torch.fx.node.map_arg((_unsized(node), node.kwargs), partial(known, node))
            if seen is not None and is_op(node, ATTENTION.overload) and self.is_window(node):
                args = (*args[:MASK], seen, *args[MASK + 1 :])
            with edit.graph.inserting_before(edit.anchor):
                name = self.sides.origins[node][1].name
                copied = edit.graph.create_node(node.op, node.target, args, kwargs, name=name)
            copied.meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack", "stack_trace")}
            sees = self.sides.mixing[node].sees
            if seen is not None and sees is not None:
                behind = [1] * (tensor(node).dim() - 1 - sees)
                copied = edit.call(A.bitwise_and.Tensor, copied, edit.call(A.reshape.default, seen, [-1, *behind]))
            env[_Read(node, False)] = copied

    # -- the end ------------------------------------------------------------------------------------------------------

    def program_of(self, results: Iterable[Node], info: dict[str, Any]) -> Program:
        """The finished program, giving the flat graph's results."""
        given = [self.rows.get(r, self.whole.get(r)) for r in results]
        self.tail.args = (given[0] if len(given) == 1 else tuple(given),)
        remove_dead(self.graph)
        for node in [n for n in self.graph.nodes if n.name in self.program.weights and not n.users]:
            self.graph.erase_node(node)
        left = {n.name for n in self.graph.nodes if n.op == "placeholder"}
        weights = {name: ref for name, ref in self.program.weights.items() if name in left}
        parts = {c.name: self.named[c.name] for c in self.graph.nodes if c.op == "call_module"}
        used = {str(c.target) for c in self.graph.nodes if c.op == "call_module"}
        blocks = {name: gm for name, gm in self.blocks.items() if name in used}
        root = torch.nn.Module()
        for name, gm in blocks.items():
            root.add_module(name, gm)
        skeleton = make_module(root, self.graph)
        return replace(
            self.program,
            skeleton=skeleton,
            blocks=blocks,
            weights=weights,
            info={**self.program.info, "split": {**info, "parts": parts}},
        )


def _unsized(node: Node) -> tuple[Any, ...]:
    """Arguments of a call; of one that repeats a tensor, sizes that it has already are left to it: above the boundary
    the tokens that are read are more than those that read them."""
    if not is_op(node, A.expand.default):
        return node.args
    source, sizes = tensor(node.args[0]), list(node.args[1])  # type: ignore[arg-type]
    front = len(sizes) - source.dim()
    kept = (-1 if i >= front and isinstance(source.shape[i - front], torch.SymInt) else s for i, s in enumerate(sizes))
    return (node.args[0], list(kept), *node.args[2:])


def _holes(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _size(wanted: Node, rulers: list[tuple[Node, Node]], edit: Editor) -> Node:
    """A symbolic size of the flat graph, taken from a row value that has it, a part of it, or it but for a number."""
    size = expr(value(wanted))
    for source, hole in rulers:
        for dim, held in enumerate(value(source).shape):
            if not isinstance(held, torch.SymInt):
                continue
            factor, rest = size / expr(held), (size - expr(held)).simplify()
            if not factor.is_Integer and not rest.is_Integer:
                continue
            found = edit.call(A.sym_size.int, hole, dim)
            if factor.is_Integer:
                return found if factor == 1 else edit.call(operator.mul, found, int(factor))
            return edit.call(operator.add, found, int(rest))
    raise UnsupportedConstruct(construct=f"size {size} is of no value that a piece reads", fix="report the model")


def part_programs(program: Program) -> dict[str, Program]:
    """Each part of a split program as a program of its own.

    What a part reads of an earlier one is an input, named as in the whole; what it gives is in `info["gives"]`, by
    those names, in order.
    """
    named: dict[str, str] = program.info["split"]["parts"]
    return {part: _alone(program, part, named) for part in PARTS if part in named.values()}


def _alone(program: Program, part: str, named: dict[str, str]) -> Program:
    graph, env = Graph(), dict[Node, Node]()
    mine = [c for c in program.calls() if named[c.name] == part]
    items = {i for c in mine for i in c.users if is_op(i, operator.getitem)}
    inside = {*mine, *items}
    outside = dict.fromkeys(a for c in mine for a in c.all_input_nodes if a not in inside)
    order = {n: i for i, n in enumerate(program.skeleton.graph.nodes)}
    for node in sorted(outside, key=lambda n: (n.name in program.weights, order[n])):
        env[node] = graph.placeholder(node.name)
        env[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "weight")}
    for node in program.skeleton.graph.nodes:
        if node in inside:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    gives = [n for n in program.skeleton.graph.nodes if n in inside and any(u not in inside for u in n.users)]
    graph.output(env[gives[0]] if len(gives) == 1 else tuple(env[n] for n in gives))
    blocks = {name: gm for name, gm in program.blocks.items() if any(c.target == name for c in mine)}
    root = torch.nn.Module()
    for name, gm in blocks.items():
        root.add_module(name, gm)
    weights = {name: ref for name, ref in program.weights.items() if any(n.name == name for n in outside)}
    info = {**program.info, "gives": [n.name for n in gives]}
    return replace(program, name=part, skeleton=make_module(root, graph), blocks=blocks, weights=weights, info=info)
