"""What a mask lets a query see, found by running the piece of graph that makes it.

Masks are written in as many ways as there are models, and often outside the layer that uses them. The piece is run for
short lengths, and beyond every number written in it (a window shows only in longer rows), with positions 0..T-1, and
the result is compared with causal visibility. What depends on tokens or weights is not a mask that can be known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.match_moe import CPU, Concrete, NearMiss, ancestors, numbers, place_of_values
from deepinfer_compile.ops.attention import visibility
from deepinfer_compile.program import Program

LENGTHS = (1, 7, 19)
LONGEST = 4200
HIDDEN = -1e4
"""Scores that get this or less added count as hidden."""


@dataclass(frozen=True)
class Term:
    """One mask on the scores. kind: visible (bool), hidden (bool) or added (float). fill: what hidden scores become."""

    kind: str
    node: Node
    fill: Node | None = None


@dataclass(frozen=True)
class Sight:
    """What queries see: everything, or the keys up to their own position, at most `window` of them (0: all)."""

    causal: bool
    window: int = 0


def sight_of_sizes(terms: Sequence[Term], tokens: Any) -> Sight:
    """What all terms together let a query see where they are made of nothing but sizes: `tokens` queries and as many
    keys. A mask of fixed sizes is run as it is, another for several. Raises NearMiss for what has other inputs."""
    lengths = [tokens] if isinstance(tokens, int) else lengths_for({n for t in terms for n in numbers(t.node)})
    seen = {}
    for length in lengths:
        probe = Concrete(length, device=place_of_values(terms[0].node))
        seen[length] = _visible(terms, length, probe.value, probe.device)
    return _sight(seen)


def lengths_for(written: set[float]) -> list[int]:
    """Lengths to try a mask at: short ones, and beyond every number written in it."""
    large = [n for n in written if isinstance(n, int) and 2 < abs(n) < 2**31]
    if any(abs(n) > LONGEST for n in large):
        raise NearMiss(f"the mask has the constant {max(map(abs, large))}; windows are tried up to {LONGEST}")
    return sorted({*LENGTHS, *(abs(n) + 3 for n in large)})


def _sight(seen: dict[int, Tensor]) -> Sight:
    """The meaning of masks [T, T] by length. Raises NearMiss where there is none."""
    if all(bool(v.all()) for v in seen.values()):
        return Sight(False)
    cut = [int(v[-1].sum()) for n, v in seen.items() if int(v[-1].sum()) < n]
    window = max(cut, default=0)
    for length, visible in seen.items():
        if not torch.equal(visible, visibility(torch.arange(length, device=visible.device), length, window)):
            raise NearMiss("the mask is neither causal nor a causal window")
    return Sight(True, window)


def _visible(terms: Sequence[Term], length: int, value: Callable[[Node], Any], device: torch.device) -> Tensor:
    """What queries see under all terms: bool [length, length]."""
    visible = torch.ones(length, length, dtype=torch.bool, device=device)
    for term in terms:
        found = value(term.node)
        if term.fill is not None and not bool((value(term.fill) <= HIDDEN).all()):
            raise NearMiss("hidden scores are replaced by numbers that are not large and negative")
        if found.dtype == torch.bool:
            found = found if term.kind == "visible" else ~found
        elif term.kind == "added" and bool(((found == 0) | (found <= HIDDEN)).all()):
            found = found == 0
        else:
            raise NearMiss("the mask adds numbers that are neither 0 nor large and negative")
        if any(size not in (1, length) for size in found.shape[-2:]):
            raise NearMiss(f"the mask has the fixed size {list(found.shape)}")
        rows = found.expand(*found.shape[:-2], length, length).reshape(-1, length, length)
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise NearMiss("the mask differs between heads or sequences")
        visible = visible & rows[0]
    return visible


@dataclass
class Masks:
    """Evaluates masks of a program inside its blocks and across their boundaries."""

    program: Program
    known: dict[tuple[Node, int], Concrete] = field(default_factory=dict)

    def sight(self, call: Node, terms: Sequence[Term]) -> Sight:
        """What all terms together let a query see in one call of a block. Raises NearMiss."""
        if not terms:
            return Sight(False)
        written = {n for t in terms for n in self._numbers(call, t.node)}
        return _sight({n: self._seen(call, terms, n) for n in lengths_for(written)})

    def _seen(self, call: Node, terms: Sequence[Term], length: int) -> Tensor:
        return _visible(terms, length, lambda node: self._value(call, node, length), CPU)

    def _numbers(self, call: Node, node: Node) -> Iterator[float]:
        yield from numbers(node)
        for hole in ancestors(node):
            if hole.op == "placeholder" and (origin := self._origin(call, hole)) is not None:
                yield from self._numbers(*origin)

    def _value(self, call: Node, node: Node, length: int) -> Any:
        at = (call, length)
        if at not in self.known:
            self.known[at] = Concrete(length, missing=lambda hole: self._hole(call, hole, length))
        return self.known[at].value(node)

    def _argument(self, call: Node, hole: Node) -> Node:
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        found = call.args[holes.index(hole)]
        if not isinstance(found, Node):
            raise NearMiss(f"the input {hole.name} is not a tensor")
        return found

    def _origin(self, call: Node, hole: Node) -> tuple[Node, Node] | None:
        """The call and the node inside its block that an input comes from; None for inputs of the program."""
        source: Any = self._argument(call, hole)
        index = 0
        if source.op == "call_function":
            source, index = source.args
        if source.op != "call_module":
            return None
        made: Any = next(n for n in self.program.blocks[str(source.target)].graph.nodes if n.op == "output").args[0]
        return source, made[index] if isinstance(made, (tuple, list)) else made

    def _hole(self, call: Node, hole: Node, length: int) -> Any:
        origin = self._origin(call, hole)
        if origin is not None:
            return self._value(*origin, length)
        source = self._argument(call, hole)
        if source.name == "position_ids":
            return torch.arange(length)[None]
        held = self.program.weights.get(source.name)
        if held is None:
            raise NearMiss(f"the mask depends on the input {source.name}")
        if held.value is None or held.value.is_meta:
            raise NearMiss(f"the mask reads the checkpoint tensor {held.name}")
        return held.value
