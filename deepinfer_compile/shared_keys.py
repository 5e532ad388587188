"""Which attentions read keys and values that an earlier block made, so that one cache serves all of them.

Keys that cross a block boundary are told by the skeleton: an attention whose keys and values are inputs of its block
reads what some call gave. One cache is written where they are made and read by everyone. A block is one graph for all
its calls, so what it writes must be the same results at each of them; where it is not, each reader keeps a copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import ATTENTION, LATENT_ATTENTION, SELECTED_ATTENTION
from deepinfer_compile.program import Program

QUERIES = {ATTENTION.overload: ("q",), LATENT_ATTENTION.overload: ("q_nope", "q_rope")}
KEYS = {ATTENTION.overload: ("k", "v"), LATENT_ATTENTION.overload: ("c", "k_rope")}


@dataclass(frozen=True)
class Pair:
    """Two results of a block that are keys and values, by their places, and the window in which they are read."""

    keys: int
    values: int
    window: int


@dataclass(frozen=True)
class Source:
    """Keys and values as one call of a block makes them."""

    maker: Node
    pair: Pair


Sources = dict[Node, dict[Node, Source]]
"""Attention of a block -> each call of that block -> what it reads there."""


def attentions(gm: GraphModule) -> list[Node]:
    """The attentions of a block that read no cache yet, in order."""
    return [n for n in gm.graph.nodes if is_op(n, *QUERIES)]


def shared_sources(program: Program) -> Sources:
    """The attentions that can read a shared cache, with its source at every call of their block."""
    found: Sources = {}
    for name, gm in program.blocks.items():
        holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        calls = [c for c in program.calls() if c.target == name]
        for node in (n for n in attentions(gm) if is_op(n, ATTENTION.overload) and _could_be_cached(n)):
            at = [holes.index(k) for k in node.args[1:3] if k in holes]  # type: ignore[arg-type]
            sources = [_source(call, at, int(argument(node, "window"))) for call in calls] if len(at) == 2 else [None]
            if all(sources):
                found[node] = {c: s for c, s in zip(calls, sources) if s is not None}
    while wrong := [n for n, held in found.items() if not all(_is_uniform(program, s, found) for s in held.values())]:
        for node in wrong:
            del found[node]
    return found


def _could_be_cached(node: Node) -> bool:
    return argument(node, "mask") is None and bool(argument(node, "causal"))


def _source(call: Node, at: list[int], window: int) -> Source | None:
    """What makes the two arguments of a call at these places, if it is one block call."""
    made = [_maker(call.args[i]) for i in at]
    if made[0] is None or made[1] is None or made[0][0] is not made[1][0]:
        return None
    return Source(made[0][0], Pair(made[0][1], made[1][1], window))


def _maker(arg: object) -> tuple[Node, int] | None:
    """The block call that gives a skeleton value, and at which place."""
    call, place = (arg.args[0], arg.args[1]) if isinstance(arg, Node) and is_op(arg, operator.getitem) else (arg, 0)
    if not isinstance(call, Node) or call.op != "call_module" or not isinstance(place, int):
        return None
    return call, place


def _is_uniform(program: Program, source: Source, found: Sources) -> bool:
    """Whether all calls of the block that makes a source give keys and values at the same places."""
    calls = [c for c in program.calls() if c.target == source.maker.target]
    return len({frozenset(pairs_of(c, found)) for c in calls}) == 1


def pairs_of(maker: Node, found: Sources) -> list[Pair]:
    """The pairs that are read of what a call makes, in a fixed order."""
    read = {s.pair for held in found.values() for s in held.values() if s.maker is maker}
    return sorted(read, key=lambda p: (p.keys, p.values, p.window))


def may_share(program: Program) -> bool:
    """Whether some attention may have queries that come from further up than its keys do; a look at blocks alone."""
    for name, gm in program.blocks.items():
        holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
        if any(argument(n, "rows") in holes for n in gm.graph.nodes if is_op(n, SELECTED_ATTENTION.overload)):
            return True
        calls = [c for c in program.calls() if c.target == name]
        made = {h for i, h in enumerate(holes) if any(_maker(c.args[i]) is not None for c in calls)}
        marks = {*made, *attentions(gm)}
        for node in attentions(gm):
            queries, keys = (
                _before([argument(node, n) for n in names[node.target]]) & marks for names in (QUERIES, KEYS)
            )
            if queries - keys:
                return True
    return False


def _before(nodes: Iterable[Node]) -> set[Node]:
    """The nodes and all that they are made of."""
    left, found = list(nodes), set[Node]()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return found
