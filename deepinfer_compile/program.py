"""The two-level form of a program: a skeleton graph that calls block graphs, one block per distinct layer.

The skeleton holds every value between layers explicitly (hidden state, rotary tables, cache handles), so boundaries and
placement are graph questions on few nodes, and build time does not grow with depth. Weights are inputs everywhere:
skeleton placeholders that name a checkpoint tensor, passed on to the blocks. `flatten` gives the one-level graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import copy_module, make_module, remove_dead, value


@dataclass(frozen=True)
class WeightRef:
    """What a weight input stands for: a checkpoint tensor by name, or a constant computed at capture (`value`).

    experts: (layer of the placement, E) where the input holds, of the tensor's E rows, those of a rank's slots. recipe:
    how the tensor follows from others, `parts`, where no checkpoint has it (`bundle/recipes.py`).
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Tensor | None = None
    experts: tuple[int, int] | None = None
    recipe: dict[str, Any] | None = None
    parts: tuple[WeightRef, ...] = ()

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape of the tensor itself."""
        return self.shape if self.experts is None else (self.experts[1], *self.shape[1:])


@dataclass(frozen=True)
class CacheSpec:
    """One cache input of a program. shape excludes the leading page count.

    kind: "kv" or "latent". group: index into the program's cache groups. layer: the layer that writes it.
    """

    name: str
    kind: str
    group: int
    layer: int
    shape: tuple[int, ...]
    dtype: torch.dtype


BlockRunner = Callable[[Node, tuple[Any, ...]], Any]


@dataclass(frozen=True)
class Program:
    """A skeleton, its blocks, and what its inputs mean.

    `calls[i]` is the layer index of the i-th block call where it stands for a layer (prefix and suffix have None).
    """

    name: str
    skeleton: GraphModule
    blocks: dict[str, GraphModule]
    weights: dict[str, WeightRef]
    info: dict[str, Any]
    caches: tuple[CacheSpec, ...] = ()
    windows: tuple[int, ...] = (0,)
    facts: frozenset[Fact] = field(default_factory=frozenset)

    def clone(self) -> Program:
        """A copy whose graphs can be edited freely; weights and fake values are shared."""
        return replace(
            self,
            skeleton=copy_module(self.skeleton),
            blocks={name: copy_module(gm) for name, gm in self.blocks.items()},
            weights=dict(self.weights),
            info=dict(self.info),
        )

    def inputs(self) -> list[Node]:
        """Skeleton inputs that are neither weights nor caches."""
        taken = self.weights.keys() | {c.name for c in self.caches}
        return [n for n in self.skeleton.graph.nodes if n.op == "placeholder" and n.name not in taken]

    def calls(self) -> list[Node]:
        """The block calls of the skeleton, in order."""
        return [n for n in self.skeleton.graph.nodes if n.op == "call_module"]

    def cache_stems(self) -> dict[Node, str]:
        """What the caches of each block call are named after: its layer, or its place where that is no layer's."""
        calls = self.calls()
        layers = {c.meta.get("layer") for c in calls}
        stems: dict[Node, str] = {}
        for order, call in enumerate(calls):
            layer = call.meta.get("layer")
            stems[call] = str(layer) if layer is not None else call.name if order in layers else str(order)
        return stems

    def layers_of(self, block: str) -> list[int]:
        """Indices of the layers that a block stands for."""
        return [n.meta["layer"] for n in self.calls() if n.target == block and n.meta.get("layer") is not None]

    def graphs(self) -> Iterator[tuple[str, GraphModule]]:
        """The skeleton and all blocks by name."""
        yield "skeleton", self.skeleton
        yield from self.blocks.items()

    def node_count(self) -> int:
        """Nodes over all graphs, each block counted once."""
        return sum(len(gm.graph.nodes) for _, gm in self.graphs())

    def run(self, arguments: Mapping[str, Tensor], block: BlockRunner | None = None) -> Any:
        """Run on the reference implementation of every op; `arguments` names every skeleton input.

        block: runs a block call in place of the block's own graph, given the call and its argument values.
        """
        env: dict[Node, Any] = {}
        for node in self.skeleton.graph.nodes:
            if node.op == "placeholder":
                env[node] = arguments[node.name]
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
            if node.op == "output":
                return args[0]
            with torch.no_grad():
                if node.op == "call_module":
                    env[node] = block(node, args) if block else self.blocks[str(node.target)](*args, **kwargs)
                else:
                    env[node] = node.target(*args, **kwargs)
        raise ValueError(f"program {self.name!r} has no output")

    def flatten(self, origins: dict[Node, tuple[Node, Node]] | None = None) -> GraphModule:
        """The one-level graph: every block call replaced by a copy of the block's nodes.

        origins: filled with the block call and the node inside the block that each copied node stands for.
        """
        flat = Graph()
        env: dict[Node, Any] = {}
        for node in self.skeleton.graph.nodes:
            if node.op == "call_module":
                copied: dict[Node, Any] = {}
                block = self.blocks[str(node.target)].graph
                env[node] = _inline(block, flat, [env[a] for a in node.args], copied)  # type: ignore[index]
                if origins is not None:
                    origins |= {made: (node, inner) for inner, made in copied.items() if inner.op != "placeholder"}
                continue
            env[node] = flat.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
        _resolve_items(flat)
        remove_dead(flat)
        return make_module(torch.nn.Module(), flat)


def _inline(block: Graph, into: Graph, values: list[Any], env: dict[Node, Any]) -> Any:
    """Copy a block's nodes for the given input values, noting the copies in `env`; returns what it gives."""
    env.update(zip((n for n in block.nodes if n.op == "placeholder"), values))
    for node in block.nodes:
        if node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
        if node.op != "placeholder":
            env[node] = into.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    raise ValueError("a block has no output")


def _resolve_items(graph: Graph) -> None:
    """`getitem` of a block's tuple result became `getitem(tuple of nodes, i)`: take the element."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.args and isinstance(node.args[0], (tuple, list)) and len(node.args) == 2:
            picked, index = node.args
            if isinstance(index, int) and getattr(node.target, "__name__", "") == "getitem":
                node.replace_all_uses_with(picked[index])  # type: ignore[arg-type, index]
                graph.erase_node(node)


def weight_inputs(gm: GraphModule) -> list[Node]:
    """Placeholders of a block that stand for weights."""
    return [n for n in gm.graph.nodes if n.op == "placeholder" and "weight" in n.meta]


def output_values(gm: GraphModule) -> list[Any]:
    """Fake values of a graph's outputs; an output may be a plain number."""
    out = next(n for n in reversed(gm.graph.nodes) if n.op == "output").args[0]
    return [value(n) if isinstance(n, Node) else n for n in (out if isinstance(out, (tuple, list)) else (out,))]
