"""Find the experts of a graph: two projections around a gated activation, in each way that models batch them.

Rows: tokens are repeated per chosen expert, and each row meets its own expert's weights (a grouped product over sorted
rows, or a batched product with gathered weights). All: every expert sees every token, as one batched product or as one
module an expert. What the pass needs from all of them is the same: input, weights, biases, activation, output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Graph, Node

from deepinfer_compile.graph import argument, is_op, only_user, tensor, value
from deepinfer_compile.match import CASTS
from deepinfer_compile.match_columns import COLUMNS, by_column
from deepinfer_compile.match_moe import (
    CPU,
    A,
    Gate,
    NearMiss,
    ancestors,
    crosses_tokens,
    dense_weights,
    find_gate,
    given_choice,
    id_candidates,
    operand,
    operands,
    place_of_values,
    seeds_for,
)

ZEROS = (A.zeros_like.default, A.zeros.default, A.new_zeros.default)
PROBE_TOKENS = 48
DIGIT = 128
GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")


@dataclass(frozen=True)
class Projection:
    """out = x W^T + bias, W [E, O, I] or, transposed, [E, I, O]; a single expert's weight has no E.

    rows: what says which expert a row of x meets, ids per row (`by` "ids") or ends of groups (`by` "ends"). Without it
    every expert sees all of x, and `axis` is the expert axis of `out` (None for a single expert).
    """

    x: Node
    weight: Node
    bias: Node | None
    transposed: bool
    out: Node
    by: str = "all"
    rows: Node | None = None
    axis: int | None = None


@dataclass(frozen=True)
class Expert:
    """down(gate(ups(x))): one fused `up` or two, in the order in which the gate takes them."""

    ups: tuple[Projection, ...]
    down: Projection
    gate: Gate

    @property
    def x(self) -> Node:
        """What the experts are applied to."""
        return self.ups[0].x


def projections(graph: Graph) -> list[Projection]:
    """Every product with a weight that can be part of an expert."""
    return [p for n in graph.nodes if (p := _projection(n)) is not None]


def _projection(node: Node) -> Projection | None:
    for kind in (_grouped, _gathered, _batched, _einsum, _single):
        try:
            found = kind(node)
        except NearMiss:
            continue
        if found is not None:
            return found
    return None


def is_weight(node: object, dims: int) -> bool:
    """Whether a node is a tensor of the checkpoint with that many dimensions."""
    return isinstance(node, Node) and node.op == "placeholder" and "weight" in node.meta and tensor(node).dim() == dims


def _turned(node: Node) -> tuple[Node, bool]:
    """(weight, transposed) of a factor [E, I, O]: the weight itself, or a transpose of it."""
    dims = tensor(node).dim()
    if is_op(node, A.transpose.int) and {int(d) % dims for d in node.args[1:]} == {dims - 2, dims - 1}:  # type: ignore
        return operand(node), False
    return node, True


def _grouped(node: Node) -> Projection | None:
    """A grouped product over rows sorted by expert; a bias is added per row."""
    if node.op != "call_function" or getattr(getattr(node.target, "_schema", None), "name", "") not in GROUPED:
        return None
    weight, transposed = _turned(operand(node, 1))
    out, bias, rows = _row_bias(node)
    ends = operand(node, 2)
    if not is_weight(weight, 3) or (rows is not None and ends not in _readers_of_ids(rows)):
        return None
    return Projection(operand(node), weight, bias, transposed, out, "ends", ends)


def _readers_of_ids(rows: Node) -> set[Node]:
    """What is computed from ids per row within a few steps: the ends of their groups."""
    found, edge = {rows}, [rows]
    for _ in range(4):
        edge = [u for n in edge for u in n.users]
        found.update(edge)
    return found


def _row_bias(out: Node) -> tuple[Node, Node | None, Node | None]:
    """(output, bias, ids per row) where a gathered bias is added to an output."""
    user = only_user(out)
    if user is None or not is_op(user, A.add.Tensor) or len(user.all_input_nodes) != 2:
        return out, None, None
    other = next(n for n in user.all_input_nodes if n is not out)
    if is_op(other, A.index.Tensor) and is_weight(other.args[0], 2) and len(operands(other, 1)) == 1:
        return user, operand(other), operands(other, 1)[0]
    return out, None, None


def _gathered(node: Node) -> Projection | None:
    """A batched product with one gathered weight a row."""
    if not is_op(node, A.bmm.default):
        return None
    for place, other, dim, transposed in ((0, 1, -1, False), (1, 0, 1, True)):
        gathered, column = operand(node, place), operand(node, other)
        if not is_op(gathered, A.index.Tensor) or not is_op(column, A.unsqueeze.default) or column.args[1] != dim:
            continue
        index, squeeze = operands(gathered, 1), only_user(node)
        if not is_weight(gathered.args[0], 3) or len(index) != 1 or squeeze is None:
            continue
        out, bias, rows = _row_bias(squeeze)
        if is_op(squeeze, A.squeeze.dim) and squeeze.args[1] == dim and rows in (None, index[0]):
            return Projection(operand(column), operand(gathered), bias, transposed, out, "ids", index[0])
    return None


def _batched(node: Node) -> Projection | None:
    """One product for all experts: [E, T, I] with [E, I, O], or [T, I] broadcast over the experts."""
    if not is_op(node, A.bmm.default, A.matmul.default):
        return None
    weight, transposed = _turned(operand(node, 1))
    if not is_weight(weight, 3):
        return None
    x = operand(node)
    while is_op(x, A.expand.default, A.unsqueeze.default, A.repeat.default) and _repeats_over_experts(x):
        x = operand(x)
    return Projection(x, weight, None, transposed, node, axis=0)


def _repeats_over_experts(node: Node) -> bool:
    """Whether a call only adds or widens the leading expert axis."""
    if is_op(node, A.unsqueeze.default):
        return bool(node.args[1] == 0)
    source, made = tensor(operand(node)), tensor(node)
    if is_op(node, A.repeat.default) and any(r != 1 for r in argument(node, "repeats")[1:]):
        return False
    return made.dim() == 3 and (source.dim() == 2 or bool(source.shape[0] == 1))


def _einsum(node: Node) -> Projection | None:
    """An einsum with a weight [E, O, I] or [E, I, O]; features are the last axis of input and output."""
    if not is_op(node, A.einsum.default) or len(node.all_input_nodes) != 2:
        return None
    given = operands(node, 1)
    inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
    labels = inputs.split(",")
    for w, x in ((1, 0), (0, 1)):
        if not out or not is_weight(given[w], 3) or len(labels[w]) != 3:
            continue
        expert, contracted, made = labels[w][0], labels[x][-1], out[-1]
        known = contracted not in out and made not in labels[x] and expert in out
        if known and labels[w] in (expert + made + contracted, expert + contracted + made):
            transposed = labels[w][1] == contracted
            return Projection(given[x], given[w], None, transposed, node, axis=out.index(expert))
    return None


def _single(node: Node) -> Projection | None:
    """One expert's linear."""
    if is_op(node, A.linear.default) and is_weight(node.args[1], 2):
        bias = node.args[2] if len(node.args) > 2 else None
        return Projection(operand(node), operand(node, 1), bias, False, node)  # type: ignore[arg-type]
    if is_op(node, A.matmul.default, A.mm.default) and is_weight(node.args[1], 2):
        return Projection(operand(node), operand(node, 1), None, True, node)
    return None


