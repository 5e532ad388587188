"""Cut a flat captured graph into prefix, one block per distinct layer, and suffix; instantiate the skeleton.

A node belongs to layer j if its module stack says so, or if it only feeds layer j. Blocks of two layers are the same
block only if their graphs are equal as text, constants and shapes included. When capture traced one layer of each kind
instead of all (`plan.kept`), the other layers are instances of their kind's block, and what flows from layer to layer
is read off the traced ones.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.capture.export import Exported
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, make_module, remove_dead, to_text, value
from deepinfer_compile.program import Program, WeightRef

PREFIX, SUFFIX = "prefix", "suffix"


@dataclass(frozen=True)
class LayerPlan:
    """Which layers the traced model kept.

    path: dotted name of the layer list. kept[j] is the original index of traced layer j. kinds[i] names the kind of
    original layer i.
    """

    path: str
    kept: tuple[int, ...]
    kinds: tuple[int, ...]

    @property
    def complete(self) -> bool:
        """Whether every layer was traced."""
        return len(self.kept) == len(self.kinds)


@dataclass
class Cut:
    """One piece of the flat graph: its block, the flat nodes it reads, and the flat nodes it gives."""

    gm: GraphModule
    reads: list[Node]
    gives: list[Node]
    weights: dict[str, str]
    """block placeholder -> flat weight placeholder"""


Connect = Callable[["Skeleton", LayerPlan], None]


def partition(
    exported: Exported, plan: LayerPlan | None, name: str, info: dict[str, Any], connect: Connect | None = None
) -> Program:
    """Build the two-level program. `plan` None: the whole graph becomes one prefix block.

    connect: puts the layers of a plan that is not complete together; None for layers that form a chain.
    """
    flat = exported.gm.graph
    where = _assign(flat, plan)
    count = len(plan.kept) if plan else 0
    pieces: dict[Any, Cut] = {}
    for key in (PREFIX, *range(count), SUFFIX):
        nodes = [n for n in flat.nodes if where.get(n) == key]
        if nodes:
            pieces[key] = _cut(nodes, exported, plan, key)
    builder = Skeleton(exported, pieces, name, info)
    if plan is None or plan.complete:
        builder.as_traced()
    elif connect is not None:
        connect(builder, plan)
    else:
        builder.instantiate(plan)
    return builder.program()


def _layer_index(node: Node, pattern: re.Pattern[str]) -> int | None:
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        found = pattern.search(str(path))
        if found:
            return int(found.group(1) or found.group(2))
    return None


def _assign(flat: Graph, plan: LayerPlan | None) -> dict[Node, Any]:
    """Piece of every computing node. Non-layer nodes between layers go to the first layer that needs them."""
    calls = [n for n in flat.nodes if n.op not in ("placeholder", "output")]
    if plan is None:
        return dict.fromkeys(calls, PREFIX)
    stem = re.escape(plan.path)
    pattern = re.compile(rf"(?:^|\.){stem}(?:\.(\d+)$|\.slice\([^)]*\)\.(\d+)$)")
    where: dict[Node, Any] = {}
    for node in calls:
        index = _layer_index(node, pattern)
        if index is not None:
            where[node] = index
    after: set[Node] = set()
    for node in calls:
        if node in where or any(i in after for i in node.all_input_nodes):
            after.add(node)
    for node in reversed(calls):
        if node in where or node not in after:
            continue
        feeds = [where[u] for u in node.users if u in where and where[u] != SUFFIX]
        where[node] = min(feeds) if feeds else SUFFIX
    for node in calls:
        where.setdefault(node, PREFIX)
    return where


def _cut(nodes: list[Node], exported: Exported, plan: LayerPlan | None, key: Any) -> Cut:
    """Copy one piece into a graph of its own, reads first, weights after."""
    inside = set(nodes)
    external = list(dict.fromkeys(i for n in nodes for i in n.all_input_nodes if i not in inside))
    weights = [n for n in external if n.name in exported.weights]
    reads = [n for n in external if n.name not in exported.weights and not isinstance(value(n), torch.SymInt)]
    sizes = [n for n in external if isinstance(value(n), torch.SymInt)]
    gives = [n for n in nodes if any(u not in inside for u in n.users) and not isinstance(value(n), torch.SymInt)]
    graph, env, bound = Graph(), {}, {}
    for i, node in enumerate(reads):
        env[node] = graph.placeholder(f"in{i}")
        env[node].meta = {"val": value(node)}
    layer = f"{plan.path}.{key}." if plan is not None and isinstance(key, int) else ""
    for node in weights:
        name = exported.weights[node.name].name
        short = name[name.index(layer) + len(layer) :] if layer and layer in name else name
        env[node] = graph.placeholder(re.sub(r"\W", "_", short))
        env[node].meta = {"val": value(node), "weight": short}
        bound[env[node].name] = node.name
    out = graph.output(())
    for node in sizes:
        env[node] = _size_from(node, env, Editor(graph, out))
    for node in nodes:
        with graph.inserting_before(out):
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            env[node] = graph.create_node(node.op, node.target, args, kwargs)
        env[node].meta = {k: v for k, v in node.meta.items() if k in ("val", "nn_module_stack", "stack_trace")}
    result = [env[n] for n in gives]
    out.args = (result[0],) if len(result) == 1 else (tuple(result),)
    remove_dead(graph)
    return Cut(make_module(torch.nn.Module(), graph), reads, gives, bound)


def _size_from(node: Node, env: dict[Node, Node], editor: Editor) -> Node:
    """Recompute a symbolic size inside a piece from an input that has it, or a part of it, as a dimension."""
    wanted: Any = value(node).node.expr
    shapes: list[tuple[Node, Any]] = [(n, v.shape) for n in env.values() if isinstance(v := value(n), torch.Tensor)]
    sizes = [(n, i, d.node.expr) for n, s in shapes for i, d in enumerate(s) if isinstance(d, torch.SymInt)]
    for inner, dim, size in sizes:
        factor = wanted / size
        if factor == 1:
            return editor.call(torch.ops.aten.sym_size.int, inner, dim)
        if factor.is_Integer:
            return editor.call(operator.mul, editor.call(torch.ops.aten.sym_size.int, inner, dim), int(factor))
        more = (wanted - size).simplify()
        if more.is_Integer:
            return editor.call(operator.add, editor.call(torch.ops.aten.sym_size.int, inner, dim), int(more))
    raise UnsupportedConstruct(
        construct=f"size {wanted} crosses a layer boundary and no tensor input has it", fix="report the model"
    )


class Skeleton:
    """Builds the skeleton graph and the block dictionary."""

    def __init__(self, exported: Exported, pieces: dict[Any, Cut], name: str, info: dict[str, Any]) -> None:
        self.exported, self.pieces, self.name, self.info = exported, pieces, name, info
        self.graph = Graph()
        self.blocks: dict[str, GraphModule] = {}
        self.texts: dict[str, str] = {}
        self.weights: dict[str, WeightRef] = {}
        self.holes: dict[str, Node] = {}
        self.env: dict[Node, Node] = {}
        for node in exported.gm.graph.nodes:
            if node.op == "placeholder" and node.name in exported.inputs:
                self.env[node] = self.graph.placeholder(node.name)
                self.env[node].meta = dict(node.meta)
        self.tail = self.graph.output(())
        self.first = self.tail
        """The first node that is no input: weights are inserted before it."""

    def weight(self, ref: WeightRef, meta: dict[str, Any]) -> Node:
        """The skeleton input for a weight, made once a name."""
        if ref.name not in self.holes:
            with self.graph.inserting_before(self.first):
                node = self.graph.placeholder("w_" + re.sub(r"\W", "_", ref.name))
            node.meta = {"val": meta["val"], "weight": ref.name}
            self.holes[ref.name] = node
            self.weights[node.name] = ref
        return self.holes[ref.name]

    def block(self, gm: GraphModule, wanted: str) -> str:
        """Name of the block with this text, added if new."""
        text = to_text(gm)
        for name, known in self.texts.items():
            if known == text:
                return name
        name = wanted
        self.texts[name], self.blocks[name] = text, gm
        return name

    def call(
        self, piece: Cut, reads: list[Node], block: str, rename: tuple[str, str] | None, layer: int | None
    ) -> list[Node]:
        """Insert one block call; returns a node per output."""
        flat = {n.name: n for n in self.exported.gm.graph.nodes if n.op == "placeholder"}
        args = list(reads)
        for name in piece.weights.values():
            ref = self.exported.weights[name]
            if rename is not None:
                ref = WeightRef(ref.name.replace(rename[0], rename[1], 1), ref.dtype, ref.shape, ref.value)
            args.append(self.weight(ref, flat[name].meta))
        with self.graph.inserting_before(self.tail):
            node = self.graph.call_module(block, tuple(args))
        self.first = node if self.first is self.tail else self.first
        vals = [value(n) for n in piece.gives]
        node.meta = {"val": vals[0] if len(vals) == 1 else tuple(vals), "layer": layer}
        if len(vals) == 1:
            return [node]
        return [Editor(self.graph, self.tail).item(node, i) for i in range(len(vals))]

    def piece(self, key: Any, wanted: str, layer: int | None = None) -> None:
        """Insert a piece where it was traced."""
        piece = self.pieces[key]
        block = self.block(piece.gm, wanted)
        outs = self.call(piece, [self.env[n] for n in piece.reads], block, None, layer)
        self.env.update(zip(piece.gives, outs))

    def as_traced(self) -> None:
        """Every layer was traced: keep the edges as they are, and the layers in the order in which they are called."""
        waiting = list(self.pieces)
        while waiting:
            key = next((k for k in waiting if all(n in self.env for n in self.pieces[k].reads)), None)
            if key is None:
                raise UnsupportedConstruct(construct="a layer is called again after others", fix="do not cut layers")
            waiting.remove(key)
            layer = isinstance(key, int)
            wanted = f"layer{len([b for b in self.blocks if b.startswith('layer')])}" if layer else key
            self.piece(key, wanted, key if layer else None)

    def instantiate(self, plan: LayerPlan) -> None:
        """Only some layers were traced: repeat each kind's block along the chain."""
        if PREFIX in self.pieces:
            self.piece(PREFIX, PREFIX)
        carried = _carried(self.pieces, len(plan.kept), plan)
        template = {plan.kinds[layer]: j for j, layer in reversed(list(enumerate(plan.kept)))}
        for j, layer in enumerate(plan.kept):
            if to_text(self.pieces[j].gm) != to_text(self.pieces[template[plan.kinds[layer]]].gm):
                raise UnsupportedConstruct(construct=f"layer {layer} differs from its kind", fix="trace all layers")
        blocks = {
            kind: self.block(self.pieces[j].gm, f"layer{i}") for i, (kind, j) in enumerate(sorted(template.items()))
        }
        flow = [self.env[n] for n in carried[0].values()]
        for layer, kind in enumerate(plan.kinds):
            j = template[kind]
            piece = self.pieces[j]
            places = list(carried[j])
            if [_kind(n) for n in flow] != [_kind(piece.reads[i]) for i in places]:
                construct = f"layer {layer} is given something else than the layer of its kind that was traced"
                raise UnsupportedConstruct(construct=construct, fix="trace all layers")
            reads = [flow[places.index(i)] if i in carried[j] else self.env[n] for i, n in enumerate(piece.reads)]
            rename = (f"{plan.path}.{j}.", f"{plan.path}.{layer}.")
            flow = self.call(piece, reads, blocks[kind], rename, layer)
        last = self.pieces[len(plan.kept) - 1]
        self.env.update(zip(last.gives, flow))
        if SUFFIX in self.pieces:
            self.piece(SUFFIX, SUFFIX)

    def program(self) -> Program:
        """The finished program."""
        final = next(n for n in self.exported.gm.graph.nodes if n.op == "output").args[0]
        results = [self.env[n] for n in final]  # type: ignore[union-attr]
        self.tail.args = (results[0] if len(results) == 1 else tuple(results),)
        remove_dead(self.graph)
        root = torch.nn.Module()
        for name, gm in self.blocks.items():
            root.add_module(name, gm)
        skeleton = make_module(root, self.graph)
        facts = frozenset({Fact.SHAPES, Fact.FUNCTIONAL})
        return Program(self.name, skeleton, self.blocks, self.weights, self.info, facts=facts)


