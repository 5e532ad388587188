"""Spread the experts of every layer over ranks: rows go to the rank that holds the chosen expert, and come back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.fx import Graph, Node

from deepinfer_compile.carving import Key, Piece, cut, replace_block
from deepinfer_compile.derivation import derivation
from deepinfer_compile.eplb.layout import check_sizes, places
from deepinfer_compile.errors import BadOption, UnsupportedConstruct
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, fake_mode_of, is_op, make_module, place_of, tensor
from deepinfer_compile.ops import COMBINE, DISPATCH, EXPERTS
from deepinfer_compile.passbase import NONE, PassContext, register
from deepinfer_compile.program import Program, WeightRef
from deepinfer_compile.prune import prune
from deepinfer_compile.settings import ExpertPlan
from deepinfer_compile.skeleton import fresh, program_input

A = torch.ops.aten
WEIGHTS = ("w13", "w2", "b13", "b2")
TABLES = ("slots", "counts", "offsets", "rank", "lanes")
ROWS = ("rows", "local", "row", "sizes")
EXAMPLE_LANES, EXAMPLE_COPIES = 7, 3


@register
@dataclass(frozen=True)
class PartitionExperts:
    """Send rows to the ranks that hold their experts, and let a rank compute its own slots only.

    Before: `y = layer(h, w13[E,2I,H], w2[E,H,I])`, in it `o = experts(x, ids, weights, w13, w2, ...)`
    After:  `x, ids, weights, r = layer_before(h)`
            `rows, local, row, sizes = dispatch(x, ids, expert_slots_0, expert_counts_0, expert_offsets, expert_rank)`
            `s = layer_beside(r)`, what does not depend on the experts, as the shared one
            `m = experts(rows, local, 1, w13[room,2I,H], w2[room,H,I], ...)`
            `y = layer_after(combine(m, row, weights, sizes), s)`
    Placement and rank are inputs; room = ceil(slots / ranks) is not. Runs with the setting `experts`, whose plan may be
    another one for programs that decode. form: how rows travel (`ops/parallel.py`). Weights that the graph stacks or
    joins become tensors of their own, with a recipe.
    Raises BadOption for slots that do not fit, and for a model without experts; UnsupportedConstruct for layers of
    different sizes, and for weights that are more than stacked, joined, cast or transposed.
    """

    name: ClassVar[str] = "partition-experts"
    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CACHED, Fact.ROWWISE})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    form: Literal["exact", "static"] = "exact"

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        plans: ExpertPlan | None = ctx.settings.get("experts")
        if plans is None:
            return program
        plan = plans.of(program.name)
        work = _Work(program, plan, self.form)
        while (found := work.next()) is not None:
            block, node = found
            ctx.graph, ctx.layers = block, tuple(program.layers_of(block))
            if not ctx.claim(node, f"{work.slots} slots over {plan.ranks} ranks, {work.room} a rank, {self.form}"):
                return program
            work.partition(block, node)
        prune(program)
        program.info["experts"] = work.info()
        return program


class _Work:
    """One program while its experts are spread. A call's first row in the tables, and an experts node's place behind
    it, are kept in their metadata, which the pieces of a block inherit."""

    def __init__(self, program: Program, plan: ExpertPlan, form: str) -> None:
        self.program, self.ranks, self.form = program, plan.ranks, form
        self.mode = fake_mode_of(program.skeleton.graph)
        self.layers = 0
        found: list[Node] = []
        for call in program.calls():
            inside = [n for n in program.blocks[str(call.target)].graph.nodes if is_op(n, EXPERTS.overload)]
            for place, node in enumerate(inside):
                node.meta["expert_place"] = place
            call.meta["expert_row"] = self.layers
            self.layers += len(inside)
            found += inside
        self.experts, self.chosen = _sizes(found, plan)
        self.slots = self.experts if plan.slots is None else plan.slots
        check_sizes(self.experts, self.slots, plan.ranks)
        self.room = places(self.slots, plan.ranks)
        with self.mode:
            offsets, rank = torch.empty(self.ranks + 1, dtype=torch.int64), torch.empty(1, dtype=torch.int64)
            self.counts = torch.empty(self.experts, dtype=torch.int64)
        lanes = fresh(program, "lanes", (EXAMPLE_LANES,), torch.uint8, (0,))
        self.table = fresh(program, "expert_slots", (self.experts, EXAMPLE_COPIES), torch.int64, (1,))
        self.shared: dict[Key, Node] = {
            "offsets": program_input(program, "expert_offsets", offsets),
            "rank": program_input(program, "expert_rank", rank),
            "lanes": program_input(program, "lanes", lanes),
        }

    def info(self) -> dict[str, int]:
        """What the loader must know."""
        names = ("ranks", "slots", "room", "experts", "layers", "chosen")
        return {name: getattr(self, name) for name in names}

    def next(self) -> tuple[str, Node] | None:
        """A block with experts that are not spread yet, and the first of them."""
        for name, gm in self.program.blocks.items():
            for node in gm.graph.nodes:
                if "expert_place" in node.meta:
                    return name, node
        return None

    def partition(self, block: str, node: Node) -> None:
        """Put pieces in place of a block, for every call of it."""
        extra = {call: self._given(call, node) for call in self.program.calls() if call.target == block}
        x, ids, weights = (a for a in node.args[:3] if isinstance(a, Node))
        before, beside, after = cut(self.program.blocks[block], node, block, (x, ids, weights))
        given: dict[Key, Tensor] = {key: tensor(n) for key, n in next(iter(extra.values())).items()}
        sent = self._piece(f"{block}_dispatch", given, [x, ids, *TABLES], ROWS, self._dispatch)
        own = [name for name in WEIGHTS if name in given]
        local = self._piece(f"{block}_experts", given, [*ROWS[:2], *own], ["made"], lambda e, h: _local(e, h, node))
        back = self._piece(f"{block}_combine", given, ["made", "row", weights, "sizes"], [node], _combine)
        pieces = [p for p in (before, sent, beside, local, back, after) if p is not None]
        called = replace_block(self.program, block, pieces, extra)
        split = self.program.info.get("split")
        if split is not None:
            parts = {name: part for old, part in split["parts"].items() for name in called.get(old, [old])}
            self.program.info["split"] = {**split, "parts": parts}

    def _given(self, call: Node, node: Node) -> dict[Key, Node]:
        """Inputs of the program that the pieces read in place of one call: tables, and the weights of slots."""
        row = call.meta["expert_row"] + node.meta["expert_place"]
        found = {
            **self.shared,
            "slots": program_input(self.program, f"expert_slots_{row}", self.table),
            "counts": program_input(self.program, f"expert_counts_{row}", self.counts),
        }
        for name, operand in zip(WEIGHTS, node.args[3:7]):
            if isinstance(operand, Node):
                found[name] = self._weight(call, operand, row, name)
        return found

    def _weight(self, call: Node, operand: Node, row: int, name: str) -> Node:
        """The input of the program that holds a weight of the rank's slots."""
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        refs = {h: self.program.weights.get(getattr(a, "name", "")) for h, a in zip(holes, call.args)}
        whole = tensor(operand)
        with self.mode:
            held = torch.empty((self.room, *whole.shape[1:]), dtype=whole.dtype)
        ref = refs.get(operand)
        if ref is None:
            recipe, parts = derivation(operand, refs)
            shape = tuple(int(d) for d in whole.shape)
            ref = WeightRef(f"{parts[0].name}.{name}", whole.dtype, shape, None, None, recipe, parts)
        node = program_input(self.program, f"expert_{name}_{row}", held)
        self.program.weights[node.name] = replace(ref, shape=tuple(held.shape), experts=(row, self.experts))
        return node

    def _piece(
        self,
        name: str,
        given: dict[Key, Tensor],
        reads: Sequence[Key],
        gives: Sequence[Key],
        make: Callable[[Editor, dict[Key, Node]], list[Node]],
    ) -> Piece:
        """A new block. given: the value of each thing that can be read; what is given is added."""
        graph = Graph()
        holes: dict[Key, Node] = {}
        for key in reads:
            holes[key] = graph.placeholder(key.name if isinstance(key, Node) else key)
            holes[key].meta = {"val": tensor(key) if isinstance(key, Node) else given[key]}
        out = graph.output(())
        edit = Editor(graph, out)
        edit.mode = self.mode
        made = make(edit, holes)
        given.update(zip(gives, (tensor(n) for n in made), strict=True))
        out.args = (made[0] if len(made) == 1 else tuple(made),)
        return Piece(name, make_module(torch.nn.Module(), graph), tuple(reads), tuple(gives))

    def _dispatch(self, edit: Editor, holes: dict[Key, Node]) -> list[Node]:
        sent = edit.call(DISPATCH.overload, *holes.values(), self.room, self.form)
        return [edit.item(sent, i) for i in range(len(ROWS))]


