"""Run the decoder of a split program on the rows whose logits are wanted: what no later token reads is not computed."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, fake_mode_of, is_op, remove_dead, value, writes
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
    Left alone: programs that are not split, and all with the setting replay="off". A decoder that writes caches of its
    own (windows), since later tokens would miss what its other rows write there.
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
        decoder = [c for c in program.calls() if split["parts"][c.name] == "decoder"]
        ctx.graph, ctx.layers = "skeleton", tuple(split["above"])
        reason = _reason(program, decoder, ctx)
        if reason:
            ctx.miss(decoder[0], reason)
            return program
        if ctx.claim(decoder[0], f"the decoder runs on the wanted rows: {split['why']}"):
            env: dict[Node, Any] = {}
            analyse(program, env)
            whole = row_flops(program, (c for c in program.calls() if c not in decoder))
            upper = row_flops(program, decoder) - projection_flops(program, decoder)
            selected = _select(program, decoder, env)
            _renew(program, decoder)
            parts = {**split["parts"], selected.name: "decoder"}
            program.info["split"] = {**split, "replay": "compact", "keep": 0, "exact": True, "parts": parts, "flops": [whole, upper]}
            analyse(program)
        return program


def _reason(program: Program, decoder: list[Node], ctx: PassContext) -> str:
    """Why the decoder cannot run on some rows only; nothing if it can."""
    if ctx.settings.get("replay") == "off":
        return "replay is off"
    for call in decoder:
        found = next((n for n in program.blocks[str(call.target)].graph.nodes if writes(n)), None)
        if found is not None:
            layer = call.meta.get("layer")
            where = call.name if layer is None else f"layer {layer}"
            return f"{where} keeps keys of its own, which later tokens read: {found.name}"
    picks = [n for call in decoder for hole in _row_holes(program, call) for n in hole.users]
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
    """Put a call in front of the decoder that gives the wanted rows of all that it reads from outside."""
    inside = {*decoder, *(u for c in decoder for u in c.users)}
    outside = dict.fromkeys(a for c in decoder for a in c.args if isinstance(a, Node) and a not in inside)
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
    done: set[str] = set()
    for call in decoder:
        gm = program.blocks[str(call.target)]
        if call.target not in done:
            done.add(str(call.target))
            for node in [n for hole in _row_holes(program, call) for n in hole.users]:
                _unpick(node)
            remove_dead(gm.graph)
            holes = (n for n in gm.graph.nodes if n.op == "placeholder")
            for hole, arg in zip(holes, call.args):
                hole.meta["val"] = value(arg)  # type: ignore[arg-type]
            revalue(gm)
        vals = output_values(gm)
        call.meta["val"] = tuple(vals) if isinstance(value(call), (tuple, list)) else vals[0]
        for item in (u for u in call.users if is_op(u, operator.getitem)):
            item.meta["val"] = vals[item.args[1]]  # type: ignore[index]
    prune(program)