def experts_of(found: list[Projection]) -> Iterator[Expert | tuple[Projection, NearMiss]]:
    """Pairs of up and down projections around a gate; (down, reason) where the activation is unknown."""
    by_out = {p.out: p for p in found}
    for down in found:
        stops = [p.out for p in found if p is not down and p.by == down.by]
        reached = {n for n in ancestors(down.x, stops) if n in by_out and n in stops}
        ups = [by_out[n] for n in stops if n in reached]
        if not ups or len(ups) > 2 or len({p.x for p in ups}) != 1 or not _same_form((*ups, down)):
            continue
        try:
            gate = find_gate([p.out for p in ups], down.x)
        except NearMiss as reason:
            yield down, reason
            continue
        if gate.swapped and len(ups) == 2:
            ups, gate = ups[::-1], Gate(gate.kind, gate.alpha, gate.limit)
        yield Expert(tuple(ups), down, gate)


def _same_form(parts: tuple[Projection, ...]) -> bool:
    """Whether projections speak of the same rows and experts."""
    first = parts[0]
    same = all((p.by, p.rows, p.axis is None) == (first.by, first.rows, first.axis is None) for p in parts)
    return same and (first.axis is None or len({int(tensor(p.weight).shape[0]) for p in parts}) == 1)


def count_of(down: Projection) -> int:
    """How many experts a batched form has."""
    return int(tensor(down.weight).shape[0])