def _sizes(found: Sequence[Node], plan: ExpertPlan) -> tuple[int, int]:
    """Experts of a layer, and how many a token chooses. Raises BadOption, UnsupportedConstruct."""
    if not found:
        fix = "leave it out, or see with `deepinfer-compile explain` why no experts were found"
        raise BadOption(name="experts", value=plan, reason="the model has no experts", fix=fix)
    sizes = {(int(_shape(n.args[3])[0]), int(_shape(n.args[1])[1])) for n in found}
    if len(sizes) > 1:
        construct = f"layers with different numbers of experts, or of chosen ones: {sorted(sizes)}"
        raise UnsupportedConstruct(construct=construct, fix="leave out `experts`", where=place_of(found[0]))
    return sizes.pop()


def _shape(operand: Any) -> torch.Size:
    return tensor(operand).shape


def _local(edit: Editor, holes: dict[Key, Node], node: Node) -> list[Node]:
    """The experts of a rank's slots, without the weights of choices."""
    one = edit.call(A.ones_like.default, holes["local"], dtype=tensor(node.args[2]).dtype)  # type: ignore[arg-type]
    weights = [holes.get(name) for name in WEIGHTS]
    return [edit.call(EXPERTS.overload, holes["rows"], holes["local"], one, *weights, *node.args[7:])]


def _combine(edit: Editor, holes: dict[Key, Node]) -> list[Node]:
    return [edit.call(COMBINE.overload, *holes.values())]
