"""How every value of a flat graph mixes token positions: not at all, within a window before it, or over all before it.

The row-wise rules say which calls keep tokens apart. What they refuse is tried as a bounded look-back (padding and a
slice, a join with constants, a convolution): a tensor whose token axis is longer or shorter than the tokens carries how
far behind its index it reads, until a slice makes it a token axis again. What is neither is unknown, with a reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import NotRowwise
from deepinfer_compile.graph import argument, is_op, tensor, value
from deepinfer_compile.match import expr
from deepinfer_compile.match_moe import SHAPE_ONLY
from deepinfer_compile.ops import ATTENTION, LATENT_ATTENTION, RECENT, SELECT_ROWS, SELECTED_ATTENTION
from deepinfer_compile.pairs import Edge, Exit, Pair, Pairs
from deepinfer_compile.program import Program
from deepinfer_compile.rowwise import Call, Kind, Rows, Value, call_value, input_value
from deepinfer_compile.skeleton import tokens_of

A = torch.ops.aten
MOVES = (A.transpose.int, A.unsqueeze.default, A.embedding.default)
"""Calls that keep each element of the token axis apart, pointwise ones aside."""

MixKind = Literal["constant", "row", "pair", "window", "causal", "not causal", "unknown"]


@dataclass(frozen=True)
class Mixing:
    """How one call mixes positions, and what it gives.

    kind: constant (made of weights or sizes alone), row (each token apart), pair (a row for each token and a column for
    each that it may read), window (a token and the `window - 1` before it), causal (all up to it, perhaps beside a
    window), not causal (later ones too), unknown, with a `reason`. reads: of attention, which operands of which calls
    are the rows of all these tokens; everything else is read at the token's own row. held: its token axis, None without
    one. numbered: made of row numbers, which are positions only while every token is there. sees: of a mask that is
    true within a window only, the dimension of the tokens that are read.
    """

    kind: MixKind
    held: Rows | None = None
    window: int = 0
    reads: frozenset[Edge] = frozenset()
    reason: str = ""
    numbered: bool = False
    sees: int | None = None

    @property
    def mixes(self) -> bool:
        """Whether a token's result depends on other tokens."""
        return self.kind not in ("constant", "row", "pair")

    @property
    def keys(self) -> set[Node]:
        """Of attention, what it reads of many tokens."""
        return {operand for operand, _ in self.reads}


@dataclass(frozen=True)
class _Shifted:
    """A token axis `dim` of T + extra elements; element j reads the tokens from j - far to j - near."""

    dim: int
    extra: int
    far: int
    near: int


def classify(flat: GraphModule, program: Program, values: dict[Node, Any] | None = None) -> dict[Node, Mixing]:
    """How each input and call of the program's flat graph mixes positions, in graph order.

    values: filled with what each holds: constant, rows, pairs.
    """
    tokens = expr(tokens_of(program))
    found: dict[Node, Mixing] = {}
    env: dict[Node, Any] = {} if values is None else values
    pairs = Pairs(program)
    for node in flat.graph.nodes:
        pairs.note(node)
        if node.op == "placeholder":
            env[node] = input_value(node, program, tokens)
            found[node] = _kept(env[node])
        elif node.op == "call_function":
            env[node], found[node] = _call(node, env, tokens, pairs)
    return found


def _kept(held: Value) -> Mixing:
    rows = next((h for h in (held if isinstance(held, tuple) else (held,)) if isinstance(h, Rows)), None)
    return Mixing("constant") if rows is None and held is not Kind.BATCH else Mixing("row", rows)


