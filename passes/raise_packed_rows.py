"""Rows in the bytes of a block-scaled format, and rows read back from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, tensor
from deepinfer_compile.match import is_cast, uncast
from deepinfer_compile.match_packed import Constants, Packing, packings, unpacking
from deepinfer_compile.ops import PACK_ROWS, UNPACK_ROWS
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program


@register
@dataclass(frozen=True)
class RaisePackedRows:
    """Replace the arithmetic of numbers and scales by deepinfer::pack_rows and deepinfer::unpack_rows.

    Before: `s = power(max(|x in groups|) / 448); b = cat([bytes(clamp(x / s)), bytes(s)], -1)`, and later
            `y = float(b[..., :D]) * float(b[..., D:])`
    After:  `b = pack_rows(x, [8, 32, 1], 448.0, 0.0001); y = unpack_rows(b, [8, 32, 1], float32)`
    Casts of what is read back become its dtype. What each does is tried on rows at every edge of the formats.
    Left alone: other forms, and bytes that depend on more than the rows.
    """

    name: ClassVar[str] = "raise-packed-rows"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        for name in dict.fromkeys(str(c.target) for c in program.calls()):
            ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
            constants = _constants(program, name)
            for found in packings(list(program.blocks[name].graph.nodes), constants):
                if not isinstance(found, Packing):
                    ctx.miss(*found)
                    continue
                bits, group, powers = found.form
                scales = "powers of two" if powers else "e4m3"
                if ctx.claim(found.out, f"rows of {bits} bits, {scales} for {group}"):
                    _rewrite(found, constants)
        return program


def _constants(program: Program, block: str) -> Constants:
    """Inputs of a block that are the same constant at every call."""
    calls = [c for c in program.calls() if c.target == block]
    holes = [n for n in program.blocks[block].graph.nodes if n.op == "placeholder"]
    known: dict[Node, Tensor] = {}
    for hole, sources in zip(holes, zip(*(c.args for c in calls))):
        refs = [program.weights.get(source.name) for source in sources if isinstance(source, Node)]
        values = [ref.value for ref in refs if ref is not None and ref.value is not None and not ref.value.is_meta]
        if len(values) == len(calls) and all(torch.equal(v, values[0]) for v in values[1:]):
            known[hole] = values[0].cpu()
    return known.get


def _rewrite(found: Packing, constants: Constants) -> None:
    rows = unpacking(found, constants)
    edit = Editor(found.out.graph, found.out)
    form = list(found.form)
    packed = edit.call(PACK_ROWS.overload, uncast(found.x), form, found.largest, found.least)
    if rows is not None:
        # a reader of the old bytes goes with them
        edit = Editor(rows.graph, rows)
        for cast in [user for user in rows.users if is_cast(user) and tensor(user).is_floating_point()]:
            edit.replace(cast, edit.call(UNPACK_ROWS.overload, packed, form, tensor(cast).dtype))
        if rows.users:
            edit.replace(rows, edit.call(UNPACK_ROWS.overload, packed, form, tensor(rows).dtype))
    edit.replace(found.out, packed)
