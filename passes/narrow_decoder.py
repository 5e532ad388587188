"""Run the decoder of a split program on the rows whose logits are wanted: what no later token reads is not computed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, copy_module, fake_mode_of, is_op, remove_dead, value, writes
from deepinfer_compile.ops import OUTPUT_PROJECTION, ROW_BATCH
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.products import projection_flops, row_flops
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.prune import prune
from deepinfer_compile.rowwise import Rows, analyse
from deepinfer_compile.skeleton import item_of, revalue

A = torch.ops.aten
ROWS = "rows"
SELECT = "select"
METAS = ("query_start", "seq_len")


@register
@dataclass(frozen=True)
class NarrowDecoder:
    """Select the wanted rows in front of the decoder instead of at its end.

    Before: `y = layer2(h[1,T,H], query_start, ..., slots); l = suffix(y, rows)`, of part "decoder" of `info["split"]`
    After:  `h', query_start', ..., slots' = select(h, rows, query_start, ..., slots)`, where h' are the rows `rows` of
            h and the metadata describes each as a request of one token; then `layer2(h', ...)` and `suffix(y')`
    Exact: in the decoder each row reads its own row and keys in caches that the encoder and the boundary wrote, which
    is proven again on the result. `info["split"]["replay"]` is then "compact", and "keep" 0: no row but the wanted.
    "flops": of the matrix products for every token, and for a wanted one besides them and the output projection.
    Left alone: programs that are not split, and all with the setting replay="off". Layers up to the last one that
    writes keys of its own (a window), since later tokens would miss what its other rows write.
    """

    name: ClassVar[str] = "narrow-decoder"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED, Fact.ROWWISE})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        split = program.info.get("split")
        if split is None or split["replay"] != "off":
            return program
        ctx.graph, ctx.layers = "skeleton", tuple(split["above"])
        decoder = [c for c in program.calls() if split["parts"][c.name] == "decoder"]
        wide = _wide(program, decoder)
        narrow = [c for c in decoder if c not in wide]
        upper = row_flops(program, narrow) - projection_flops(program, narrow)
        reason = "replay is off" if ctx.settings.get("replay") == "off" else _reason(program, wide, narrow, upper)
        if reason:
            ctx.miss(decoder[0], reason)
            return program
        if ctx.claim(narrow[0], f"it and what follows run on the wanted rows; {split['why']}"):
            whole = row_flops(program, (c for c in program.calls() if c not in narrow))
            env: dict[Node, Any] = {}
            analyse(program, env)
            parts = {**split["parts"], **dict.fromkeys((c.name for c in wide), "boundary")}
            parts[_select(program, narrow, env).name] = "decoder"
            _renew(program, narrow)
            found = {"replay": "compact", "keep": 0, "exact": True, "parts": parts, "flops": [whole, upper]}
            program.info["split"] = {**split, **found}
            analyse(program)
        return program


def _wide(program: Program, decoder: list[Node]) -> set[Node]:
    """The calls of the decoder that write caches, and those that they need: they run on all rows."""
    left = [c for c in decoder if any(map(writes, program.blocks[str(c.target)].graph.nodes))]
    found: set[Node] = set()
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left.extend(node.all_input_nodes)
    return {c for c in decoder if c in found}


def _reason(program: Program, wide: set[Node], narrow: list[Node], upper: int) -> str:
    """Why no call can run on some rows only; nothing if one can."""
    if not upper:
        last = max((c.meta["layer"] for c in wide if c.meta.get("layer") is not None), default=None)
        return f"layer {last} keeps keys of its own, which later tokens read" if wide else "the decoder has no products"
    picks = [n for call in narrow for hole in _row_holes(program, call) for n in hole.users]
    other = next((n for n in picks if not _picks(n)), None)
    if other is not None:
        return f"{other.name} does more with the wanted rows than to pick them"
    return "" if picks else "the program gives logits of all rows"


def _row_holes(program: Program, call: Node) -> list[Node]:
    """The inputs of a called block that are the indices of wanted rows."""
    holes = (n for n in program.blocks[str(call.target)].graph.nodes if n.op == "placeholder")
    return [hole for hole, arg in zip(holes, call.args) if isinstance(arg, Node) and arg.name == ROWS]


def _picks(node: Node) -> bool:
    """Whether a call picks rows of its first operand by indices, and does nothing else with them."""
    if is_op(node, A.index.Tensor):
        *front, last = argument(node, "indices")
        return not any(front) and isinstance(last, Node)
    return is_op(node, OUTPUT_PROJECTION.overload, A.index_select.default)


def _unpick(node: Node) -> None:
    """What a call gives whose operand is the wanted rows already."""
    source: Any = node.args[0]
    if is_op(node, OUTPUT_PROJECTION.overload):
        source = Editor(node.graph, node).call(A.linear.default, source, *node.args[2:])
    node.replace_all_uses_with(source)


def _select(program: Program, decoder: list[Node], env: dict[Node, Any]) -> Node:
    """Put a call in front of the decoder, which moves to the end, that gives the wanted rows of all that it reads."""
    items = {u for c in decoder for u in c.users if is_op(u, operator.getitem)}
    inside = {*decoder, *items}
    outside = dict.fromkeys(a for c in decoder for a in c.args if isinstance(a, Node) and a not in inside)
    for node in [n for n in program.skeleton.graph.nodes if n in inside]:
        program.skeleton.graph.output_node().prepend(node)
    rows = next(n for n in program.skeleton.graph.nodes if n.op == "placeholder" and n.name == ROWS)
    taken = [n for n in outside if isinstance(env[n], Rows)]
    tables = [n for n in outside if n.name.startswith("block_table_")]
    metas = [n for n in program.inputs() if n.name in METAS] if tables else []
    args = [rows, *taken, *metas, *tables]
    graph = Graph()
    holes = {a: graph.placeholder(a.name) for a in args}
    for arg, hole in holes.items():
        hole.meta = {"val": value(arg)}
    out = graph.output(())
    edit = Editor(graph, out)
    edit.mode = fake_mode_of(program.skeleton.graph)
    made = {n: edit.call(A.index_select.default, holes[n], env[n].dim, holes[rows]) for n in taken}
    for table in tables:
        batch = edit.call(ROW_BATCH.overload, holes[rows], *(holes[m] for m in metas), holes[table])
        made |= {n: edit.item(batch, i) for i, n in enumerate((*metas, table))}
    out.args = (tuple(made.values()),)
    program.blocks[SELECT] = GraphModule(torch.nn.Module(), graph)
    program.skeleton.add_module(SELECT, program.blocks[SELECT])
    with program.skeleton.graph.inserting_before(decoder[0]):
        call: Node = program.skeleton.graph.call_module(SELECT, tuple(args))
    call.meta = {"val": tuple(output_values(program.blocks[SELECT])), "layer": None}
    given = {n: item_of(call, i) for i, n in enumerate(made)}
    for reader in decoder:
        reader.args = tuple(given.get(a, a) for a in reader.args)  # type: ignore[arg-type]
    return call


def _renew(program: Program, decoder: list[Node]) -> None:
    """Record what the blocks of the decoder take and give now, and drop their own selection of rows."""
    kept = {str(c.target) for c in program.calls() if c not in decoder}
    renewed: dict[str, str] = {}
    for call in decoder:
        if call.target not in renewed:
            renewed[str(call.target)] = _renewed(program, call, copied=call.target in kept)
        call.target = renewed[str(call.target)]
        vals = output_values(program.blocks[call.target])
        call.meta["val"] = tuple(vals) if isinstance(value(call), (tuple, list)) else vals[0]
        for item in (u for u in call.users if is_op(u, operator.getitem)):
            item.meta["val"] = vals[item.args[1]]  # type: ignore[index]
    prune(program)


def _renewed(program: Program, call: Node, copied: bool) -> str:
    """Renew a block for what a call gives it, or a copy of it; returns its name."""
    name = f"{call.target}_rows" if copied else str(call.target)
    if copied:
        program.blocks[name] = copy_module(program.blocks[str(call.target)])
        program.skeleton.add_module(name, program.blocks[name])
    gm = program.blocks[name]
    for node in [n for hole in _row_holes(program, call) for n in hole.users]:
        _unpick(node)
    remove_dead(gm.graph)
    for hole, arg in zip((n for n in gm.graph.nodes if n.op == "placeholder"), call.args):
        hole.meta["val"] = value(arg)  # type: ignore[arg-type]
    revalue(gm)
    return name
