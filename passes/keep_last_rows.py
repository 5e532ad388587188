"""Run layers that keep windows, above a boundary, on the last rows of each prompt: an approximation, on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import BadOption
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, fake_mode_of, is_op, tensor, value
from deepinfer_compile.narrowing import METAS, Made, insert_select, move_to_end, needed_by, renew
from deepinfer_compile.ops import (
    CACHED_ATTENTION,
    CACHED_RECENT,
    CACHED_SELECTED_ATTENTION,
    KEPT_BATCH,
    WRITE_KV,
    WRITE_ROWS,
)
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.products import projection_flops, row_flops
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import Rows, analyse
from deepinfer_compile.skeleton import fresh, program_input

A = torch.ops.aten
KEPT, START, ROWS = "kept", "kept_start", "rows"
EXAMPLE_ROWS = 3
OWN = (CACHED_ATTENTION.overload, CACHED_RECENT.overload, CACHED_SELECTED_ATTENTION.overload)


@register
@dataclass(frozen=True)
class KeepLastRows:
    """Select the last rows of each prompt in front of a decoder that keeps windows of its own.

    Before: `y = layer2(h[1,T,H], query_start, seq_len, block_table, slot, window!); l = suffix(y, rows)`
    After:  `h', rows', query_start', ..., slot' = select(h, kept, kept_start, rows, ...)` in front of them, where kept
            i64[K] are the tokens of the step from kept_start i64[R] of their request on, a multiple of a page
    Its window attention sees no key before kept_start, since none was written. Runs with the setting `keep`, the rows
    of a prompt that are kept at least; `info["split"]["exact"]` says whether they are as many as the windows reach.
    Left alone: a decoder without windows of its own, for which `narrow-decoder` does better. Raises BadOption where
    keep is less than a window, whose caches the tokens after the prompt read.
    """

    name: ClassVar[str] = "keep-last-rows"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED, Fact.ROWWISE})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        split, keep = program.info.get("split"), int(ctx.settings.get("keep") or 0)
        if split is None or split["replay"] != "off" or not keep or ctx.settings.get("replay") == "off":
            return program
        decoder = [c for c in program.calls() if split["parts"][c.name] == "decoder"]
        wide = needed_by(program, decoder, (WRITE_KV.overload, WRITE_ROWS.overload))
        narrow = [c for c in decoder if c not in wide]
        windows = [_window(n) for c in narrow for n in _own(program.blocks[str(c.target)])]
        if not windows:
            return program
        if keep < max(windows):
            fix = f"keep {max(windows)} or more; {split['halo']} give the last row exactly"
            raise BadOption(name="keep", value=keep, reason=f"a window above the boundary is {max(windows)}", fix=fix)
        ctx.graph, ctx.layers = "skeleton", tuple(split["above"])
        if ctx.claim(narrow[0], f"it and what follows run on the last {keep} rows of a prompt or more; {split['why']}"):
            flops = [row_flops(program, (c for c in program.calls() if c not in narrow)), row_flops(program, narrow)]
            flops[1] -= projection_flops(program, narrow)
            env: dict[Node, Any] = {}
            analyse(program, env)
            parts = {**split["parts"], **dict.fromkeys((c.name for c in wide), "boundary")}
            parts[_keep(program, narrow, env).name] = "decoder"
            found = {"replay": "compact", "keep": keep, "exact": keep >= split["halo"], "parts": parts, "flops": flops}
            program.info["split"] = {**split, **found}
            analyse(program)
        return program


def _own(gm: GraphModule) -> list[Node]:
    """The calls of a block that write a cache and read it: attentions, and of the last rows."""
    return [n for n in gm.graph.nodes if is_op(n, *OWN)]


def _window(node: Node) -> int:
    return int(argument(node, "count" if is_op(node, CACHED_RECENT.overload) else "window"))


def _inputs(program: Program) -> tuple[Node, Node]:
    """The inputs `kept` and `kept_start`."""
    lengths = tensor(next(n for n in program.inputs() if n.name == "seq_len"))
    with fake_mode_of(program.skeleton.graph):
        start = torch.empty(lengths.shape, dtype=torch.int64)
    kept = program_input(program, KEPT, fresh(program, KEPT, (EXAMPLE_ROWS,), torch.int64, (0,)))
    return kept, program_input(program, START, start)


def _keep(program: Program, narrow: list[Node], env: dict[Node, Any]) -> Node:
    """Put the selection in front of the calls and renew their blocks."""
    kept, start = _inputs(program)
    outside = move_to_end(program, narrow)
    taken = [n for n in outside if isinstance(env[n], Rows)]
    rows = [n for n in outside if n.name == ROWS]
    tables = [n for n in outside if n.name.startswith("block_table_")]
    metas = [n for n in program.inputs() if n.name in METAS]

    def make(edit: Editor, holes: Mapping[Node, Node]) -> Made:
        made: dict[object, Node] = {
            n: edit.call(A.index_select.default, holes[n], env[n].dim, holes[kept]) for n in taken
        }
        made |= {n: edit.call(A.searchsorted.Tensor, holes[kept], holes[n]) for n in rows}
        for table in tables:
            read = *(holes[m] for m in metas), holes[table]
            whole = edit.call(KEPT_BATCH.overload, holes[kept], None, *read)
            late = edit.call(KEPT_BATCH.overload, holes[kept], holes[start], *read)
            made |= {n: edit.item(whole, i) for i, n in enumerate((*metas, table))}
            made |= {f"seq_len {table.name}": edit.item(late, 1), f"table {table.name}": edit.item(late, 2)}
        return made

    named = {n: n.name for n in tables}
    readers = {c: {h: named[a] for h, a in _tables(program, c) if a in named} for c in narrow}
    own = {c: [readers[c][argument(n, "block_table")] for n in _own(program.blocks[str(c.target)])] for c in narrow}
    call, given = insert_select(program, narrow, [kept, start, *rows, *taken, *metas, *tables], make)
    for reader, read in own.items():
        extra = [given[f"{what} {name}"] for name in dict.fromkeys(read) for what in ("seq_len", "table")]
        reader.args = (*reader.args, *extra)
    places = {str(c.target): read for c, read in own.items()}
    renew(program, narrow, lambda reader, gm: _read_late(gm, reader, places[str(reader.target)]))
    return call


def _tables(program: Program, call: Node) -> list[tuple[Node, Node]]:
    """The inputs of a called block, and what the call gives for each."""
    holes = [n for n in program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
    return [(h, a) for h, a in zip(holes, call.args) if isinstance(a, Node)]


def _read_late(gm: GraphModule, call: Node, read: list[str]) -> None:
    """Let the attentions of a block that write a cache take metadata of requests that begin at kept_start."""
    anchor = next(n for n in gm.graph.nodes if n.op != "placeholder")
    count = 2 * len(dict.fromkeys(read))
    late: dict[str, list[Node]] = {}
    for i, arg in enumerate(call.args[len(call.args) - count :]):
        with gm.graph.inserting_before(anchor):
            hole = gm.graph.placeholder(f"late_{i}")
        hole.meta = {"val": value(arg)}  # type: ignore[arg-type]
        late.setdefault(list(dict.fromkeys(read))[i // 2], []).append(hole)
    for node, name in zip(_own(gm), read, strict=True):
        args, names = list(node.args), [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
        args[names.index("seq_len")], args[names.index("block_table")] = late[name]
        node.args = tuple(args)