def _kind(node: Node) -> tuple[Any, ...]:
    held: Any = value(node)
    return (getattr(held, "dtype", type(held)), len(getattr(held, "shape", ())))


def _carried(pieces: dict[Any, Cut], count: int, plan: LayerPlan) -> list[dict[int, Node]]:
    """For each traced layer, its input positions that come from the layer before: position -> flat node.

    The first layer's are the prefix values at the positions where the other layer of its kind reads the chain, or,
    where it is the only one of its kind, the one prefix value of the right shape that no other layer reads.
    """
    found: list[dict[int, Node]] = [{}]
    for j in range(1, count):
        before = pieces[j - 1].gives
        found.append({i: n for i, n in enumerate(pieces[j].reads) if n in before})
        if [n for n in before if n not in found[j].values()]:
            raise UnsupportedConstruct(construct="a layer's output skips the next layer", fix="trace all layers")
        foreign = [n for k in range(j - 1) for n in pieces[j].reads if n in pieces[k].gives]
        if foreign:
            raise UnsupportedConstruct(
                construct="a layer reads from a layer that is not its neighbour", fix="trace all"
            )
    kind = plan.kinds[plan.kept[0]]
    twin = next((j for j in range(1, count) if plan.kinds[plan.kept[j]] == kind), None)
    first = pieces[0]
    if twin is not None and len(pieces[twin].reads) == len(first.reads):
        found[0] = {i: first.reads[i] for i in found[twin]}
    else:
        shapes = [str(value(n)) for n in first.gives]
        others = {n for j in range(1, count) for n in pieces[j].reads}
        found[0] = {i: n for i, n in enumerate(first.reads) if str(value(n)) in shapes and n not in others}
    if len(found[0]) != len(first.gives):
        raise UnsupportedConstruct(
            construct="what enters the first layer cannot be told from the rest", fix="trace all"
        )
    return found