def _call(node: Node, env: dict[Node, Any], tokens: Any, pairs: Pairs) -> tuple[Any, Mixing]:
    if is_op(node, ATTENTION.overload, LATENT_ATTENTION.overload):
        return _attention(node, env, tokens)
    if is_op(node, RECENT.overload, SELECT_ROWS.overload, SELECTED_ATTENTION.overload):
        return _selected(node)
    if node.users and all(is_op(u, *SHAPE_ONLY) and u.args[0] is node for u in node.users):
        return Kind.CONST, Mixing("constant")
    odd = any(isinstance(env.get(i), (_Shifted, Pair)) for i in node.all_input_nodes)
    if is_op(node, A.arange.default, A.arange.start, *SHAPE_ONLY) and not odd:
        return _from_sizes(node, env, tokens)
    try:
        if odd:
            raise NotRowwise(node=node.name, target=str(node.target), reason="it has no rule for what its operands are")
        held = call_value(node, env, tokens)
    except NotRowwise as refused:
        reason = str(refused.values["reason"])
        made = pairs.read(node, env)
        return _looked_back(node, env, tokens, reason) if made is None else _paired(node, made, tokens)
    return held, _kept(held)


def _paired(node: Node, made: Pair | Exit, tokens: Any) -> tuple[Any, Mixing]:
    """A value over pairs of tokens, or what a product over its columns gives."""
    if isinstance(made, Pair):
        bounded = made.form == "seen" and len(made.parts) == 1 and made.parts[0].causal and made.parts[0].window > 0
        return made, Mixing("pair", sees=made.cols if bounded else None)
    rows = Rows("tokens", made.rows)
    if not all(p.causal for p in made.parts):
        return rows, Mixing("not causal", rows, reason="it sees later tokens, or nothing shows that it does not")
    whole, near = (
        frozenset(e for p in made.parts if (p.window == 0) is side for e in p.edges) for side in (True, False)
    )
    if whole & near:
        return _unknown(node, tokens, "it reads one tensor both in a window and for all tokens")
    window = max((p.window for p in made.parts), default=0)
    return rows, Mixing("causal" if whole else "window", rows, window, whole or near)


def _from_sizes(node: Node, env: dict[Node, Any], tokens: Any) -> tuple[Any, Mixing]:
    """Row numbers and filled tensors: a token axis where the size says so."""
    call = Call(node, env, tokens)
    try:
        held = call.sized()
    except NotRowwise as refused:
        return _looked_back(node, env, tokens, str(refused.values["reason"]))
    numbers = is_op(node, A.arange.default, A.arange.start)
    if numbers and isinstance(held, Rows) and (held.inner != 1 or argument(node, "start", 0) != 0):
        return _unknown(node, tokens, "it makes numbers that are not those of the rows")
    return held, replace(_kept(held), numbered=numbers)


def _attention(node: Node, env: dict[Node, Any], tokens: Any) -> tuple[Any, Mixing]:
    plain = is_op(node, ATTENTION.overload)
    reads = frozenset((argument(node, n), node) for n in (("k", "v") if plain else ("c", "k_rope")))
    window = int(argument(node, "window")) if plain else 0
    if argument(node, "mask") is not None:
        return _unknown(node, tokens, "it is attention with a mask whose meaning is not known")
    try:
        held = call_value(node, env, tokens)
    except NotRowwise as refused:
        return _unknown(node, tokens, str(refused.values["reason"]))
    if plain and not argument(node, "causal"):
        return held, Mixing("not causal", held, 0, reads, "its attention sees later tokens")
    return held, Mixing("window" if window else "causal", held, window, reads)


def _selected(node: Node) -> tuple[Any, Mixing]:
    """Calls that read rows of the tokens before: the last ones, or those that a choice among all of them gives."""
    rows = Rows("tokens", 1)
    if is_op(node, RECENT.overload):
        return rows, Mixing("window", rows, int(argument(node, "count")))
    if is_op(node, SELECT_ROWS.overload):
        return (rows, rows), Mixing("causal", rows, 0, frozenset({(argument(node, "keys"), node)}))
    chosen, window = argument(node, "rows"), int(argument(node, "window"))
    read = argument(node, "latents") if chosen is None else chosen
    return rows, Mixing("window" if chosen is None else "causal", rows, window, frozenset({(read, node)}))


