"""Prove that packed requests cannot see each other outside attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deepinfer_compile.facts import Fact
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import analyse


@register
@dataclass(frozen=True)
class ProveRowwise:
    """Refuse a program in which an op outside the dialect mixes tokens; change nothing.

    Before: `y = mean(x[1,T,H], [1])` is refused, `y = mean(x, [2])` is proven
    After:  the same program, with the fact ROWWISE
    Left alone: everything. An op without a rule is refused, with that reason.
    Raises NotRowwise, naming the op, its place in the model and why.
    """

    name: ClassVar[str] = "prove-rowwise"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL, Fact.POSITIONS})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.ROWWISE})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        analyse(program)
        return program
