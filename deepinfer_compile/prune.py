"""Drop what crosses block boundaries for nothing: inputs that a block does not read, outputs that nobody takes."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from deepinfer_compile.graph import is_op, remove_dead
from deepinfer_compile.program import Program


def prune(program: Program) -> None:
    """Remove unread block inputs, untaken block outputs and unread weights, until nothing is left to remove."""
    changed = True
    while changed:
        remove_dead(program.skeleton.graph)
        changed = False
        for name, gm in program.blocks.items():
            remove_dead(gm.graph)
            changed |= _drop_inputs(program, name)
            changed |= _drop_outputs(program, name)
    for node in [n for n in program.skeleton.graph.nodes if n.name in program.weights and not n.users]:
        program.weights.pop(node.name)
        program.skeleton.graph.erase_node(node)


def _calls(program: Program, block: str) -> list[Node]:
    return [c for c in program.calls() if c.target == block]


def _drop_inputs(program: Program, block: str) -> bool:
    graph = program.blocks[block].graph
    holes = [n for n in graph.nodes if n.op == "placeholder"]
    kept = [i for i, hole in enumerate(holes) if hole.users]
    if len(kept) == len(holes):
        return False
    for call in _calls(program, block):
        call.args = tuple(call.args[i] for i in kept)
    for i in set(range(len(holes))) - set(kept):
        graph.erase_node(holes[i])
    return True


def _drop_outputs(program: Program, block: str) -> bool:
    out = next(n for n in reversed(program.blocks[block].graph.nodes) if n.op == "output")
    made: Any = out.args[0]
    calls = _calls(program, block)
    items = [u for c in calls for u in c.users]
    if not isinstance(made, (tuple, list)) or not items or not all(is_op(u, operator.getitem) for u in items):
        return False
    kept = sorted({int(u.args[1]) for u in items})  # type: ignore[arg-type]
    if len(kept) == len(made):
        return False
    out.args = (made[kept[0]] if len(kept) == 1 else tuple(made[i] for i in kept),)
    for call in calls:
        vals = call.meta["val"]
        call.meta["val"] = vals[kept[0]] if len(kept) == 1 else tuple(vals[i] for i in kept)
        for item in list(call.users):
            if len(kept) == 1:
                item.replace_all_uses_with(call)
                program.skeleton.graph.erase_node(item)
            else:
                item.args = (call, kept.index(item.args[1]))  # type: ignore[arg-type]
    return True
