"""Attention over windows of latents and chosen rows, and the choice, which may be another layer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, tensor, value
from deepinfer_compile.match_choices import Choices, Meaning, Sites
from deepinfer_compile.match_moe import NearMiss
from deepinfer_compile.match_selected import Attending
from deepinfer_compile.ops import SELECT_ROWS, SELECTED_ATTENTION
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program, output_values

A = torch.ops.aten


@register
@dataclass(frozen=True)
class RaiseSelectedAttention:
    """Replace dense masks of chosen rows by lists of them, where they are made and where they are read.

    Before: `m = rank(scores(q, w, keys)) < top & visible` in one block, there and in later ones
            `softmax(mask(q . [latents, rows], [window, m]), sinks) . [latents, rows]`
    After:  `n, c = select_rows(q, w, keys, None, ...)` and `selected_attention(q, latents, rows, n, sinks, ...)`
    Also attention over a window of latents alone, and choices among candidates that another choice made.
    Left alone: everything, if a mask of chosen rows is read by anything else.
    """

    name: ClassVar[str] = "raise-selected-attention"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        found = {name: Sites(list(gm.graph.nodes)) for name, gm in program.blocks.items()}
        if not any(s.attend for s in found.values()):
            return program
        last = next(s.attend[0].out for s in found.values() if s.attend)
        try:
            choices = Choices(program, found)
            _check_readers(program, found)
        except NearMiss as reason:
            ctx.miss(last, str(reason))
            return program
        attended, chosen = (
            sum(len(k) for k in kinds)
            for kinds in ([s.attend for s in found.values()], [s.select for s in found.values()])
        )
        if ctx.claim(last, f"{attended} attentions over latents, {chosen} choices of rows as lists"):
            _Raiser(program, choices.separate()).rewrite()
        return program


def _check_readers(program: Program, found: dict[str, Sites]) -> None:
    """Every mask must be read by what is rewritten alone. Raises NearMiss."""
    for name, sites in found.items():
        gone = _gone(program.blocks[name].graph, sites)
        for mask in (
            *(s.chosen for s in sites.select),
            *(s.made for s in sites.select),
            *(s.limit for s in sites.select),
            *(a.chosen for a in sites.attend),
        ):
            for user in mask.users if mask is not None else ():
                if user.op != "output" and user not in gone:
                    raise NearMiss(f"{user.name} reads a mask of chosen rows, too")


class _Raiser:
    """Rewrites blocks, each of which means the same at every call."""

    def __init__(self, program: Program, meaning: dict[str, Meaning]) -> None:
        self.program, self.meaning = program, meaning

    def rewrite(self) -> None:
        """Makers first, since what they give has another type after."""
        for name in dict.fromkeys(str(c.target) for c in self.program.calls()):
            gm, held = self.program.blocks[name], self.meaning[name]
            sites = Sites(list(gm.graph.nodes))
            self._retype_inputs(name)
            new: dict[Node, Node] = {}
            for s in sites.select:
                edit = Editor(gm.graph, s.chosen)
                size = s.block or (held.block[s.limit.name] if s.limit is not None else 1)
                keys = (s.q, s.weights, s.keys, new.get(s.limit, s.limit) if s.limit is not None else None)
                made = edit.call(SELECT_ROWS.overload, *keys, s.scale, held.ratio[s.chosen.name], s.top, size, s.blocks)
                new[s.chosen] = edit.item(made, 0)
                if s.made is not None:
                    new[s.made] = edit.item(made, 1)
            for a in sites.attend:
                self._attend(name, a, new)
            out = gm.graph.output_node()
            out.args = (torch.fx.node.map_arg(out.args[0], lambda n, new=new: new.get(n, n)),)  # type: ignore[misc]
            self._retype_outputs(name)

    def _attend(self, name: str, a: Attending, new: dict[Node, Node]) -> None:
        edit, held = Editor(self.program.blocks[name].graph, a.out), self.meaning[name]
        chosen = None if a.chosen is None else new.get(a.chosen, a.chosen)
        ratio = 1 if a.chosen is None else held.ratio[a.chosen.name]
        found = edit.call(
            *(SELECTED_ATTENTION.overload, a.q, a.latents, a.rows, chosen, a.sinks, a.scale),
            *(held.window[a.out.name], ratio),
        )
        if tensor(found).dtype != tensor(a.out).dtype:
            found = edit.call(A._to_copy.default, found, dtype=tensor(a.out).dtype)
        edit.replace(a.out, found)

    def _retype_inputs(self, block: str) -> None:
        call = next(c for c in self.program.calls() if c.target == block)
        holes = [n for n in self.program.blocks[block].graph.nodes if n.op == "placeholder"]
        for hole, source in zip(holes, call.args):
            hole.meta["val"] = value(source)  # type: ignore[arg-type]

    def _retype_outputs(self, block: str) -> None:
        values = output_values(self.program.blocks[block])
        for call in (c for c in self.program.calls() if c.target == block):
            if not isinstance(call.meta["val"], (tuple, list)):
                call.meta["val"] = values[0]
                continue
            call.meta["val"] = tuple(values)
            for item in (u for u in call.users if u.op == "call_function"):
                item.meta["val"] = values[item.args[1]]  # type: ignore[index]


def _gone(graph: torch.fx.Graph, sites: Sites) -> set[Node]:
    """What nobody reads any more once the calls of a block are rewritten."""
    kept: set[Any] = {n for s in sites.select for n in (s.q, s.weights, s.keys)}
    kept |= {n for a in sites.attend for n in (a.q, a.latents, a.rows, a.sinks)}
    ends: set[Any] = {n for s in sites.select for n in (s.chosen, s.made)} | {a.out for a in sites.attend}
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in ends or (node.users and node not in kept and all(u in found for u in node.users)):
            found.add(node)
    return found