def name_of(down: Projection) -> str:
    """How experts are batched, for remarks."""
    return {"ends": "grouped rows", "ids": "gathered weights", "all": "every expert on every token"}[down.by]


def weighted(out: Node) -> tuple[Node, Node]:
    """(product, factor) where an output, through casts, is multiplied by something [..., 1]. Raises NearMiss."""
    shape = str(tensor(out).shape)
    user = only_user(out)
    while user is not None and is_op(user, *CASTS, A.unsqueeze.default, A.squeeze.dim):
        out, user = user, only_user(user)
    if user is not None and is_op(user, A.mul.Tensor) and len(user.all_input_nodes) == 2:
        factor = next(n for n in user.all_input_nodes if n is not out)
        if tensor(factor).shape[-1:] == (1,) and str(tensor(user).shape) == shape:
            return user, factor
    raise NearMiss("the experts' output is not multiplied by their weights")


def share_of(down: Projection) -> Node | None:
    """The weight that a single expert's output is multiplied by, if it stems from chosen ids."""
    try:
        factor = weighted(down.out)[1]
    except NearMiss:
        return None
    return factor if id_candidates(factor) else None


def summed(node: Node, x: Node) -> Node:
    """The first node below that has x's shape and dtype: the end of the weighted sum. Raises NearMiss."""
    shape, dtype = str(tensor(x).shape), tensor(x).dtype
    for _ in range(8):
        user = only_user(node)
        if user is None or not isinstance(value(user), Tensor):
            break
        node = user
        if str(tensor(node).shape) != shape or is_op(node, A.index.Tensor):
            continue
        after = only_user(node)
        if tensor(node).dtype != dtype and after is not None and is_op(after, *CASTS):
            node = after
        if tensor(node).dtype == dtype:
            return node
        break
    raise NearMiss("the experts' outputs are not summed to a tensor like their input")


@dataclass(frozen=True)
class Choice:
    """A choice of experts as it stands in the graph: ids and weights [..., k] for tokens x [..., H]."""

    ids: Node
    weights: Node
    x: Node


def rows_agree(expert: Expert, choice: Choice, factor: Node, product: Node, ends: Node, seed: int) -> bool:
    """Whether each row's token, expert and weight are those of a random choice, and `ends` sums a token's rows."""
    down, count = expert.down, count_of(expert.down)
    if crosses_tokens(factor, (choice.ids, choice.weights)) is not None:
        return False
    device = place_of_values(choice.x)
    probe, drawn, share = given_choice(choice.ids, choice.weights, count, PROBE_TOKENS, seed, device)
    shape = probe.shape(choice.x)
    probe.given[choice.x] = _numbered(shape, tensor(choice.x).dtype).to(device)
    token = probe.value(expert.x)[:, :2].long().cpu() @ torch.tensor([1, DIGIT])
    row_weight = probe.value(factor).flatten().cpu()
    told = probe.value(down.rows).flatten().long().cpu()  # type: ignore[arg-type]
    if down.by == "ends":
        told = torch.repeat_interleave(torch.arange(count), torch.diff(told, prepend=told.new_zeros(1)))
    if not len(token) == len(told) == len(row_weight) == drawn.numel():
        return False
    dense = dense_weights(drawn, share, count)
    if len(torch.unique(token * count + told)) != drawn.numel():
        return False
    if not torch.equal(dense[token, told], row_weight.to(dense.dtype)):
        return False
    held = _whole_numbers(probe.shape(product), seed, device).to(tensor(product).dtype)
    probe.given[product] = held
    want = torch.zeros(shape, dtype=held.dtype, device=device).index_add_(0, token.to(device), held)
    return bool(torch.equal(probe.value(ends).to(held.dtype), want))


