"""Compute a rotary table once a block: models make one wherever they turn something, of constants of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import is_op
from deepinfer_compile.match import alike
from deepinfer_compile.ops import ROTARY_TABLE
from deepinfer_compile.passbase import NONE, PassContext, each_block, register
from deepinfer_compile.program import Program, WeightRef
from deepinfer_compile.prune import prune


@register
@dataclass(frozen=True)
class ShareRotaryTables:
    """Give all users of equal rotary tables in a block the first of them; frequencies that nothing reads any more go.

    Before: `a = rotary_table(p, f0, 1.0, 'once', f32); b = rotary_table(p, f1, 1.0, 'once', f32)`; f0 and f1 are equal
    After:  `a = rotary_table(p, f0, 1.0, 'once', f32)`, for both
    Frequencies are equal if they are one input, or constants with the same bits wherever the block is called.
    Left alone: frequencies that come from a checkpoint, and tables of other positions, scaling, form or type.
    """

    name: ClassVar[str] = "share-rotary-tables"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        for gm in each_block(program, ctx):
            constants = _constants(program, ctx.graph)
            seen: list[Node] = []
            for node in [n for n in gm.graph.nodes if is_op(n, ROTARY_TABLE.overload)]:
                twin = next((t for t in seen if _equal(t, node, constants)), None)
                if twin is None:
                    seen.append(node)
                elif ctx.claim(node, f"the table of {twin.name}"):
                    node.replace_all_uses_with(twin)
        prune(program)
        return program


Constants = dict[Node, tuple[WeightRef | None, ...]]
"""What a block's inputs stand for in each of its calls, None where that is no weight."""


def _constants(program: Program, block: str) -> Constants:
    holes = [n for n in program.blocks[block].graph.nodes if n.op == "placeholder"]
    calls = [c for c in program.calls() if c.target == block]
    return {hole: tuple(program.weights.get(_name(c.args[i])) for c in calls) for i, hole in enumerate(holes)}


def _name(arg: Any) -> str:
    return arg.name if isinstance(arg, Node) else ""


def _equal(a: Node, b: Node, constants: Constants) -> bool:
    """Whether two tables are of the same positions and frequencies, in the same form."""
    if a.args[2:] != b.args[2:] or not alike(a.args[0], b.args[0]):
        return False
    f, g = a.args[1], b.args[1]
    if f is g:
        return True
    refs = [constants.get(n, ()) for n in (f, g)]  # type: ignore[arg-type]
    return bool(refs[0]) and len(refs[0]) == len(refs[1]) and all(map(_same_bits, *refs))


def _same_bits(a: WeightRef | None, b: WeightRef | None) -> bool:
    if a is None or b is None or a.value is None or b.value is None or a.value.is_meta or b.value.is_meta:
        return False
    return a.value.dtype == b.value.dtype and torch.equal(a.value, b.value)
