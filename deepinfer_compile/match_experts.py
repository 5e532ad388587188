"""Find the experts of a graph: two projections around a gated activation, in each way that models batch them.

Rows: tokens are repeated per chosen expert, and each row meets its own expert's weights (a grouped product over sorted
rows, or a batched product with gathered weights). All: every expert sees every token, as one batched product or as one
module an expert. What the pass needs from all of them is the same: input, weights, biases, activation, output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from deepinfer_compile.graph import is_op, only_user, tensor
from deepinfer_compile.match_moe import A, Gate, NearMiss, ancestors, find_gate, operand

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
    found = (_grouped(n) or _gathered(n) or _batched(n) or _einsum(n) or _single(n) for n in graph.nodes)
    return [p for p in found if p is not None]


def _is_weight(node: object, dims: int) -> bool:
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
    if not _is_weight(weight, 3) or (rows is not None and ends not in _readers_of_ids(rows)):
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
    if is_op(other, A.index.Tensor) and _is_weight(other.args[0], 2) and len(other.args[1]) == 1:  # type: ignore
        return user, operand(other), other.args[1][0]  # type: ignore[index, return-value]
    return out, None, None


def _gathered(node: Node) -> Projection | None:
    """A batched product with one gathered weight a row."""
    if not is_op(node, A.bmm.default):
        return None
    for place, other, dim, transposed in ((0, 1, -1, False), (1, 0, 1, True)):
        gathered, column = operand(node, place), operand(node, other)
        if not is_op(gathered, A.index.Tensor) or not is_op(column, A.unsqueeze.default) or column.args[1] != dim:
            continue
        index = gathered.args[1]
        squeeze = only_user(node)
        if not _is_weight(gathered.args[0], 3) or len(index) != 1 or not is_op(squeeze, A.squeeze.dim):  # type: ignore
            continue
        assert squeeze is not None
        out, bias, rows = _row_bias(squeeze)
        if squeeze.args[1] == dim and rows in (None, index[0]):  # type: ignore[index]
            return Projection(operand(column), operand(gathered), bias, transposed, out, "ids", index[0])  # type: ignore
    return None


def _batched(node: Node) -> Projection | None:
    """One product for all experts: [E, T, I] with [E, I, O], or [T, I] broadcast over the experts."""
    if not is_op(node, A.bmm.default, A.matmul.default):
        return None
    weight, transposed = _turned(operand(node, 1))
    if not _is_weight(weight, 3):
        return None
    x = operand(node)
    while is_op(x, A.expand.default, A.unsqueeze.default, A.repeat.default) and _repeats_over_experts(x):
        x = operand(x)
    return Projection(x, weight, None, transposed, node, axis=0)


def _repeats_over_experts(node: Node) -> bool:
    """Whether a call only adds or widens the leading expert axis."""
    if is_op(node, A.unsqueeze.default):
        return node.args[1] == 0
    source, made = tensor(operand(node)), tensor(node)
    if is_op(node, A.repeat.default) and any(r != 1 for r in node.args[1][1:]):  # type: ignore[index]
        return False
    return made.dim() == 3 and (source.dim() == 2 or source.shape[0] == 1)


def _einsum(node: Node) -> Projection | None:
    """An einsum with a weight [E, O, I] or [E, I, O]; features are the last axis of input and output."""
    if not is_op(node, A.einsum.default) or len(node.args[1]) != 2:  # type: ignore[arg-type]
        return None
    inputs, _, out = str(node.args[0]).replace(" ", "").partition("->")
    labels = inputs.split(",")
    for w, x in ((1, 0), (0, 1)):
        weight, source = node.args[1][w], node.args[1][x]  # type: ignore[index]
        if not _is_weight(weight, 3) or len(labels[w]) != 3:
            continue
        expert, contracted, made = labels[w][0], labels[x][-1], out[-1]
        known = contracted not in out and made not in labels[x] and expert in out
        if known and labels[w] in (expert + made + contracted, expert + contracted + made):
            transposed = labels[w][1] == contracted
            return Projection(source, weight, None, transposed, node, axis=out.index(expert))
    return None


def _single(node: Node) -> Projection | None:
    """One expert's linear."""
    if is_op(node, A.linear.default) and _is_weight(node.args[1], 2):
        bias = node.args[2] if len(node.args) > 2 else None
        return Projection(operand(node), operand(node, 1), bias, False, node)  # type: ignore[arg-type]
    if is_op(node, A.matmul.default, A.mm.default) and _is_weight(node.args[1], 2):
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
    """(product, factor) where an output, or its cast, is multiplied by something [..., 1]."""
    user = only_user(out)
    while user is not None and is_op(user, *CASTS):
        out, user = user, only_user(user)
    if user is not None and is_op(user, A.mul.Tensor) and len(user.all_input_nodes) == 2:
        factor = next(n for n in user.all_input_nodes if n is not out)
        if tensor(factor).shape[-1] == 1:
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
    """The first node below that has x's shape and dtype: the end of the weighted sum."""
    wanted = str(tuple(tensor(x).shape))
    for _ in range(8):
        user = only_user(node)
        if user is None or not isinstance(value(user), Tensor):
            break
        node = user
        if str(tuple(tensor(node).shape)) == wanted and not is_op(node, A.index.Tensor):
            after = only_user(node)
            cast = after is not None and is_op(after, *CASTS) and tensor(after).dtype == tensor(x).dtype
            node = after if cast and after is not None and tensor(node).dtype != tensor(x).dtype else node
            if tensor(node).dtype == tensor(x).dtype:
                return node
            break
    raise NearMiss("the experts' outputs are not summed to a tensor like their input")