def _numbered(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """[T, H] whose rows begin with their number in two digits, which every float type holds exactly."""
    rows = torch.zeros(shape, dtype=dtype)
    number = torch.arange(shape[0])
    rows[:, 0], rows[:, 1] = number % DIGIT, number // DIGIT
    return rows


def all_agree(outputs: Node, axis: int, choice: Choice, ends: Node, seed: int) -> bool:
    """Whether `ends` is the chosen experts' weighted sum of outputs that have all experts along `axis`."""
    count = int(tensor(outputs).shape[axis])
    if crosses_tokens(ends, (choice.ids, choice.weights, outputs)) is not None:
        return False
    probe, drawn, share = given_choice(choice.ids, choice.weights, count, PROBE_TOKENS, seed)
    shape = probe.shape(outputs)
    probe.fewer = axis % len(shape) != len(shape) - 1 and shape[-1] > COLUMNS and by_column(outputs, ends)
    held = _whole_numbers((*shape[:-1], COLUMNS) if probe.fewer else shape, seed)
    probe.given[outputs] = held.to(tensor(outputs).dtype)
    dense = dense_weights(drawn, share, count).reshape(-1, count).float()
    each = held.movedim(axis, -2).reshape(-1, count, held.shape[-1])
    if dense.shape[0] != each.shape[0]:
        return False
    want = torch.einsum("te,teh->th", dense, each)
    got = probe.value(ends).float()
    tolerance = 1e-5 if tensor(ends).dtype == torch.float32 else 2e-2
    return got.numel() == want.numel() and bool(
        (got.reshape(want.shape) - want).abs().max() <= tolerance * want.abs().max()
    )


def _whole_numbers(shape: tuple[int, ...], seed: int, device: torch.device = CPU) -> Tensor:
    """Small whole numbers: sums and products with eighths are exact in every float type."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8, device=device).float()


def order_of(factors: Sequence[Node], ids: Node, weights: Node) -> list[int] | None:
    """Which expert each factor is the weight of; None if they are not the weights of experts 0..n-1."""
    count = len(factors)
    if any(crosses_tokens(f, (ids, weights)) for f in factors):
        return None
    shown: list[Tensor] = []
    wanted: list[list[Tensor]] = []
    try:
        for seed in seeds_for(ids, count, PROBE_TOKENS):
            probe, drawn, share = given_choice(ids, weights, count, PROBE_TOKENS, seed)
            shown.append(dense_weights(drawn, share, count).reshape(-1, count))
            wanted.append([probe.value(f).reshape(-1).to(share.dtype) for f in factors])
    except NearMiss:
        return None
    dense, columns = torch.cat(shown), [torch.cat(each) for each in zip(*wanted)]
    order = [next((e for e in range(count) if torch.equal(c, dense[:, e])), -1) for c in columns]
    return order if sorted(order) == list(range(count)) else None


def sum_of(terms: Sequence[Node]) -> tuple[Node, tuple[Node, ...]]:
    """The sum of all terms, and what else it adds. Raises NearMiss unless nobody reads the sums between."""
    root = only_user(terms[0])
    while root is not None and is_op(root, A.add.Tensor) and argument(root, "alpha") == 1:
        leaves = _leaves(root)
        if set(terms) <= set(leaves):
            return root, tuple(n for n in leaves if n not in terms and not is_op(n, *ZEROS))
        root = only_user(root)
    raise NearMiss("the experts' outputs are not summed up term by term")


def _leaves(node: Node) -> list[Node]:
    """Operands of a tree of additions whose sums nobody else reads."""
    found: list[Node] = []
    for arg in node.args[:2]:
        if not isinstance(arg, Node):
            if arg != 0:
                raise NearMiss(f"the sum of the experts adds {arg}")
        elif is_op(arg, A.add.Tensor) and only_user(arg) is not None and argument(arg, "alpha") == 1:
            found += _leaves(arg)
        else:
            found.append(arg)
    return found
