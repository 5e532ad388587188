"""Give some calls at the end of a program fewer rows: what they read goes through one new block that picks rows."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.graph import Editor, copy_module, fake_mode_of, is_op, make_module, remove_dead, value, writes
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.prune import prune
from deepinfer_compile.skeleton import item_of, revalue

SELECT = "select"
METAS = ("query_start", "seq_len")

Made = Mapping[object, Node]
"""What the new block gives, by the skeleton node that it stands in for, or by any other key."""


def needed_by(program: Program, calls: list[Node], targets: Iterable[object] = ()) -> set[Node]:
    """The calls that write caches (with one of these operations, if any are named), and those that they need."""
    wanted = set(targets)
    left = [
        c
        for c in calls
        if any(writes(n) and (not wanted or n.target in wanted) for n in program.blocks[str(c.target)].graph.nodes)
    ]
    found: set[Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return {c for c in calls if c in found}


def move_to_end(program: Program, calls: list[Node]) -> list[Node]:
    """Put calls, which nothing else reads, behind all others; returns what they read from outside, each once."""
    inside = {*calls, *(u for c in calls for u in c.users if is_op(u, operator.getitem))}
    outside = dict.fromkeys(a for c in calls for a in c.args if isinstance(a, Node) and a not in inside)
    for node in [n for n in program.skeleton.graph.nodes if n in inside]:
        program.skeleton.graph.output_node().prepend(node)
    return list(outside)


def insert_select(
    program: Program, calls: list[Node], args: list[Node], make: Callable[[Editor, Mapping[Node, Node]], Made]
) -> tuple[Node, dict[object, Node]]:
    """Call a new block in front of `calls` on skeleton nodes; `make` builds what it gives of its inputs.

    The calls read what stands in for their arguments. Returns the call, and the skeleton node of each thing made.
    """
    graph = Graph()
    holes = {a: graph.placeholder(a.name) for a in args}
    for arg, hole in holes.items():
        hole.meta = {"val": value(arg)}
    out = graph.output(())
    edit = Editor(graph, out)
    edit.mode = fake_mode_of(program.skeleton.graph)
    made = make(edit, holes)
    out.args = (tuple(made.values()),)
    program.blocks[SELECT] = make_module(torch.nn.Module(), graph)
    program.skeleton.add_module(SELECT, program.blocks[SELECT])
    with program.skeleton.graph.inserting_before(calls[0]):
        call: Node = program.skeleton.graph.call_module(SELECT, tuple(args))
    call.meta = {"val": tuple(output_values(program.blocks[SELECT])), "layer": None}
    given = {key: item_of(call, i) for i, key in enumerate(made)}
    for reader in calls:
        reader.args = tuple(given.get(a, a) for a in reader.args)  # type: ignore[arg-type]
    return call, given


def renew(program: Program, calls: list[Node], edit: Callable[[Node, GraphModule], None]) -> None:
    """Record what the blocks of calls take and give now. `edit` may rewrite a block, once, given one of its calls; a
    block that other calls keep as it is is copied first."""
    kept = {str(c.target) for c in program.calls() if c not in calls}
    renewed: dict[str, str] = {}
    for call in calls:
        if call.target not in renewed:
            renewed[str(call.target)] = _renewed(program, call, edit, copied=call.target in kept)
        call.target = renewed[str(call.target)]
        vals = output_values(program.blocks[call.target])
        call.meta["val"] = tuple(vals) if isinstance(value(call), (tuple, list)) else vals[0]
        for item in (u for u in call.users if is_op(u, operator.getitem)):
            item.meta["val"] = vals[item.args[1]]  # type: ignore[index]
    prune(program)


def _renewed(program: Program, call: Node, edit: Callable[[Node, GraphModule], None], copied: bool) -> str:
    """Renew a block for what a call gives it, or a copy of it; returns its name."""
    name = f"{call.target}_rows" if copied else str(call.target)
    if copied:
        program.blocks[name] = copy_module(program.blocks[str(call.target)])
        program.skeleton.add_module(name, program.blocks[name])
    gm = program.blocks[name]
    edit(call, gm)
    remove_dead(gm.graph)
    for hole, arg in zip((n for n in gm.graph.nodes if n.op == "placeholder"), call.args):
        hole.meta["val"] = value(arg)  # type: ignore[arg-type]
    revalue(gm)
    return name
