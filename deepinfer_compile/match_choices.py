"""What masks of chosen rows mean, call by call of a program's blocks, since a mask may be another layer's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch.fx import Node

from deepinfer_compile.graph import copy_module
from deepinfer_compile.match_moe import NearMiss
from deepinfer_compile.match_selected import Attending, Positions, Selection, attendings, made_by, selections
from deepinfer_compile.program import Program


class Sites:
    """What was found in a block."""

    def __init__(self, nodes: list[Node]) -> None:
        self.select: list[Selection] = selections(nodes)
        self.attend: list[Attending] = attendings(nodes)


@dataclass
class Meaning:
    """Of a call of a block, by the name of a node in it. ratio: tokens of a row, of masks of rows and of candidates;
    block: rows of a candidate, of masks of these; window: of results of attention."""

    ratio: dict[str, int] = field(default_factory=dict)
    block: dict[str, int] = field(default_factory=dict)
    window: dict[str, int] = field(default_factory=dict)


class Choices:
    """Finds the meaning of every call. Raises NearMiss where one is not known."""

    def __init__(self, program: Program, found: Mapping[str, Sites]) -> None:
        self.program = program
        self.positions = Positions(program)
        self.meaning = {call: Meaning() for call in program.calls()}
        for call in self.meaning:
            for s in found[str(call.target)].select:
                self._select(call, s)
            for a in found[str(call.target)].attend:
                self._attend(call, a)

    def _select(self, call: Node, s: Selection) -> None:
        held, ratio = self.meaning[call], self.positions.ratio(call, s.numbers, s.seen)
        held.ratio[s.chosen.name] = ratio
        if s.made is not None:
            held.ratio[s.made.name] = ratio
            held.block[s.made.name] = s.block
        if s.limit is not None:
            there, name = self._maker(call, s.limit)
            if there.ratio.get(name) != ratio or name not in there.block:
                raise NearMiss("candidates are not those of another choice among the same rows")
            held.block[s.limit.name] = there.block[name]

    def _attend(self, call: Node, a: Attending) -> None:
        held = self.meaning[call]
        held.window[a.out.name] = self.positions.window(call, a.mask)
        if a.chosen is not None:
            there, name = self._maker(call, a.chosen)
            if name not in there.ratio:
                raise NearMiss("a mask of rows is not made by a choice that is known")
            held.ratio[a.chosen.name] = there.ratio[name]

    def _maker(self, call: Node, node: Node) -> tuple[Meaning, str]:
        """The call and the node that make what a node of a call is. Raises NearMiss."""
        if node.op != "placeholder":
            return self.meaning[call], node.name
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        source = call.args[holes.index(node)]
        if not isinstance(source, Node) or source.op == "placeholder":
            raise NearMiss(f"a mask of rows comes from {source}")
        return self._maker(*made_by(self.program, source))

    def separate(self) -> dict[str, Meaning]:
        """Give calls of one block that mean different things blocks of their own. Returns what each block means."""
        kinds: dict[str, list[tuple[str, Meaning]]] = {}
        for call, held in self.meaning.items():
            known = kinds.setdefault(str(call.target), [])
            name = next((name for name, other in known if other == held), None)
            if name is None:
                name = self._copied(call, len(known)) if known else str(call.target)
                known.append((name, held))
            call.target = name
        return {name: held for known in kinds.values() for name, held in known}

    def _copied(self, call: Node, number: int) -> str:
        name = f"{call.target}_kind{number}"
        self.program.blocks[name] = copy_module(self.program.blocks[str(call.target)])
        self.program.skeleton.add_module(name, self.program.blocks[name])
        return name
