"""Run the decoder of a split program on the rows whose logits are wanted: what no later token reads is not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op
from deepinfer_compile.narrowing import METAS, Made, insert_select, move_to_end, needed_by, renew
from deepinfer_compile.ops import OUTPUT_PROJECTION, ROW_BATCH
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.products import projection_flops, row_flops
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import Rows, analyse

A = torch.ops.aten
ROWS = "rows"


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
        wide = needed_by(program, decoder)
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
            renew(program, narrow, _drop_selection)
            found = {"replay": "compact", "keep": 0, "exact": True, "parts": parts, "flops": [whole, upper]}
            program.info["split"] = {**split, **found}
            analyse(program)
        return program


def _reason(program: Program, wide: set[Node], narrow: list[Node], upper: int) -> str:
    """Why no call can run on some rows only; nothing if one can."""
    if not upper:
        last = max((c.meta["layer"] for c in wide if c.meta.get("layer") is not None), default=None)
        return f"layer {last} keeps keys of its own, which later tokens read" if wide else "the decoder has no products"
    picks = [n for call in narrow for hole in _row_holes(program.blocks[str(call.target)], call) for n in hole.users]
    other = next((n for n in picks if not _picks(n)), None)
    if other is not None:
        return f"{other.name} does more with the wanted rows than to pick them"
    return "" if picks else "the program gives logits of all rows"


def _row_holes(gm: GraphModule, call: Node) -> list[Node]:
    """The inputs of a called block that are the indices of wanted rows."""
    holes = (n for n in gm.graph.nodes if n.op == "placeholder")
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
    """Put a call in front of the decoder that gives the wanted rows of all that it reads."""
    outside = move_to_end(program, decoder)
    rows = next(n for n in program.skeleton.graph.nodes if n.op == "placeholder" and n.name == ROWS)
    taken = [n for n in outside if isinstance(env[n], Rows)]
    tables = [n for n in outside if n.name.startswith("block_table_")]
    metas = [n for n in program.inputs() if n.name in METAS] if tables else []

    def make(edit: Editor, holes: Mapping[Node, Node]) -> Made:
        made: dict[object, Node] = {
            n: edit.call(A.index_select.default, holes[n], env[n].dim, holes[rows]) for n in taken
        }
        for table in tables:
            batch = edit.call(ROW_BATCH.overload, holes[rows], *(holes[m] for m in metas), holes[table])
            made |= {n: edit.item(batch, i) for i, n in enumerate((*metas, table))}
        return made

    return insert_select(program, decoder, [rows, *taken, *metas, *tables], make)[0]


def _drop_selection(call: Node, gm: GraphModule) -> None:
    """Let a block of the decoder take the rows that it has."""
    for node in [n for hole in _row_holes(gm, call) for n in hole.users]:
        _unpick(node)
