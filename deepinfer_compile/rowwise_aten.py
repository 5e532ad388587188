"""How ATen ops treat packed tokens. Pointwise ops (by torch's own tag) need no rule; every other op needs one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.fx import Node

from deepinfer_compile.graph import tensor, value
from deepinfer_compile.match import expr, is_tensor
from deepinfer_compile.rowwise import RULES, Call, Kind, Rows, Value, aligned, rule


def _first(call: Call) -> Node:
    return call.node.args[0]  # type: ignore[return-value]


@rule("aten.type_as")
def _cast(call: Call) -> Value:
    """Its second operand gives a type, no values."""
    return call.of(call.node.args[0])


@rule(
    *("aten._to_copy", "aten.to", "aten.copy", "aten.alias", "aten.contiguous", "aten.detach"),
    *("aten.multiply", "aten.divide", "aten.subtract"),  # other names, which torch does not tag as pointwise
    *("aten.floor_divide", "aten.__and__", "aten.__or__", "aten.__xor__"),
    *("aten.lift_fresh_copy", "aten.masked_fill", "aten.where", "aten.polar", "aten.complex", "aten._conj"),
    *("aten.zeros_like", "aten.ones_like", "aten.full_like", "aten.empty_like"),
)
def _pointwise(call: Call) -> Value:
    if isinstance(value(call.node), (tuple, list)):
        call.refuse("it has several results")
    return aligned(call, call.node.all_input_nodes, call.result_rank())


# -- made from sizes --------------------------------------------------------------------------------------------------


@rule("aten.full", "aten.zeros", "aten.ones", "aten.empty")
@rule("aten.new_full", "aten.new_zeros", "aten.new_ones", "aten.new_empty")
def _sized(call: Call) -> Value:
    if isinstance(call.arg("fill_value"), Node):
        call.refuse("it is filled with a number that is computed")
    return call.sized()


@rule("aten.arange")
def _arange(call: Call) -> Value:
    call.refuse("it makes row numbers, which are not token positions")


# -- moving dimensions ------------------------------------------------------------------------------------------------


@rule("aten.reshape", "aten.view", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.view_copy")
def _reshape(call: Call) -> Value:
    """Tokens stay a dimension of their own if as many elements lie outside and inside of them as before."""
    source = _first(call)
    held, before, after = call.rows(source), tensor(source).shape, tensor(call.node).shape
    outside = math.prod(before[: held.dim])
    for dim, size in enumerate(after):
        if _mentions(size, call) or (held.axis != "tokens" and not isinstance(size, int)):
            kept = held.inner * math.prod(before[held.dim + 1 :])
            inside = math.prod(after[dim + 1 :])
            if math.prod(after[:dim]) != outside or inside == 0 or kept % inside:
                break
            return Rows(held.axis, dim, kept // inside)
    return call.refuse("it merges the token dimension under another one")


def _mentions(size: Any, call: Call) -> bool:
    return not isinstance(size, int) and call.tokens in expr(size).free_symbols


@rule("aten.transpose", "aten.swapaxes")
def _transpose(call: Call) -> Value:
    source = _first(call)
    held = call.rows(source)
    a, b = (call.dim(source, int(d)) for d in call.node.args[1:3])  # type: ignore[arg-type]
    return Rows(held.axis, {a: b, b: a}.get(held.dim, held.dim), held.inner)


@rule("aten.t", "aten.numpy_T")
def _t(call: Call) -> Value:
    held = call.rows(_first(call))
    return Rows(held.axis, call.rank(_first(call)) - 1 - held.dim, held.inner)


@rule("aten.permute")
def _permute(call: Call) -> Value:
    source = _first(call)
    held = call.rows(source)
    return Rows(held.axis, [call.dim(source, d) for d in call.arg("dims")].index(held.dim), held.inner)


@rule("aten.unsqueeze")
def _unsqueeze(call: Call) -> Value:
    held = call.rows(_first(call))
    at = int(call.arg("dim")) % (call.rank(_first(call)) + 1)
    return Rows(held.axis, held.dim + (at <= held.dim), held.inner)


@rule("aten.squeeze")
def _squeeze(call: Call) -> Value:
    source = _first(call)
    held, shape = call.rows(source), tensor(source).shape
    dims = call.arg("dim", range(len(shape)))
    asked = {call.dim(source, d) for d in (dims if not isinstance(dims, int) else [dims])}
    return Rows(held.axis, held.dim - sum(d < held.dim and shape[d] == 1 for d in asked), held.inner)


@rule("aten.expand", "aten.broadcast_to")
def _expand(call: Call) -> Value:
    held = call.of(_first(call))
    if isinstance(held, Rows):
        return Rows(held.axis, held.dim + call.result_rank() - call.rank(_first(call)), held.inner)
    return call.sized()


@rule("aten.repeat")
def _repeat(call: Call) -> Value:
    held = call.of(_first(call))
    if not isinstance(held, Rows):
        return call.sized()
    dim = held.dim + call.result_rank() - call.rank(_first(call))
    if call.arg("repeats")[dim] != 1:
        call.refuse("it repeats the token dimension as a whole")
    return Rows(held.axis, dim, held.inner)


@rule("aten.repeat_interleave")
def _repeat_interleave(call: Call) -> Value:
    held, dim, times = call.rows(_first(call)), call.arg("dim"), call.arg("repeats")
    if not isinstance(times, int) or (dim is None and call.rank(_first(call)) != 1):
        call.refuse("its repeats are a tensor, or it flattens tokens")
    at = 0 if dim is None else call.dim(_first(call), dim)
    return Rows(held.axis, held.dim, held.inner * (times if at == held.dim else 1))


# -- taking and joining parts -----------------------------------------------------------------------------------------


def _elsewhere(call: Call, dim: int, what: str) -> Rows:
    """The first operand, which must not run over tokens in `dim`."""
    held = call.rows(_first(call))
    if call.dim(_first(call), dim) == held.dim:
        call.refuse(f"it {what} the token dimension")
    return held


@rule("aten.slice")
def _slice(call: Call) -> Value:
    return _elsewhere(call, call.arg("dim"), "slices")


@rule("aten.select")
def _select(call: Call) -> Value:
    held = _elsewhere(call, call.arg("dim"), "picks one element of")
    return Rows(held.axis, held.dim - (call.dim(_first(call), call.arg("dim")) < held.dim), held.inner)


@rule("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.tensor_split")
def _split(call: Call) -> Value:
    return call.same_for_all(_elsewhere(call, call.arg("dim"), "splits"))


@rule("aten.unbind")
def _unbind(call: Call) -> Value:
    return call.same_for_all(_select(call))


@rule("aten.cat", "aten.concat")
def _cat(call: Call) -> Value:
    parts: Any = _first(call)
    found = aligned(call, list(parts), call.result_rank())
    if not isinstance(found, Rows) or not all(isinstance(call.of(p), Rows) for p in parts):
        call.refuse("it joins tokens with something else")
    if call.dim(parts[0], call.arg("dim")) == found.dim:
        call.refuse("it joins along the token dimension")
    return found


@rule("aten.stack")
def _stack(call: Call) -> Value:
    parts: Any = _first(call)
    found = aligned(call, list(parts), call.rank(parts[0]))
    if not all(isinstance(call.of(p), Rows) for p in parts):
        call.refuse("it joins tokens with something else")
    at = int(call.arg("dim")) % call.result_rank()
    return Rows(found.axis, found.dim + (at <= found.dim), found.inner)


@rule("aten.slice_scatter", "aten.select_scatter")
def _scatter_part(call: Call) -> Value:
    found = _elsewhere(call, call.arg("dim"), "writes a part of")
    if (
        call.node.target is torch.ops.aten.slice_scatter.default
        and aligned(call, [_first(call), call.arg("src")], call.result_rank()) != found
    ):
        call.refuse("it writes rows of another dimension")
    return found


@rule("aten.constant_pad_nd", "aten.pad")
def _pad(call: Call) -> Value:
    held, pad = call.rows(_first(call)), list(call.arg("pad"))
    behind = call.rank(_first(call)) - 1 - held.dim
    if any(pad[2 * behind : 2 * behind + 2]):
        call.refuse("it pads the token dimension")
    return held


@rule("aten.view_as_complex", "aten.view_as_real", "aten.one_hot")
def _as_it_is(call: Call) -> Value:
    return call.rows(_first(call))


# -- reductions and orders along a dimension --------------------------------------------------------------------------


@rule(
    *("aten.sum", "aten.mean", "aten.amax", "aten.amin", "aten.max", "aten.min", "aten.any", "aten.all", "aten.prod"),
    *("aten.var", "aten.std", "aten.argmax", "aten.argmin", "aten.logsumexp", "aten.norm", "aten.linalg_vector_norm"),
)
def _reduce(call: Call) -> Value:
    source = _first(call)
    held, dims = call.rows(source), call.arg("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or range(call.rank(source)))
    gone = {call.dim(source, d) for d in dims}
    if held.dim in gone:
        call.refuse("it reduces over the tokens")
    dim = held.dim if call.arg("keepdim", False) else held.dim - sum(d < held.dim for d in gone)
    return call.same_for_all(Rows(held.axis, dim, held.inner))


@rule(
    *("aten.softmax", "aten._softmax", "aten.log_softmax", "aten._log_softmax", "aten.cumsum", "aten.cumprod"),
    *("aten.topk", "aten.sort", "aten.argsort", "aten.flip", "aten.glu"),
)
def _along(call: Call) -> Value:
    dims = call.arg("dims", call.arg("dim", -1))
    for dim in [dims] if isinstance(dims, int) else dims:
        _elsewhere(call, dim, "mixes or orders elements along")
    return call.same_for_all(call.rows(_first(call)))


@rule("aten.layer_norm", "aten.rms_norm")
def _norm(call: Call) -> Value:
    for dim in range(len(call.arg("normalized_shape"))):
        _elsewhere(call, -1 - dim, "normalises over")
    call.constant(call.arg("weight"), "the weight")
    call.constant(call.arg("bias"), "the bias")
    return call.rows(_first(call))


# -- products ---------------------------------------------------------------------------------------------------------


@rule("aten.linear", "deepinfer.wide_linear")
def _linear(call: Call) -> Value:
    call.constant(call.arg("weight"), "the weight")
    call.constant(call.arg("bias"), "the bias")
    return _elsewhere(call, -1, "contracts")


@rule("aten.matmul", "aten.bmm", "aten.mm")
def _matmul(call: Call) -> Value:
    return _product(call, *call.node.args[:2])


@rule("aten.addmm")
def _addmm(call: Call) -> Value:
    call.constant(_first(call), "the bias")
    return _product(call, *call.node.args[1:3])


def _product(call: Call, a: Any, b: Any) -> Value:
    """a @ b: the token dimension may be a row of a, a column of b, or a batch dimension of both, never contracted."""
    rank = call.result_rank()
    if min(call.rank(a), call.rank(b)) < 2:
        call.refuse("a product with a vector has no rule")
    found: set[Rows] = set()
    for arg, contracted in ((a, 1), (b, 2)):
        held = call.of(arg)
        if isinstance(held, Rows) and call.rank(arg) - held.dim == contracted:
            call.refuse("it contracts the token dimension")
        if isinstance(held, Rows):
            found.add(Rows(held.axis, held.dim + rank - call.rank(arg), held.inner))
        elif held is not Kind.CONST:
            call.refuse(f"operand {arg.name} is {held.value if isinstance(held, Kind) else 'a tuple'}")
    if len(found) != 1:
        call.refuse("it multiplies tokens with other tokens")
    return found.pop()


@rule("aten.einsum")
def _einsum(call: Call) -> Value:
    equation = str(call.node.args[0]).replace(" ", "")
    left, arrow, right = equation.partition("->")
    if not arrow or "." in equation:
        call.refuse("an einsum without an explicit result, or with dots, has no rule")
    named = [(labels, call.of(p)) for labels, p in zip(left.split(","), call.arg("tensors"))]
    if any(held is not Kind.CONST and not isinstance(held, Rows) for _, held in named):
        call.refuse("an operand is batch metadata")
    found = {(labels[held.dim], held.axis, held.inner) for labels, held in named if isinstance(held, Rows)}
    label, axis, inner = next(iter(found))
    if len(found) != 1 or label not in right:
        call.refuse("it contracts the token dimension, or multiplies tokens with other tokens")
    return Rows(axis, right.index(label), inner)


# -- reading and writing by index -------------------------------------------------------------------------------------


@rule("aten.embedding")
def _embedding(call: Call) -> Value:
    call.constant(call.arg("weight"), "the table")
    return call.rows(call.arg("indices"))


@rule("aten.index")
def _index(call: Call) -> Value:
    source, indices = call.node.args[:2]
    used = {i: n for i, n in enumerate(indices) if n is not None}  # type: ignore[arg-type]
    first, count = min(used), len(used)
    if sorted(used) != list(range(first, first + count)) or any(tensor(n).dtype == torch.bool for n in used.values()):
        call.refuse("indices that are apart, or masks, have no rule")
    return _picked(call, source, first, list(used.values()))


@rule("aten.index_select")
def _index_select(call: Call) -> Value:
    return _picked(call, _first(call), call.dim(_first(call), call.arg("dim")), [call.arg("index")])


def _picked(call: Call, source: Any, first: int, indices: list[Node]) -> Value:
    """source indexed from dimension `first` on: tables by tokens, tokens by wanted rows, or other dimensions."""
    held, rank = call.of(source), max(call.rank(n) for n in indices)
    if isinstance(held, Rows) and not first <= held.dim < first + len(indices):
        for index in indices:
            call.constant(index, "an index into another dimension")
        return Rows(held.axis, held.dim + (rank - len(indices) if first < held.dim else 0), held.inner)
    axes = {Kind.ROW_IDS: "rows", Kind.KEPT_IDS: "kept"}
    if held == Rows("tokens", first) and len(indices) == 1 and call.of(indices[0]) in axes:
        return Rows(axes[call.of(indices[0])], first)
    if held == Rows("kept", first) and len(indices) == 1 and call.of(indices[0]) is Kind.KEPT_ROW_IDS:
        return Rows("rows", first)
    if held is not Kind.CONST:
        call.refuse("it picks tokens by computed indices")
    found = aligned(call, indices, rank)
    return Rows(found.axis, found.dim + first, found.inner) if isinstance(found, Rows) else found


@rule("aten.searchsorted")
def _searchsorted(call: Call) -> Value:
    """Where wanted rows are among the kept tokens, or values of tokens in a table."""
    kinds = [call.of(call.arg(n)) for n in ("sorted_sequence", "self")]
    if kinds[0] is Kind.CONST and call.rank(call.arg("sorted_sequence")) == 1 and isinstance(kinds[1], Rows):
        return kinds[1]
    if kinds != [Kind.KEPT_IDS, Kind.ROW_IDS]:
        call.refuse("it looks for something else than wanted rows among kept tokens")
    return Kind.KEPT_ROW_IDS


@rule("aten.gather")
def _gather(call: Call) -> Value:
    found = _elsewhere(call, call.arg("dim"), "picks by index along")
    if call.of(call.arg("index")) != found:
        call.refuse("its indices do not run over the same tokens")
    return found


@rule("aten.scatter", "aten.scatter_add", "aten.scatter_reduce")
def _scatter(call: Call) -> Value:
    found, into, index = call.of(call.arg("index")), _first(call), tensor(call.arg("index"))
    # what is filled with one number may have a row for each row of the indices, be these tokens or not
    free = isinstance(found, Rows) and found.axis != "tokens" and found.dim != call.dim(into, call.arg("dim"))
    if not free or call.of(into) is not Kind.CONST or tensor(into).shape[found.dim] != index.shape[found.dim]:
        found = _elsewhere(call, call.arg("dim"), "writes by index along")
    for name in ("index", "src"):
        if is_tensor(call.arg(name)) and call.of(call.arg(name)) != found:
            call.refuse("what it writes does not run over the same tokens")
    return found


def _refused(reason: str, *names: str) -> None:
    def refuse(call: Call) -> Value:
        call.refuse(reason)

    RULES.update(dict.fromkeys((f"aten.{n}" for n in names), refuse))


_refused("it is attention that no pass has raised", "scaled_dot_product_attention", "_safe_softmax")
_refused("it groups tokens by expert; no pass has raised these experts", "_grouped_mm", "histc", "bincount")
_refused("its result depends on values of all tokens", "nonzero", "unique", "unique_consecutive", "masked_select")
_refused("it writes rows by computed indices", "index_put", "index_copy", "index_add", "index_fill")