def _unknown(node: Node, tokens: Any, reason: str) -> tuple[Any, Mixing]:
    """What is not understood, taken to run over the tokens where its shape says so, so that the rest can be read."""
    guess: list[Any] = []
    for val in value(node) if isinstance(value(node), (tuple, list)) else (value(node),):
        dims = [i for i, d in enumerate(val.shape) if _extra(d, tokens) == 0] if isinstance(val, Tensor) else []
        guess.append(Rows("tokens", dims[0]) if dims else Kind.CONST)
    held = tuple(guess) if isinstance(value(node), (tuple, list)) else guess[0]
    return held, Mixing("unknown", _kept(held).held, reason=reason)


def _extra(size: Any, tokens: Any) -> int | None:
    """c of a size T + c, None for any other."""
    if not isinstance(size, torch.SymInt):
        return None
    rest = (expr(size) - tokens).simplify()
    return int(rest) if rest.is_Integer else None


# -- bounded look-back ------------------------------------------------------------------------------------------------


Shift = Callable[[Node, dict[Node, Any], Any], _Shifted | None]


def _looked_back(node: Node, env: dict[Node, Any], tokens: Any, reason: str) -> tuple[Any, Mixing]:
    """The call as a shift of the token axis, or unknown for the given reason."""
    if is_op(node, A.slice.Tensor) and env[node.args[0]] is Kind.CONST and not argument(node, "start"):  # type: ignore[index]
        rows = Rows("tokens", int(argument(node, "dim")) % tensor(node).dim())
        if _extra(tensor(node).shape[rows.dim], tokens) == 0:
            return rows, Mixing("row", rows, numbered=True)
    moved = _shift(node, env, tokens)
    if moved is None or _extra(tensor(node).shape[moved.dim], tokens) != moved.extra:
        return _unknown(node, tokens, reason)
    if moved.extra != 0:
        return moved, Mixing("row")
    rows = Rows("tokens", moved.dim)
    if moved.near < 0:
        return rows, Mixing("not causal", rows, reason=f"it reads up to {-moved.near} tokens ahead")
    return rows, Mixing("window", rows, moved.far + 1) if moved.far else Mixing("row", rows)


def _shift(node: Node, env: dict[Node, Any], tokens: Any) -> _Shifted | None:
    if not isinstance(value(node), Tensor):
        return None
    if is_op(node, A.cat.default):
        return _joined(node, env)
    rule = SHIFTS.get(node.target)
    if rule is not None:
        return rule(node, env, tokens)
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or is_op(node, *MOVES):
        return _moved(node, env)
    return None


def _axis(env: dict[Node, Any], node: object) -> _Shifted | None:
    """The token axis of an operand."""
    held = env.get(node) if isinstance(node, Node) else None
    if isinstance(held, Rows) and held.axis == "tokens" and held.inner == 1:
        return _Shifted(held.dim, 0, 0, 0)
    return held if isinstance(held, _Shifted) else None


def _padded(node: Node, env: dict[Node, Any], tokens: Any) -> _Shifted | None:
    source: Any = node.args[0]
    at, pad = _axis(env, source), list(argument(node, "pad"))
    if at is None or argument(node, "mode", "constant") != "constant" or not all(isinstance(p, int) for p in pad):
        return None
    behind = tensor(source).dim() - 1 - at.dim
    left, right = (*pad, *([0] * 16))[2 * behind : 2 * behind + 2]
    return _Shifted(at.dim, at.extra + left + right, at.far + left, at.near + left)


def _sliced(node: Node, env: dict[Node, Any], tokens: Any) -> _Shifted | None:
    source: Any = node.args[0]
    at, dim = _axis(env, source), int(argument(node, "dim"))
    start, end = argument(node, "start") or 0, argument(node, "end")
    if at is None or argument(node, "step") != 1 or not isinstance(start, int) or start < 0:
        return None
    if dim % tensor(source).dim() != at.dim:
        return at
    stop = at.extra if end is None or end == sys.maxsize else None
    if isinstance(end, int) and end < 0:
        stop = at.extra + end
    elif isinstance(end, Node):
        stop = _extra(value(end), tokens)
    return None if stop is None else _Shifted(at.dim, stop - start, at.far - start, at.near - start)