def rows_agree(
    expert: Expert, choice: tuple[Node, Node, Node], ends: tuple[Node, Node, Node], count: int, seed: int
) -> bool:
    """Whether each row's token, expert and weight are those of a random choice, and the end sums a token's rows."""
    ids, weights, x = choice
    factor, product, end = ends
    probe, drawn, share = given_choice(ids, weights, count, 6, seed)
    width = probe.shape(x)
    probe.given[x] = torch.arange(width[0]).to(tensor(x).dtype).view(-1, 1).expand(width)
    token = probe.value(expert.x)[:, 0].long()
    row_weight = probe.value(factor).flatten()
    told = probe.value(expert.down.rows).long()  # type: ignore[arg-type]
    if expert.down.by == "ends":
        told = torch.repeat_interleave(torch.arange(count), torch.diff(told, prepend=torch.zeros(1, dtype=torch.long)))
    if not len(token) == len(told) == len(row_weight) == drawn.numel():
        return False
    dense = dense_weights(drawn, share, count)
    pairs = {(int(t), int(e)) for t, e in zip(token, told)}
    if len(pairs) != drawn.numel() or not torch.equal(dense[token, told], row_weight.to(dense.dtype)):
        return False
    held = torch.randint(-8, 8, probe.shape(product), generator=torch.Generator().manual_seed(seed)).to(
        tensor(product).dtype
    )
    probe.given[product] = held
    want = torch.zeros(width, dtype=held.dtype).index_add_(0, token, held)
    return bool(torch.equal(probe.value(end).to(held.dtype), want))


def all_agree(down: Projection, ids: Node, weights: Node, ends: Node, axis: int, seed: int) -> bool:
    count = count_of(down)
    probe, drawn, share = given_choice(ids, weights, count, 6, seed)
    gen = torch.Generator().manual_seed(seed)
    held = torch.randint(-8, 8, probe.shape(down.out), generator=gen).to(tensor(down.out).dtype)
    probe.given[down.out] = held
    dense = dense_weights(drawn, share, count).reshape(-1, count).float()
    per_token = held.movedim(axis, -2).reshape(-1, count, held.shape[-1]).float()
    want = torch.einsum("te,teh->th", dense, per_token)
    got = probe.value(ends).reshape(want.shape).float()
    return bool((got - want).abs().max() <= 1e-2 * want.abs().max()) and (
        got.dtype != torch.float32 or tensor(ends).dtype != torch.float32 or bool(torch.allclose(got, want, atol=1e-4))
    )


def order_of(factors: Sequence[Node], ids: Node, weights: Node, count: int) -> list[int] | None:
    """Which expert each factor is the weight of; None if they are not a permutation of all."""
    try:
        probe, drawn, share = given_choice(ids, weights, count, 8 + 8 * count, 1)
        dense = dense_weights(drawn, share, count).reshape(-1, count)
        columns = [probe.value(f).reshape(-1).to(dense.dtype) for f in factors]
    except NearMiss:
        return None
    order = [next((e for e in range(count) if torch.equal(c, dense[:, e])), -1) for c in columns]
    return order if sorted(order) == list(range(count)) else None


def sum_of(terms: Sequence[Node]) -> tuple[Node, tuple[Node, ...]]:
    """The sum of all terms, and what else it adds. Raises NearMiss unless nobody reads the sums between."""
    root = terms[0]
    while (user := only_user(root)) is not None and is_op(user, A.add.Tensor) and argument(user, "alpha") == 1:
        root = user
        if set(terms) <= (inside := set(_leaves(root))):
            break
    else:
        raise NearMiss("the experts' outputs are not summed up term by term")
    zeros = (A.zeros_like.default, A.zeros.default, A.new_zeros.default)
    return root, tuple(n for n in inside - set(terms) if not is_op(n, *zeros))


def _leaves(node: Node) -> list[Node]:
    """Operands of a tree of additions."""
    found: list[Node] = []
    for arg in node.args[:2]:
        if is_op(arg, A.add.Tensor) and only_user(arg) is not None and argument(arg, "alpha") == 1:  # type: ignore
            found += _leaves(arg)  # type: ignore[arg-type]
        elif isinstance(arg, Node):
            found.append(arg)
        elif arg != 0:
            raise NearMiss(f"the sum of the experts adds {arg}")
    return found


def _tokens(node: Node) -> str:
    return str(tensor(node).shape[0])


