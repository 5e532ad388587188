"""Recognise rows that are stored in a few bits with scales, and how they are read back.

Structure says where a piece begins and ends, and gives the numbers of a form; that it computes just that is found by
running it on rows that meet every edge of the formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, tensor, value
from deepinfer_compile.match import RESHAPES, is_last, is_tensor, number, same_sizes, width
from deepinfer_compile.match_moe import ROWS, Concrete, NearMiss
from deepinfer_compile.ops.packed import FORMS, PACK_ROWS, UNPACK_ROWS, row_bytes

A = torch.ops.aten
Constants = Callable[[Node], Tensor | None]
"""The value of a block's input that is a constant of capture, None for others."""


@dataclass(frozen=True)
class Packing:
    """Bytes of rows x. form: as in `ops/packed.py`."""

    out: Node
    x: Node
    form: tuple[int, int, int]
    largest: float
    least: float


def stored(rows: Node) -> Node:
    """What a cache holds of rows: the bytes that they are read from, or they themselves."""
    return rows.args[0] if is_op(rows, UNPACK_ROWS.overload) else rows  # type: ignore[return-value]


def form_of(rows: Node) -> list[int]:
    """The form in which rows are packed, empty for none."""
    return list(argument(rows, "form")) if is_op(rows, UNPACK_ROWS.overload) else []


def packings(nodes: list[Node], constants: Constants) -> Iterator[Packing | tuple[Node, str]]:
    """Every piece of a graph that packs rows, or where one looks as if it did, and why it does not."""
    for node in nodes:
        groups = _groups(node, constants)
        if groups is None:
            continue
        try:
            yield _packing(node, groups, constants)
        except NearMiss as reason:
            yield node, str(reason)


def _groups(node: Node, constants: Constants) -> list[Node] | None:
    """What bytes are computed from, behind two runs of bytes in one: the rows in groups first."""
    if not is_op(node, A.cat.default) or tensor(node).dtype != torch.uint8:
        return None
    parts = node.args[0]
    if len(parts) != 2 or not is_last(node, argument(node, "dim")):  # type: ignore[arg-type]
        return None
    found, queue, seen = None, [node], {node}
    for one in queue:
        if _is_grouping(one):
            if found not in (None, one):
                return None
            found = one
            continue
        if one.op == "placeholder" and constants(one) is None:
            return None
        new = [i for i in one.all_input_nodes if i not in seen]
        seen.update(new)
        queue += new
    return None if found is None else [found, *(n for n in queue if n is not found)]


def _is_grouping(node: Node) -> bool:
    """Whether a node is rows of numbers with their last dimension in groups."""
    if not is_op(node, *RESHAPES) or not is_tensor(node) or not tensor(node).is_floating_point():
        return False
    before, after = tensor(node.args[0]).shape, tensor(node).shape  # type: ignore[arg-type]
    if len(after) != len(before) + 1 or not all(isinstance(n, int) for n in (before[-1], *after[-2:])):
        return False
    return after[-1] > 1 and after[-2] * after[-1] == before[-1] and same_sizes(before[:-1], after[:-2])


def _packing(node: Node, region: list[Node], constants: Constants) -> Packing:
    """The form of a piece. Raises NearMiss."""
    groups, x = region[0], region[0].args[0]
    assert isinstance(x, Node)
    size, group = width(x), int(tensor(groups).shape[-1])
    limits, lowest = _numbers(region)
    for form in (f for f in FORMS if f[1] == group and row_bytes(size or 0, f) == width(node)):
        for largest in limits:
            for least in lowest:
                found = Packing(node, x, form, largest, least)
                if _packs(found, constants):
                    return found
    raise NearMiss("rows become bytes in no form that is known")


def _numbers(region: list[Node]) -> tuple[set[float], set[float]]:
    """Bounds on both sides, and bounds from below, that a piece clamps to."""
    limits, lowest = set(), set()
    for node in (n for n in region if is_op(n, A.clamp.default)):
        low, high = (number(argument(node, name)) for name in ("min", "max"))
        if low is not None and low > 0 and high is None:
            lowest.add(low)
        if low is not None and high is not None and low == -high:
            limits.add(high)
    return limits, lowest


def probes(shape: tuple[int, ...], dtype: torch.dtype, largest: float) -> Tensor:
    """Rows of all sizes, of halves between two numbers of a format, of zeros, and some that are not finite."""
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(shape, generator=generator, dtype=torch.float64).flatten(0, -2)
    sizes = torch.logspace(-40, 36, len(flat), dtype=torch.float64)[:, None]
    flat = flat * sizes
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, largest], dtype=torch.float64)
    many = ties.repeat(-(-flat.shape[1] // len(ties)))[: flat.shape[1]]
    flat[0], flat[1], flat[2], flat[3, 0], flat[4, -1] = many, -many * 2, 0.0, torch.inf, torch.nan
    return flat.view(shape).to(dtype)


def _packs(found: Packing, constants: Constants) -> bool:
    """Whether a piece gives the bytes of its form."""
    run = Concrete(ROWS, missing=lambda hole: _constant(hole, constants))
    rows = probes(run.shape(found.x), tensor(found.x).dtype, found.largest)
    run.given[found.x] = rows
    got, want = run.value(found.out), PACK_ROWS.reference(rows, found.form, found.largest, found.least)
    # what stands for numbers beside a scale that is not finite says nothing
    finite = rows.float().isfinite().all(-1)
    scales = rows.shape[-1] // found.form[1]
    return torch.equal(got[finite], want[finite]) and torch.equal(got[..., -scales:], want[..., -scales:])


def _constant(hole: Node, constants: Constants) -> Tensor:
    held = constants(hole)
    if held is None:
        raise NearMiss(f"it depends on the input {hole.meta.get('weight', hole.name)}")
    return held


def unpacking(found: Packing, constants: Constants) -> Node | None:
    """The rows that a graph reads back from packed ones, fp32 or wider; None if it does something else with them."""
    inside: list[Node] = []
    known = {found.out}
    for node in found.out.graph.nodes:
        given = node.all_input_nodes
        reads = node.op == "call_function" and any(n in known for n in given)
        if reads and all(n in known or _is_constant(n, constants) for n in given):
            known.add(node)
            inside.append(node)
    rows = tensor(found.x)
    for i, node in enumerate(inside):
        held = value(node)
        fits = isinstance(held, Tensor) and held.is_floating_point() and held.itemsize >= 4
        if fits and same_sizes(held.shape, rows.shape):
            before = set(inside[:i])
            if all(user is node or user in before for one in before for user in one.users):
                return node if _unpacks(found, node, constants) else None
    return None


def _is_constant(node: Node, constants: Constants) -> bool:
    if isinstance(value(node), SymInt):
        return True
    if node.op == "placeholder":
        return constants(node) is not None
    return node.op == "call_function" and all(_is_constant(n, constants) for n in node.all_input_nodes)


def _unpacks(found: Packing, node: Node, constants: Constants) -> bool:
    run = Concrete(ROWS, missing=lambda hole: _constant(hole, constants))
    rows = probes(run.shape(found.x), torch.float32, found.largest)
    run.given[found.out] = PACK_ROWS.reference(rows, found.form, found.largest, found.least)
    want = UNPACK_ROWS.reference(run.given[found.out], found.form, tensor(node).dtype)
    try:
        got = run.value(node)
    except NearMiss:
        return False
    same = (got == want) | (got.isnan() & want.isnan())
    return bool(same.all())
