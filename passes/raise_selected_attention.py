"""Attention over windows of latents and chosen rows, and the choice, which may be another layer's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, tensor, value
from deepinfer_compile.match_moe import NearMiss
from deepinfer_compile.match_selected import Attending, Positions, Selection, attendings, made_by, selections
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
        raiser = _Raiser(program, ctx)
        found = {name: _Sites(list(gm.graph.nodes)) for name, gm in program.blocks.items()}
        if not any(s.attend for s in found.values()):
            return program
        last = next(s.attend[0].out for s in found.values() if s.attend)
        try:
            raiser.read(found)
        except NearMiss as reason:
            ctx.miss(last, str(reason))
            return program
        if ctx.claim(last, raiser.words()):
            raiser.rewrite(found)
        return program


class _Sites:
    """What was found in a block."""

    def __init__(self, nodes: list[Node]) -> None:
        self.select: list[Selection] = selections(nodes)
        self.attend: list[Attending] = attendings(nodes)


class _Raiser:
    """ratio: of each mask of chosen rows or candidates, by block and node; block: rows of a candidate; windows."""

    def __init__(self, program: Program, ctx: PassContext) -> None:
        self.program, self.ctx = program, ctx
        self.positions = Positions(program)
        self.ratio: dict[tuple[str, Node], int] = {}
        self.block: dict[tuple[str, Node], int] = {}
        self.window: dict[tuple[str, Node], int] = {}
        self.choices = 0

    def words(self) -> str:
        """What is rewritten, for the report."""
        return f"{len(self.window)} attentions over latents, {self.choices} choices of rows as lists"

    def read(self, found: dict[str, _Sites]) -> None:
        """Find what every mask means. Raises NearMiss where one is not known, or is read by something else."""
        for name, sites in self._in_order(found):
            for s in sites.select:
                ratio = self.positions.ratio(name, s.numbers, s.seen)
                self.choices += 1
                for mask in (s.chosen, s.made):
                    if mask is not None:
                        self.ratio[name, mask] = ratio
                if s.made is not None:
                    self.block[name, s.made] = s.block
                if s.limit is not None:
                    where = self._maker(name, s.limit)
                    if self.ratio.get(where) != ratio or where not in self.block:
                        raise NearMiss("candidates are not those of another choice among the same rows")
                    self.block[name, s.limit] = self.block[where]
            for a in sites.attend:
                self.window[name, a.out] = self.positions.window(name, a.mask)
                if a.chosen is not None:
                    where = self._maker(name, a.chosen)
                    if where not in self.ratio:
                        raise NearMiss("a mask of rows is not made by a choice that is known")
                    self.ratio[name, a.chosen] = self.ratio[where]
        self._check_readers(found)

    def _in_order(self, found: dict[str, _Sites]) -> list[tuple[str, _Sites]]:
        names = dict.fromkeys(str(c.target) for c in self.program.calls())
        return [(name, found[name]) for name in names]

    def _maker(self, block: str, node: Node) -> tuple[str, Node]:
        """Where a value is made, the same for every call of the block. Raises NearMiss."""
        if node.op != "placeholder":
            return block, node
        holes = [n for n in self.program.blocks[block].graph.nodes if n.op == "placeholder"]
        at, makers = holes.index(node), set()
        for call in (c for c in self.program.calls() if c.target == block):
            source: Any = call.args[at]
            if source.op == "placeholder":
                raise NearMiss(f"a mask of rows comes from {source.name}")
            maker, made = made_by(self.program, source)
            makers.add(self._maker(str(maker.target), made))
        if len(makers) != 1:
            raise NearMiss("a block is given masks of different blocks")
        return makers.pop()

    def _check_readers(self, found: dict[str, _Sites]) -> None:
        """Every mask must be read by what is rewritten alone."""
        for name, sites in found.items():
            gone = _gone(self.program.blocks[name].graph, sites)
            for mask in {m for b, m in self.ratio if b == name}:
                for user in mask.users:
                    if user.op != "output" and user not in gone:
                        raise NearMiss(f"{user.name} reads a mask of chosen rows, too")

    def rewrite(self, found: dict[str, _Sites]) -> None:
        """Makers first, since what they give has another type after."""
        for name, sites in self._in_order(found):
            gm = self.program.blocks[name]
            self._retype_inputs(name)
            new: dict[Node, Node] = {}
            for s in sites.select:
                edit = Editor(gm.graph, s.chosen)
                size = s.block or (self.block[name, s.limit] if s.limit is not None else 1)
                keys = (s.q, s.weights, s.keys, new.get(s.limit, s.limit) if s.limit is not None else None)
                made = edit.call(
                    SELECT_ROWS.overload, *keys, s.scale, self.ratio[name, s.chosen], s.top, size, s.blocks
                )
                new[s.chosen] = edit.item(made, 0)
                if s.made is not None:
                    new[s.made] = edit.item(made, 1)
            for a in sites.attend:
                self._attend(name, a, new)
            out = gm.graph.output_node()
            out.args = (torch.fx.node.map_arg(out.args[0], lambda n, new=new: new.get(n, n)),)  # type: ignore[misc]
            self._retype_outputs(name)

    def _attend(self, name: str, a: Attending, new: dict[Node, Node]) -> None:
        edit = Editor(self.program.blocks[name].graph, a.out)
        chosen = None if a.chosen is None else new.get(a.chosen, a.chosen)
        ratio = 1 if a.chosen is None else self.ratio[name, a.chosen]
        found = edit.call(
            *(SELECTED_ATTENTION.overload, a.q, a.latents, a.rows, chosen, a.sinks, a.scale),
            *(self.window[name, a.out], ratio),
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


def _gone(graph: torch.fx.Graph, sites: _Sites) -> set[Node]:
    """What nobody reads any more once the calls of a block are rewritten."""
    kept: set[Any] = {n for s in sites.select for n in (s.q, s.weights, s.keys)}
    kept |= {n for a in sites.attend for n in (a.q, a.latents, a.rows, a.sinks)}
    ends: set[Any] = {n for s in sites.select for n in (s.chosen, s.made)} | {a.out for a in sites.attend}
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in ends or (node.users and node not in kept and all(u in found for u in node.users)):
            found.add(node)
    return found
