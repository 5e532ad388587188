"""Edits that cross block boundaries: new program inputs, handed on to blocks, and shapes that change after an edit."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

from deepinfer_compile.graph import evaluate, fake_mode_of, is_evaluated, is_op, set_evaluated, tensor
from deepinfer_compile.program import Program, output_values


def tokens_of(program: Program) -> torch.SymInt:
    """The token dimension T, as `input_ids` [1, T] has it."""
    size: Any = tensor(next(n for n in program.inputs() if n.name == "input_ids")).shape[1]
    return size  # type: ignore[no-any-return]


def fresh(program: Program, name: str, shape: tuple[int, ...], dtype: torch.dtype, dynamic: tuple[int, ...]) -> Tensor:
    """A fake tensor of the program whose `dynamic` dimensions are new symbols (shape gives an example of them)."""
    sizes = [DimDynamic.DYNAMIC if i in dynamic else DimDynamic.STATIC for i in range(len(shape))]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    mode = fake_mode_of(program.skeleton.graph)
    source = ConstantSource(f"input_{name}")
    return mode.from_tensor(torch.empty(shape, dtype=dtype), symbolic_context=context, source=source)


def program_input(program: Program, name: str, val: Tensor) -> Node:
    """The skeleton input of that name, made with the fake value `val` if it is not there."""
    holes = [n for n in program.skeleton.graph.nodes if n.op == "placeholder"]
    found: Node | None = next((n for n in holes if n.name == name), None)
    if found is not None:
        return found
    with program.skeleton.graph.inserting_after(program.inputs()[-1]):
        node: Node = program.skeleton.graph.placeholder(name)
    node.meta = {"val": val}
    return node


def block_input(program: Program, block: str, source: Node) -> Node:
    """The input of a block that every call feeds with the skeleton node `source`, made if there is none."""
    graph = program.blocks[block].graph
    calls = [c for c in program.calls() if c.target == block]
    holes: list[Node] = [n for n in graph.nodes if n.op == "placeholder"]
    for i, hole in enumerate(holes):
        if all(call.args[i] is source for call in calls):
            return hole
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        node = graph.placeholder(source.name)
    node.meta = {"val": source.meta["val"]}
    for call in calls:
        call.args = (*call.args, source)
    return node


def outputs_of(gm: GraphModule) -> list[Node]:
    """What a block gives, in order."""
    out: Any = gm.graph.output_node().args[0]
    return list(out) if isinstance(out, (tuple, list)) else [out]


def add_outputs(program: Program, block: str, nodes: list[Node]) -> int:
    """Let a block give more values, behind those it gives; returns the place of the first. Its calls give tuples."""
    gm = program.blocks[block]
    before = outputs_of(gm)
    several = isinstance(gm.graph.output_node().args[0], (tuple, list))
    gm.graph.output_node().args = ((*before, *nodes),)
    for call in (c for c in program.calls() if c.target == block):
        users = [] if several else list(call.users)
        call.meta["val"] = tuple(output_values(gm))
        for user in users:
            user.replace_input_with(call, item_of(call, 0))
    return len(before)


def item_of(call: Node, place: int) -> Node:
    """The skeleton node of one result of a call that gives several, made if there is none."""
    for user in call.users:
        if is_op(user, operator.getitem) and user.args[1] == place:
            return user
    with call.graph.inserting_after(call):
        node = call.graph.call_function(operator.getitem, (call, place))
    node.meta["val"] = call.meta["val"][place]
    return node


def revalue(gm: GraphModule) -> None:
    """Compute the recorded value of every call of a graph again, after an edit changed the shape of an operand."""
    mode = fake_mode_of(gm.graph)
    for node in gm.graph.nodes:
        if node.op == "call_function" and not is_evaluated(node):
            node.meta["val"] = evaluate(node.target, node.args, node.kwargs, mode)
            set_evaluated(node)


def revalue_calls(program: Program, block: str) -> None:
    """Record on the skeleton what a block's outputs have become. Only for outputs that no block reads."""
    values = output_values(program.blocks[block])
    for call in program.calls():
        if call.target == block:
            call.meta["val"] = values[0] if not isinstance(call.meta["val"], (tuple, list)) else tuple(values)
    revalue(program.skeleton)
