"""Where a decoder stops needing every token of a prompt: the lowest cut above which global keys come from below it.

In a causal encoder-decoder the upper layers attend to keys and values that were all made of one value of the lower
half, and to windows of their own. A prompt then needs the lower half for every token and the upper half for its last
rows alone. The cut is read off the graph: what every global attention above it reads must be a row-wise function of
what lies at or below it. The values that cross are the cheapest set that everything above can be computed from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx
import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import NoBoundary
from deepinfer_compile.graph import (
    argument,
    is_op,
    place_of,
    remove_dead,
    shape_text,
    strip,
    target_name,
    tensor,
    value,
)
from deepinfer_compile.match_attention import Heads, ungrouped
from deepinfer_compile.mixing import Mixing, classify
from deepinfer_compile.ops import ATTENTION, EXPERTS
from deepinfer_compile.pairs import Edge
from deepinfer_compile.program import Program

A = torch.ops.aten
WORK = (
    *(A.linear.default, A.matmul.default, A.mm.default, A.bmm.default, A.addmm.default, A.einsum.default),
    *(A.embedding.default, EXPERTS.overload),
)
"""Products and look-ups, which are not made twice to let fewer bytes cross."""
REPEATS = (
    *(A.repeat_interleave.self_int, A.expand.default, A.reshape.default, A.unsqueeze.default, A.transpose.int),
    A.select.int,
)
"""What may stand between keys as they are made and as an attention reads them."""
VIEWS = (A.unsqueeze.default, A.squeeze.dim, A.reshape.default, A.transpose.int)
FIXES = {
    "decoder only": "build it without a split: every layer needs every token of the prompt",
    "source above": "let that layer read the keys and values that the layers below it share",
    "mixing above": "move the look-back below the boundary, or build without a split",
    "drafts straddle": "take all draft features from one side of the boundary",
    "not causal": "mask later tokens; a prompt can be read once only if no token sees later ones",
    "unknown mixing": "express it through attention or a bounded look-back, or build without a split",
    "no narrow cut": "report the model: the values between the halves cannot be picked by rows",
}
"""What to try, by the kind of refusal."""


@dataclass(frozen=True)
class Crossing:
    """A value that goes from the encoder to the decoder, a row a token along `dim`; bytes: of one row."""

    name: str
    layer: int | None
    place: str
    shape: str
    dim: int
    bytes: int


@dataclass(frozen=True)
class GlobalSource:
    """Keys and values that attention above the boundary reads for all tokens: names of the nodes that make them, where,
    and the layers of the attentions that read them."""

    names: tuple[str, ...]
    layer: int | None
    place: str
    readers: tuple[int | None, ...]


@dataclass(frozen=True)
class Sides:
    """The flat graph and which of its calls each part computes. A call may be in several parts.

    origins: the block call and the node in the block that a flat call stands for. crossing: nodes whose rows the
    decoder gets. whole: operands, each with the call of the decoder that reads it for all tokens; globals: these nodes.
    """

    flat: GraphModule
    origins: Mapping[Node, tuple[Node, Node]]
    mixing: Mapping[Node, Mixing]
    encoder: frozenset[Node]
    boundary: frozenset[Node]
    decoder: frozenset[Node]
    crossing: tuple[Node, ...]
    whole: frozenset[Edge]
    globals: tuple[Node, ...]


@dataclass(frozen=True)
class Boundary:
    """A cut of a program in two.

    below, above: layers whose attention is in the encoder, in the decoder. windows: of the window attentions above, in
    order. halo: rows at the end of a prompt that the decoder must run to give the last one exactly.
    """

    crossing: tuple[Crossing, ...]
    sources: tuple[GlobalSource, ...]
    below: tuple[int, ...]
    above: tuple[int, ...]
    windows: tuple[int, ...]
    halo: int
    why: str
    sides: Sides = field(repr=False, compare=False)

    @property
    def layer(self) -> int | None:
        """The first layer of the decoder; None where capture cut no layers."""
        return self.above[0] if self.above else None


def find_boundary(program: Program) -> Boundary:
    """The boundary of a program in which attention is raised and reads no caches yet. Raises NoBoundary."""
    origins: dict[Node, tuple[Node, Node]] = {}
    flat = program.flatten(origins)
    _share_heads(flat)
    return _Search(flat, origins, classify(flat, program)).boundary()


def _share_heads(flat: GraphModule) -> None:
    """Let attention read keys and values as they are made, not as other layers were handed them, repeated by heads."""
    for node in flat.graph.nodes:
        if not is_op(node, ATTENTION.overload):
            continue
        k, v = (ungrouped(Heads(argument(node, name))) for name in ("k", "v"))
        if not (k.turned or v.turned) and tensor(k.node).shape[1] == tensor(v.node).shape[1]:
            node.args = (node.args[0], k.node, v.node, *node.args[3:])
    remove_dead(flat.graph)


class _Search:
    """One flat graph, its mixing calls, and the questions asked of them."""

    def __init__(self, flat: GraphModule, origins: dict[Node, tuple[Node, Node]], mixing: dict[Node, Mixing]) -> None:
        self.flat, self.origins, self.mixing = flat, origins, mixing
        self.order = {n: i for i, n in enumerate(flat.graph.nodes)}
        out: object = next(n for n in reversed(flat.graph.nodes) if n.op == "output").args[0]
        self.outputs = [o for o in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(o, Node)]
        self.attention = [n for n, m in mixing.items() if m.keys]
        self.globals = [n for n in self.attention if mixing[n].kind == "causal"]
        self.whole = frozenset[Edge]()

    def boundary(self) -> Boundary:
        """The lowest cut. Raises NoBoundary."""
        self._check_known()
        below = self.before(k for g in self.globals for k in self.mixing[g].keys)
        above = [g for g in self.globals if g not in below]
        self._check_shared(above, below)
        self._check_window(below)
        self.whole = frozenset(edge for g in above for edge in self.mixing[g].reads)
        keys = sorted({k for k, _ in self.whole}, key=self.order.__getitem__)
        crossing = self._narrowest(below, keys, self.outputs)
        self._check_drafts(below, keys, crossing)
        sides = self._sides(below, keys, crossing)
        self._check_history(sides)
        return self._report(above, below, sides)

    def before(self, nodes: Iterable[Node], stops: Iterable[Node] = ()) -> set[Node]:
        """The given nodes and all they are computed from; stops are not entered, and not part of it."""
        left, found, held = list(nodes), set[Node](), set(stops)
        while left:
            node = left.pop()
            if node in found or node in held:
                continue
            found.add(node)
            left.extend(node.all_input_nodes)
        return found

    def layer(self, node: Node) -> int | None:
        """The layer of the call that a node is part of."""
        found = self.origins.get(node)
        layer: int | None = found[0].meta.get("layer") if found else None
        return layer

    def place(self, node: Node) -> str:
        """Where in the user's model a node is; blocks are shared by layers, so the layer is said, too."""
        layer = self.layer(node)
        return place_of(node) if layer is None else f"layer {layer}: {place_of(node)}"

    def refuse(self, kind: str, reason: str, node: Node | None) -> NoBoundary:
        """The error for a node."""
        where = "" if node is None else self.place(node)
        return NoBoundary(kind=kind, reason=reason, fix=FIXES[kind], where=where)

    # -- what stands against a split ----------------------------------------------------------------------------------

    def _check_known(self) -> None:
        for node, mix in self.mixing.items():
            if mix.kind in ("unknown", "not causal"):
                kind = "unknown mixing" if mix.kind == "unknown" else mix.kind
                raise self.refuse(kind, f"{node.name} ({target_name(node)}): {mix.reason}", node)

    def _check_shared(self, above: list[Node], below: set[Node]) -> None:
        """Some attention above must read keys that are older than its queries; else every cache is a layer's own."""
        if any(self._is_late(g, below) for g in above):
            return
        shared = [g for g in self.globals if self._is_late(g, self.before(self.mixing[g].keys))]
        last = self.globals[-1] if self.globals else None
        if shared and last is not None:
            reader = self.layer(shared[-1])
            reason = (
                f"{last.name} reads keys that its own layer makes, above layers that share theirs (the last of them is "
                f"layer {reader}), so every layer below it needs every token"
            )
            raise self.refuse("source above", reason, last)
        reason = "every global attention reads keys that its own layer makes" if last else "no attention is global"
        raise self.refuse("decoder only", reason, last)

    def _is_late(self, node: Node, known: set[Node]) -> bool:
        """Whether a global attention's own rows are made of mixing that is not in `known`."""
        reads, left, seen = self.mixing[node].reads, [node], set[Node]()
        while left:
            user = left.pop()
            for operand in user.all_input_nodes:
                if operand in seen or (operand, user) in reads:
                    continue
                seen.add(operand)
                left.append(operand)
        return any(n not in known and self.mixing[n].mixes for n in seen)

    def _check_window(self, below: set[Node]) -> None:
        for node, mix in self.mixing.items():
            if mix.mixes and not mix.keys and node not in below:
                reason = f"{node.name} ({target_name(node)}) reads {mix.window - 1} tokens back and is no attention"
                raise self.refuse("mixing above", reason, node)

    def _check_history(self, sides: Sides) -> None:
        """A look-back over token ids belongs below: what it finds may not be read above."""
        for node in sides.crossing:
            past = [n for n in self.before([node]) if n in self.mixing and self.mixing[n].mixes]
            looked = next((n for n in past if not self.mixing[n].keys), None)
            if looked is not None and not any(self.mixing[n].keys for n in past):
                user = min((u for u in node.users if u in sides.decoder), key=self.order.__getitem__, default=node)
                raise self.refuse("mixing above", f"{user.name} reads what {looked.name} looked up in the past", user)

    def _check_drafts(self, below: set[Node], keys: list[Node], crossing: tuple[Node, ...]) -> None:
        """All results must be made of what the first one needs, or they take rows from both sides."""
        under = [o for o in self.outputs if o in below]
        if under and len(under) < len(self.outputs):
            raise self.refuse("drafts straddle", f"result {under[0].name} is ready below the boundary", under[0])
        needed = self._narrowest(below, keys, self.outputs[:1]) if len(self.outputs) > 1 else crossing
        extra = next((n for n in crossing if n not in needed), None)
        if extra is not None:
            reason = f"{extra.name} is read for a result beside the first, which also reads layers above"
            raise self.refuse("drafts straddle", reason, extra)

    # -- the cut ------------------------------------------------------------------------------------------------------

    def _narrowest(self, below: set[Node], keys: list[Node], results: list[Node]) -> tuple[Node, ...]:
        """The fewest bytes a token that `keys` and `results` are row-wise functions of; of equal cuts the highest."""
        free, wanted = self._free(), {n for n in self.before(results) if n not in below}
        read = self._read_above(below, wanted)
        graph = nx.DiGraph()
        graph.add_nodes_from(("from", "to"))
        for node in below - free:
            size = self._size(node)
            graph.add_edge((node, 0), (node, 1), **({} if size is None else {"capacity": size}))
            mix = self.mixing[node]
            if mix.mixes or mix.numbered or node.op == "placeholder" or (node in read and is_op(node, *WORK)):
                graph.add_edge("from", (node, 0))
            for user in node.users:
                if user in below and not self.mixing[user].mixes:
                    graph.add_edge((node, 1), (user, 0))
            if node in keys or any(self._reads_row(u, node) for u in wanted.intersection(node.users)):
                graph.add_edge((node, 1), "to")
        try:
            _, (_, high) = nx.minimum_cut(graph, "from", "to", flow_func=nx.algorithms.flow.dinitz)
        except nx.NetworkXUnbounded:
            raise self.refuse(
                "no narrow cut", "a value between the halves has no row for each token", keys[0]
            ) from None
        cut = {self._unviewed(n) for n in below - free if (n, 1) in high and (n, 0) not in high}
        return tuple(sorted((n for n in cut if n.op != "placeholder"), key=self.order.__getitem__))

    def _unviewed(self, node: Node) -> Node:
        """What a node that crosses is a view of, which is nearer to how the model names it."""
        while is_op(node, *VIEWS) and self._size(node) == self._size(source := node.all_input_nodes[0]):
            node = source
        return node

    def _reads_row(self, user: Node, node: Node) -> bool:
        """Whether a call above reads a node's rows, and not for all tokens."""
        return (node, user) not in self.whole

    def _read_above(self, below: set[Node], wanted: set[Node]) -> set[Node]:
        """Nodes below that wanted calls above read as rows, and what these are made of row by row."""
        found: set[Node] = set()
        for node in reversed(self.flat.graph.nodes):
            later = (u for u in node.users if u in found and not self.mixing[u].mixes)
            if node in below and (any(later) or any(self._reads_row(u, node) for u in wanted.intersection(node.users))):
                found.add(node)
        return found

    def _free(self) -> set[Node]:
        """Nodes that every part can make for itself: of weights, sizes and given positions alone."""
        found: set[Node] = set()
        for node, mix in self.mixing.items():
            given = node.op == "placeholder" and node.name == "position_ids"
            made = node.op != "placeholder" and not mix.mixes and not mix.numbered
            if given or mix.kind == "constant" or (made and all(i in found for i in node.all_input_nodes)):
                found.add(node)
        return found

    def _size(self, node: Node) -> int | None:
        """Bytes of one row, 0 of an input, None where rows cannot be picked."""
        if node.op == "placeholder":
            return 0
        held = self.mixing[node].held
        if held is None or held.inner != 1 or not isinstance(value(node), Tensor):
            return None
        rest = [d for i, d in enumerate(tensor(node).shape) if i != held.dim]
        if not all(isinstance(d, int) for d in rest):
            return None
        return math.prod(rest) * tensor(node).dtype.itemsize

    def _sides(self, below: set[Node], keys: list[Node], crossing: tuple[Node, ...]) -> Sides:
        calls = {n for n in self.flat.graph.nodes if n.op == "call_function"}
        boundary = self.before(keys, crossing) & calls
        encoder = self.before([*crossing, *(o for o in self.outputs if o in below)]) & calls
        decoder = self._above([o for o in self.outputs if o not in below], crossing) & calls
        parts = frozenset(encoder), frozenset(boundary), frozenset(decoder)
        return Sides(self.flat, self.origins, self.mixing, *parts, crossing, self.whole, tuple(keys))

    def _above(self, results: list[Node], crossing: tuple[Node, ...]) -> set[Node]:
        """What computes the results of crossing rows and global keys; what it reads row by row it makes again."""
        left, found = list(results), set[Node]()
        while left:
            node = left.pop()
            if node in found or node in crossing:
                continue
            found.add(node)
            left.extend(n for n in node.all_input_nodes if node.op == "call_function" and self._reads_row(node, n))
        return found

    # -- words --------------------------------------------------------------------------------------------------------

    def _report(self, above: list[Node], below: set[Node], sides: Sides) -> Boundary:
        layers = [self._layers(n for n in self.attention if (n in below) is side) for side in (True, False)]
        windowed = [n for n in self.attention if n not in below and self.mixing[n].window]
        crossing = tuple(self._crossing(n) for n in sides.crossing if not self.mixing[n].numbered)
        halo = self._halo(sides)
        lasting = ", ".join(f"{c.name} ({c.bytes} bytes a token)" for c in crossing)
        why = (
            f"{len(above)} global attentions of layers {_span(layers[1])} read keys made of {lasting or 'token ids'}; "
            f"{len(windowed)} attentions there see windows, so the last {halo} rows give the last one exactly"
        )
        windows = tuple(self.mixing[n].window for n in windowed)
        return Boundary(crossing, self._sources(above), layers[0], layers[1], windows, halo, why, sides)

    def _layers(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        return tuple(sorted({layer for n in nodes if (layer := self.layer(n)) is not None}))

    def _crossing(self, node: Node) -> Crossing:
        held, size = self.mixing[node].held, self._size(node)
        assert held is not None
        assert size is not None
        return Crossing(node.name, self.layer(node), self.place(node), shape_text(value(node)), held.dim, size)

    def _sources(self, above: list[Node]) -> tuple[GlobalSource, ...]:
        readers: dict[tuple[Node, ...], list[Node]] = {}
        free = self._free()
        for node in above:
            roots = {strip(k, *REPEATS) for k in self.mixing[node].keys} - free
            readers.setdefault(tuple(sorted(roots, key=self.order.__getitem__)), []).append(node)
        return tuple(
            GlobalSource(tuple(k.name for k in ks), self.layer(ks[0]), self.place(ks[0]), tuple(map(self.layer, nodes)))
            for ks, nodes in readers.items()
        )

    def _halo(self, sides: Sides) -> int:
        """1 + the most tokens back that windows of the decoder reach, one behind the other."""
        reach: dict[Node, int] = {}
        for node in sides.flat.graph.nodes:
            if node in sides.decoder:
                before = max((reach.get(i, 0) for i in node.all_input_nodes), default=0)
                window = self.mixing[node].window
                reach[node] = before + (window - 1 if window else 0)
        return 1 + max((reach[o] for o in self.outputs if o in reach), default=0)


def _span(layers: tuple[int, ...]) -> str:
    return f"{layers[0]} to {layers[-1]}" if len(layers) > 1 else ", ".join(map(str, layers))
