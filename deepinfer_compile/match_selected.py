"""Recognise attention over a window of latents and over rows that an index chose, and that choice.

Structure says where a piece begins and ends; what masks and row numbers mean is found by running them on positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, tensor
from deepinfer_compile.match import is_tensor, number, uncast
from deepinfer_compile.match_moe import Concrete, NearMiss
from deepinfer_compile.ops.attention import visibility
from deepinfer_compile.program import Program
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.skeleton import outputs_of

A = torch.ops.aten
AND = (A.__and__.Tensor, A.bitwise_and.Tensor, A.logical_and.default)
NOT = (A.bitwise_not.default, A.logical_not.default)
INF = float("inf")
TRIED = (149, 150)
"""Lengths at which row numbers are tried."""
LONGEST = 4096
"""Tokens of the longest window that is looked for."""


@dataclass(frozen=True)
class Selection:
    """A choice of rows in a block. chosen, made: the masks it gives, of rows and of candidates. limit: the mask of
    candidates that it reads. numbers: which row each token completes."""

    chosen: Node
    made: Node | None
    q: Node
    weights: Node
    keys: Node
    limit: Node | None
    numbers: Node
    scale: float
    top: int
    block: int
    blocks: int
    seen: Node


@dataclass(frozen=True)
class Attending:
    """Attention in a block. out: its result, wide. mask: of the window; chosen: of rows."""

    out: Node
    q: Node
    latents: Node
    rows: Node | None
    mask: Node
    chosen: Node | None
    sinks: Node | None
    scale: float


def made_by(program: Program, source: Any) -> tuple[Node, Node]:
    """The block call that gives a value of the skeleton, and the node in the block that is it."""
    maker, place = (source, 0) if source.op == "call_module" else source.args
    return maker, outputs_of(program.blocks[str(maker.target)])[place]


class Positions:
    """Runs values of a program that are made of positions alone, across its blocks."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def value(self, call: Node, node: Node, tokens: int) -> Tensor:
        """The value of a node of a block's call for one sequence of that many tokens. Raises NearMiss."""
        holes = [n for n in self.program.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
        sources = dict(zip(holes, call.args))
        found: Tensor = Concrete(tokens, missing=lambda hole: self._hole(sources[hole], tokens)).value(node)
        return found

    def _hole(self, source: Any, tokens: int) -> Any:
        if source.name == "position_ids":
            return torch.arange(tokens)[None]
        ref = self.program.weights.get(source.name)
        if ref is not None and ref.value is not None and not ref.value.is_meta:
            return ref.value
        if source.op == "placeholder":
            raise NearMiss(f"it depends on {source.name}")
        return self.value(*made_by(self.program, source), tokens)

    def ratio(self, call: Node, numbers: Node, seen: Node) -> int:
        """How many tokens a row stands for, of what row each token completes and how many it sees. Raises NearMiss."""
        for tokens in TRIED:
            at = torch.arange(tokens)[None]
            given, visible = self.value(call, numbers, tokens), self.value(call, seen, tokens)
            ratio = int((given == 0).nonzero()[0, 1]) + 1 if bool((given == 0).any()) else 0
            if not ratio or PAGE_SIZE % ratio:
                raise NearMiss(f"rows of {ratio} tokens do not divide pages of {PAGE_SIZE}")
            if not torch.equal(given, torch.where((at + 1) % ratio == 0, at // ratio, -1)):
                raise NearMiss("rows are not numbered by the tokens that complete them")
            if not torch.equal(visible, (at + 1) // ratio):
                raise NearMiss("a token does not see the rows that are complete, or others")
        return ratio

    def window(self, call: Node, mask: Node) -> int:
        """The window that a mask [1, T, T] shows. Raises NearMiss."""
        tokens = 64
        while tokens <= LONGEST:
            seen = self.value(call, mask, tokens)[0]
            window = int(seen[-1].sum())
            if window < tokens:
                if torch.equal(seen, visibility(torch.arange(tokens), tokens, window)):
                    return window
                break
            tokens *= 2
        raise NearMiss("the mask is no window of a few thousand tokens")


def given(node: Any) -> Any:
    """The arguments of a call."""
    return node.args


def selections(nodes: list[Node]) -> list[Selection]:
    """The choices of rows in a graph."""
    return [found for node in nodes if (found := _selection(node, nodes)) is not None]


def _selection(node: Any, nodes: list[Node]) -> Selection | None:
    best = _best(node)
    scored = _scores(best[0]) if best is not None else None
    if best is None or scored is None:
        return None
    scores, allowed, top = best
    terms = (allowed, *given(allowed)) if is_op(allowed, *AND) else (allowed,)
    for visible in terms:
        shown = _visible(visible)
        if shown is None:
            continue
        limit = None if visible is allowed else next(n for n in given(allowed) if n is not visible)
        made = next((m for n in nodes if (m := _candidates(n, scores, visible, shown))), None)
        base = (*scored[:3], limit if isinstance(limit, Node) else None, shown[0], scored[3], top)
        return Selection(node, made[0] if made else None, *base, *(made[1:] if made else (0, 0)), seen=shown[1])
    return None


def _best(node: Any) -> tuple[Node, Node, int] | None:
    """(scores, allowed, count) of a mask of the `count` highest allowed scores, of equal ones the first."""
    if not is_op(node, *AND):
        return None
    ranked, allowed = given(node)
    rank: Any = given(ranked)[0] if is_op(ranked, A.lt.Scalar) else None
    if not is_op(rank, A.argsort.default, A.argsort.stable) or argument(rank, "descending", False):
        return None
    order = given(rank)[0]
    if not is_op(order, A.argsort.stable) or not argument(order, "descending", False) or not argument(order, "stable"):
        return None
    masked = _masked(given(order)[0])
    if masked is None or masked[1] is not allowed or argument(rank, "dim", -1) != argument(order, "dim", -1):
        return None
    return masked[0], allowed, int(given(ranked)[1])


def _masked(node: Any) -> tuple[Node, Node] | None:
    """(x, m) of x where m is true, and minus infinity elsewhere."""
    if not is_op(node, A.masked_fill.Scalar) or number(argument(node, "value")) != -INF:
        return None
    hidden = given(node)[1]
    return (given(node)[0], given(hidden)[0]) if is_op(hidden, *NOT) else None


def _scores(node: Any) -> tuple[Node, Node, Node, float] | None:
    """(q, weights, keys, scale) of the sum over heads of relu(q . key) * scale * weights."""
    if not is_op(node, A.sum.dim_IntList) or list(argument(node, "dim")) != [2] or argument(node, "keepdim", False):
        return None
    weighted: Any = given(node)[0]
    if not is_op(weighted, A.mul.Tensor):
        return None
    scaled, spread = given(weighted)
    if not is_op(scaled, A.mul.Tensor) or number(given(scaled)[1]) is None:
        return None
    if not is_op(given(scaled)[0], A.relu.default):
        return None
    product = given(given(scaled)[0])[0]
    if not is_op(spread, A.unsqueeze.default) or not _einsum(product, "bthd,bsd->bths"):
        return None
    q, keys = given(product)[1]
    return uncast(q), given(spread)[0], uncast(keys), float(given(scaled)[1])


def _einsum(node: Any, like: str) -> bool:
    """Whether a node is an einsum of that equation, whatever its letters."""
    if not is_op(node, A.einsum.default):
        return False
    equation = str(given(node)[0]).replace(" ", "")
    names = dict(zip(equation, like))
    same = len(equation) == len(like) and "".join(names[c] for c in equation) == like
    return same and len(names) == len({*names.values()})


def _visible(node: Any) -> tuple[Node, Node] | None:
    """(numbers, seen) of a mask of the rows that are there and have lower numbers than `seen`."""
    if not is_op(node, *AND):
        return None
    there, lower = given(node)
    if (
        not is_op(there, A.unsqueeze.default)
        or not is_op(lower, A.lt.Tensor)
        or not is_op(given(there)[0], A.ge.Scalar)
    ):
        return None
    numbers, seen = given(lower)
    if not is_op(numbers, A.unsqueeze.default) or not is_op(seen, A.unsqueeze.default):
        return None
    ge = given(there)[0]
    same = given(ge)[0] is given(numbers)[0] and given(ge)[1] == 0
    dims = [argument(n, "dim") for n in (there, numbers, seen)]
    return (given(numbers)[0], given(seen)[0]) if same and dims == [1, 1, 2] else None


def _candidates(node: Any, scores: Node, visible: Node, shown: tuple[Node, Node]) -> tuple[Node, int, int] | None:
    """(mask, rows of a block, blocks) if a node is the mask of the best blocks' visible rows, the newest block in."""
    if not is_op(node, *AND) or given(node)[1] is not visible or not is_op(given(node)[0], A.gather.default):
        return None
    kept, _, blocks_of = given(given(node)[0])
    best = _best(kept)
    if best is None or not is_op(best[0], A.masked_fill.Scalar) or not is_op(best[1], A.gt.Scalar):
        return None
    raised, there, count = best
    peaks, pinned = given(raised)[:2]
    size = _block(blocks_of, shown[0])
    masked = _masked(given(peaks)[3]) if is_op(peaks, A.scatter_reduce.two) else None
    fits = (
        number(argument(raised, "value")) == INF
        and given(there)[0] is peaks
        and number(given(there)[1]) == -INF
        and masked == (scores, visible)
        and given(peaks)[2] is blocks_of
        and given(peaks)[4] == "amax"
        and number(given(given(peaks)[0])[1]) == -INF
        and size is not None
        and _is_newest(pinned, shown[1], size)
    )
    return (node, size, count) if fits and size is not None else None


def _block(node: Any, numbers: Node) -> int | None:
    """b of floor(max(numbers, 0) / b), for every token."""
    for target in (A.expand.default, A.unsqueeze.default):
        if not is_op(node, target):
            return None
        node = given(node)[0]
    if not is_op(node, A.div.Tensor_mode) or argument(node, "rounding_mode") != "floor":
        return None
    low, size = given(node)
    return size if is_op(low, A.clamp.default) and given(low)[0] is numbers and given(low)[1] == 0 else None


def _is_newest(node: Any, seen: Node, size: int) -> bool:
    """Whether a mask is of the block with the last row that is seen."""
    if not is_op(node, A.eq.Tensor) or not is_op(given(node)[0], A.arange.default):
        return False
    divided = given(node)[1]
    if (
        not is_op(divided, A.div.Tensor_mode)
        or argument(divided, "rounding_mode") != "floor"
        or given(divided)[1] != size
    ):
        return False
    less = given(divided)[0]
    return (
        is_op(less, A.sub.Tensor)
        and given(less)[1] == 1
        and is_op(given(less)[0], A.unsqueeze.default)
        and given(given(less)[0])[0] is seen
    )


def attendings(nodes: list[Node]) -> list[Attending]:
    """The attentions in a graph whose keys are their values."""
    return [found for node in nodes if (found := _attending(node)) is not None]


def _attending(node: Any) -> Attending | None:
    if not _einsum(node, "bthn,bnd->bthd"):
        return None
    shares, keys = given(node)[1]
    scores, sinks = _softmax(uncast(shares))
    masked = _masked(scores) if scores is not None else None
    if masked is None or not is_op(masked[0], A.mul.Tensor) or number(given(masked[0])[1]) is None:
        return None
    product, shown = given(masked[0])[0], masked[1]
    if not _einsum(product, "bthd,bnd->bthn") or uncast(given(product)[1][1]) is not uncast(keys):
        return None
    if not is_op(shown, A.unsqueeze.default) or argument(shown, "dim") != 2:
        return None
    parts, masks = _parts(uncast(keys), 1), _parts(given(shown)[0], 2)
    if len(parts) != len(masks) or len(parts) > 2:
        return None
    q = uncast(given(product)[1][0])
    rows, chosen = (parts[1], masks[1]) if len(parts) == 2 else (None, None)
    return Attending(node, q, parts[0], rows, masks[0], chosen, sinks, float(given(masked[0])[1]))


def _parts(node: Any, dim: int) -> list[Node]:
    """What a tensor joins along a dimension."""
    joined = is_op(node, A.cat.default) and argument(node, "dim") in (dim, dim - tensor(node).dim())
    return list(given(node)[0]) if joined else [node]


def _softmax(node: Any) -> tuple[Node | None, Node | None]:
    """(scores, sinks) of a softmax over the last dimension, whose last column is dropped where there are sinks."""
    cut = is_op(node, A.slice.Tensor) and [argument(node, n) for n in ("dim", "start", "end")] == [3, 0, -1]
    soft = given(node)[0] if cut else node
    if not is_op(soft, A.softmax.int) or argument(soft, "dim") not in (-1, 3):
        return None, None
    if not cut:
        return given(soft)[0], None
    both = _parts(given(soft)[0], 3)
    if len(both) != 2 or not is_op(both[1], A.expand.default):
        return None, None
    column: Any = given(both[1])[0]
    sinks = uncast(given(column)[0]) if is_op(column, A.reshape.default, A.view.default) else None
    if sinks is None or not is_tensor(sinks) or tensor(sinks).dim() != 1:
        return None, None
    fits = list(tensor(column).shape) == [1, 1, len(tensor(sinks)), 1]
    return (both[0], sinks) if fits else (None, None)
