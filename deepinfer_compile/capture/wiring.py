"""Layers that read from layers far below: how a program of all of them is made where only some were traced.

Sharing makes layers read results of layers that are not their neighbours, so that a chain does not say what goes where.
What each layer of the whole model reads is known from the record of what it does (`uniform`): which layer made it, and
as which of its results. The traced layers show how such a result is called in the graph: a layer's inputs from one
maker are the same tensors in the record and in the graph, those of one type and shape in the order in which they are
first read. Wherever the two do not agree, nothing is shown, and all layers are traced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node

from deepinfer_compile.capture.partition import PREFIX, SUFFIX, Cut, LayerPlan, Skeleton
from deepinfer_compile.capture.uniform import Doings, Result, Unit
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import tensor

ROUNDS = 4
"""How often layers are added to those that are traced before it is given up."""


def by_doings(plan: LayerPlan, did: Doings) -> LayerPlan:
    """A plan that traces the first layer of each kind, where layers are of one kind if they look and do the same,
    whatever layers they read from."""
    known: dict[Any, int] = {}
    kinds = tuple(
        known.setdefault((looks, unit.done, len(unit.reads)), len(known))
        for looks, unit in zip(plan.kinds, did.layers, strict=True)
    )
    return LayerPlan(plan.path, tuple(kinds.index(k) for k in range(len(known))), kinds)


def with_readers(plan: LayerPlan, did: Doings, few: Doings) -> LayerPlan:
    """The plan with a reader of each result that layers of a kind give in the model, but the traced one does not."""
    added: set[int] = set()
    for kind, needed in enumerate(_needed(plan, did)):
        if _template(plan, kind, needed, few) is not None:
            continue
        for number in needed:
            maker = next(i for i, k in enumerate(plan.kinds) if k == kind and number in did.read_of(i))
            reader = next(i for i, u in enumerate(did.units) if (maker, number) in u.reads)
            added |= {maker, min(reader, len(plan.kinds) - 1)}
    return replace(plan, kept=tuple(sorted({*plan.kept, *added})))


def _needed(plan: LayerPlan, did: Doings) -> list[set[int | str]]:
    """By kind, the results that some layer of it gives to others."""
    found: list[set[int | str]] = [set() for _ in range(max(plan.kinds) + 1)]
    for unit in did.units:
        for maker, number in unit.reads:
            if maker >= 0:
                found[plan.kinds[maker]].add(number)
    return found


def _template(plan: LayerPlan, kind: int, needed: set[int | str], few: Doings) -> int | None:
    """The traced layer of a kind of which every result that is needed is read."""
    mine = (j for j, layer in enumerate(plan.kept) if plan.kinds[layer] == kind)
    return next((j for j in mine if needed <= few.read_of(j)), None)


@dataclass(frozen=True)
class Wiring:
    """What the whole model does, and what it does with the traced layers only."""

    did: Doings
    few: Doings

    def connect(self, skeleton: Skeleton, plan: LayerPlan) -> None:
        """Build the skeleton of all layers. Raises UnsupportedConstruct where the trace does not show how."""
        pieces = skeleton.pieces
        known = self._known(pieces, len(plan.kept))
        names = {node: result for result, node in known.items()}
        if PREFIX in pieces:
            skeleton.piece(PREFIX, PREFIX)
        made: dict[Result, Node] = {r: skeleton.env[n] for r, n in known.items() if r[0] < 0}
        needed = _needed(plan, self.did)
        templates = [_template(plan, kind, wanted, self.few) for kind, wanted in enumerate(needed)]
        blocks: dict[int, str] = {}
        for layer, kind in enumerate(plan.kinds):
            j = templates[kind]
            if j is None:
                raise _unclear(f"not all that layers like {layer} give is read")
            piece = pieces[j]
            if kind not in blocks:
                blocks[kind] = skeleton.block(piece.gm, f"layer{len(blocks)}")
            reads = self._reads(piece, self.few.layers[j], self.did.layers[layer], known, made)
            rename = (f"{plan.path}.{j}.", f"{plan.path}.{layer}.")
            outs = skeleton.call(piece, reads, blocks[kind], rename, layer)
            made.update({(layer, names[n][1]): out for n, out in zip(piece.gives, outs)})
        if SUFFIX not in pieces:
            raise _unclear("nothing is done behind the layers")
        last = pieces[SUFFIX]
        skeleton.env.update(zip(last.reads, self._reads(last, self.few.last, self.did.last, known, made)))
        skeleton.piece(SUFFIX, SUFFIX)

    def _known(self, pieces: dict[Any, Cut], count: int) -> dict[Result, Node]:
        """The flat node of each result that a traced layer, or what comes behind them, reads."""
        maker = {n: j for j in range(count) for n in pieces[j].gives}
        known: dict[Result, Node] = {}
        for key, unit in zip((*range(count), SUFFIX), self.few.units, strict=True):
            if key not in pieces:
                raise _unclear("a layer leaves no trace")
            for j in range(-1, count):
                results = [r for r in unit.reads if r[0] == j]
                nodes = [n for n in pieces[key].reads if maker.get(n, -1) == j]
                if len(results) != len(nodes):
                    raise _unclear(f"{key} reads {len(results)} results of layer {j}, the graph has {len(nodes)}")
                for result in results:
                    node = next((n for n in nodes if self._fits(result, n)), None)
                    if node is None or known.setdefault(result, node) is not node:
                        raise _unclear(f"what {key} reads of layer {j} is in another order in the graph")
                    nodes.remove(node)
        if len(set(known.values())) != len(known) or any(n not in known.values() for n in maker):
            raise _unclear("results and values of the graph do not correspond")
        return known

    def _fits(self, result: Result, node: Node) -> bool:
        held = self.few.shapes.get(result)
        if held is None:  # an input, which has a name
            return node.op == "placeholder" and node.name == result[1]
        dtype, shape = held
        found = tensor(node)
        sizes = zip(found.shape, shape)
        return (found.dtype, found.dim()) == (dtype, len(shape)) and all(
            isinstance(a, torch.SymInt) or a == b for a, b in sizes
        )

    def _reads(
        self, piece: Cut, traced: Unit, unit: Unit, known: dict[Result, Node], made: dict[Result, Node]
    ) -> list[Node]:
        """What a layer reads in the whole model, in the order in which its kind's block takes it."""
        places = {known[r]: i for i, r in enumerate(traced.reads)}
        results = [unit.reads[places[n]] for n in piece.reads]
        absent = next((r for r in results if r not in made), None)
        if absent is not None:
            raise _unclear(f"no traced layer reads result {absent[1]} of layer {absent[0]}")
        return [made[r] for r in results]


def _unclear(reason: str) -> UnsupportedConstruct:
    return UnsupportedConstruct(construct=f"what flows between layers cannot be told: {reason}", fix="trace all layers")


__all__ = ["ROUNDS", "Wiring", "by_doings", "with_readers"]