def _joined(node: Node, env: dict[Node, Any]) -> _Shifted | None:
    """Constants before or behind one token axis, or equal token axes side by side."""
    parts: Any = node.args[0]
    dim = int(argument(node, "dim")) % tensor(node).dim()
    axes = [_axis(env, p) for p in parts]
    known = [a for a in axes if a is not None]
    if known and all(a is not None and a.dim != dim for a in axes):
        return _widest(known)
    if len(known) != 1 or known[0].dim != dim:
        return None
    place = next(i for i, a in enumerate(axes) if a is not None)
    sizes = [tensor(p).shape[dim] for p in parts if p is not parts[place]]
    if any(env.get(p) is not Kind.CONST for p in parts if p is not parts[place]):
        return None
    if not all(isinstance(s, int) for s in sizes):
        return None
    left, at = sum(sizes[:place]), known[0]  # type: ignore[arg-type]
    return _Shifted(dim, at.extra + sum(sizes), at.far + left, at.near + left)  # type: ignore[arg-type]


def _widest(axes: list[_Shifted]) -> _Shifted | None:
    """Axes that meet element by element."""
    if len({(a.dim, a.extra) for a in axes}) != 1:
        return None
    return _Shifted(axes[0].dim, axes[0].extra, max(a.far for a in axes), min(a.near for a in axes))


def _convolved(node: Node, env: dict[Node, Any], tokens: Any) -> _Shifted | None:
    source, weight = node.args[0], node.args[1]
    at = _axis(env, source)
    stride, pad, step = (_one(argument(node, n, d)) for n, d in (("stride", 1), ("padding", 0), ("dilation", 1)))
    if at is None or at.dim != tensor(source).dim() - 1 or stride != 1 or pad is None or step is None:  # type: ignore[arg-type]
        return None
    if env.get(weight) is not Kind.CONST or argument(node, "transposed", False):  # type: ignore[arg-type]
        return None
    reach = (int(tensor(weight).shape[-1]) - 1) * step  # type: ignore[arg-type]
    return _Shifted(at.dim, at.extra + 2 * pad - reach, at.far + pad, at.near + pad - reach)


def _one(given: Any) -> int | None:
    """The number of a list of one, or a number."""
    given = given[0] if isinstance(given, (list, tuple)) and len(given) == 1 else given
    return given if isinstance(given, int) else None


def _moved(node: Node, env: dict[Node, Any]) -> _Shifted | None:
    """Pointwise calls, transposes and look-ups of shifted rows."""
    axes: list[_Shifted] = []
    for source, held in _read(node, env):
        at = _axis(env, source)
        if at is None and held is not Kind.CONST:
            return None
        if at is not None:
            axes.append(_placed(node, source, at))
    return _widest(axes) if axes else None


def _read(node: Node, env: dict[Node, Any]) -> Iterator[tuple[Node, Any]]:
    yield from ((i, env.get(i)) for i in node.all_input_nodes if isinstance(value(i), Tensor))


def _placed(node: Node, source: Node, at: _Shifted) -> _Shifted:
    """The axis where the call's result has it."""
    rank, dim = tensor(source).dim(), at.dim
    if is_op(node, A.transpose.int):
        a, b = (int(d) % rank for d in node.args[1:3])  # type: ignore[call-overload, arg-type]
        dim = {a: b, b: a}.get(dim, dim)
    elif is_op(node, A.unsqueeze.default):
        dim += int(argument(node, "dim")) % (rank + 1) <= dim
    elif not is_op(node, A.embedding.default):
        dim += tensor(node).dim() - rank
    return _Shifted(dim, at.extra, at.far, at.near)


SHIFTS: dict[Any, Shift] = {
    A.pad.default: _padded,
    A.constant_pad_nd.default: _padded,
    A.slice.Tensor: _sliced,
    A.conv1d.default: _convolved,
    A.convolution.default: _convolved,
}
