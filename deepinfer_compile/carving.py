"""Cut a block in pieces at one of its nodes, so that what runs there can be a block of its own.

Before the node goes what it needs, and every write to a cache that does not need it; after it what needs it; beside it
the rest, which can run while the node waits for something. A skeleton then calls the pieces in place of the block.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.graph import is_op, make_module, value, writes
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.skeleton import outputs_of

Key = Any
"""What a piece reads or gives: a node of the block that was cut, or a name."""


@dataclass(frozen=True)
class Piece:
    """A block to be called. reads, gives: what its inputs and outputs are, in order."""

    name: str
    gm: GraphModule
    reads: tuple[Key, ...]
    gives: tuple[Key, ...]


def cut(gm: GraphModule, at: Node, name: str, reads: Sequence[Node]) -> tuple[Piece | None, Piece | None, Piece | None]:
    """The pieces of a block before, beside and after a call that gives one tensor; None where nothing is left.

    reads: what is needed of the block where `at` was.
    """
    parts = _parts(gm, at)
    results = outputs_of(gm)
    wanted = [*reads, *results]
    made: list[Piece | None] = []
    for part in ("after", "beside", "before"):
        inside = [n for n in gm.graph.nodes if parts.get(n) == part]
        piece = _piece(inside, wanted, f"{name}_{part}") if inside else None
        wanted += piece.reads if piece is not None else ()
        made.append(piece)
    after, beside, before = made
    return before, beside, after


def _parts(gm: GraphModule, at: Node) -> dict[Node, str]:
    """Where each call of a block goes."""
    above = _closure(at.all_input_nodes, lambda n: n.all_input_nodes)
    below = _closure(list(at.users), lambda n: list(n.users))
    calls = [n for n in gm.graph.nodes if n.op == "call_function" and n is not at]
    early = [n for n in calls if writes(n) and n not in below]
    above |= _closure(early, lambda n: n.all_input_nodes)
    parts = {n: "after" if n in below else "before" if n in above else "beside" for n in calls}
    for node in calls:  # an item is where what it is taken from is
        if is_op(node, operator.getitem):
            parts[node] = parts.get(node.args[0], parts[node])  # type: ignore[arg-type]
    return parts


def _closure(first: Iterable[Node], following: Any) -> set[Node]:
    found: set[Node] = set()
    left = list(first)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(following(node))
    return found


def _piece(inside: list[Node], wanted: list[Node], name: str) -> Piece:
    """A block of some calls that gives those of the wanted values that it makes. Sizes are computed again inside."""
    order = {n: i for i, n in enumerate(inside[0].graph.nodes)}
    body, reads = set(inside), set[Node]()
    left = [o for n in inside for o in n.all_input_nodes]
    while left:
        node = left.pop()
        if node in body or node in reads:
            continue
        if node.op == "placeholder" or isinstance(value(node), Tensor):
            reads.add(node)
        else:
            body.add(node)
            left.extend(node.all_input_nodes)
    gives = tuple(dict.fromkeys(n for n in wanted if n in inside))
    graph, env = Graph(), dict[Node, Node]()
    for node in (*sorted(reads, key=order.__getitem__), *sorted(body, key=order.__getitem__)):
        env[node] = graph.placeholder(node.name) if node in reads else graph.node_copy(node, lambda n: env[n])
        env[node].meta = dict(node.meta) if node in body or node.op == "placeholder" else {"val": value(node)}
    made = [env[n] for n in gives]
    graph.output(made[0] if len(made) == 1 else tuple(made))
    gm = make_module(torch.nn.Module(), graph)
    return Piece(name, gm, tuple(sorted(reads, key=order.__getitem__)), gives)


def replace_block(
    program: Program, block: str, pieces: Sequence[Piece], extra: Mapping[Node, Mapping[Key, Node]]
) -> dict[str, list[str]]:
    """Call the pieces, in order, wherever the block was called; the names of new calls by that of the old one.

    extra: for each call, skeleton nodes by name.
    """
    called: dict[str, list[str]] = {}
    gm = program.blocks.pop(block)
    delattr(program.skeleton, block)
    for piece in pieces:
        program.blocks[piece.name] = piece.gm
        program.skeleton.add_module(piece.name, piece.gm)
    holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    for call in [c for c in program.skeleton.graph.nodes if c.op == "call_module" and c.target == block]:
        env: dict[Key, Any] = {**dict(zip(holes, call.args)), **extra[call]}
        called[call.name] = []
        for piece in pieces:
            made, given = _call(program, call, piece, [env[r] for r in piece.reads])
            called[call.name].append(made.name)
            env.update(zip(piece.gives, given, strict=True))
        _replace_call(call, [env[o] for o in outputs_of(gm)])
    return called


def _call(program: Program, before: Node, piece: Piece, args: list[Any]) -> tuple[Node, list[Node]]:
    """Call a piece; the call, and the skeleton nodes of what it gives."""
    graph, vals = program.skeleton.graph, output_values(piece.gm)
    with graph.inserting_before(before):
        call: Node = graph.call_module(piece.name, tuple(args))
        call.meta = {**before.meta, "val": vals[0] if len(vals) == 1 else tuple(vals)}
        if len(vals) == 1:
            return call, [call]
        items: list[Node] = []
        for i, val in enumerate(vals):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = {"val": val}
            items.append(item)
        return call, items


def _replace_call(call: Node, made: list[Node]) -> None:
    """Give all uses of what a call gave to `made`."""
    if not isinstance(value(call), (tuple, list)):
        call.replace_all_uses_with(made[0])
    for item in list(call.users):
        item.replace_all_uses_with(made[int(item.args[1])])  # type: ignore[arg-type]
        call.graph.erase_node(item)
    call.graph.erase_node(call)


__all__ = ["Key", "Piece", "cut", "replace_block"]
