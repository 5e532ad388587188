"""The default policy: the published plan without duplicates, then improved; replanning by few exchanges.

Fresh: replicas and ranks as published, except that no expert is twice on a rank, then exchanges between ranks. So it
is never worse than the published plan where that has no duplicate. Hierarchical plans keep the published choice of node
for each group and are improved inside each node.

Replanning changes the plan in force until its largest load is within `tolerance` of a fresh plan's. A layer where
exchanges end before that gets the fresh plan, renamed so that what can stay stays. So the balance is that of a fresh
plan either way, and only the number of weights that move depends on luck.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.measures import held, rank_loads
from deepinfer_compile.eplb.pack import pack, spread
from deepinfer_compile.eplb.placement import Flags, Floats, Ints
from deepinfer_compile.eplb.published import groups_to_nodes
from deepinfer_compile.eplb.relabel import relabelled
from deepinfer_compile.eplb.request import Request
from deepinfer_compile.eplb.swaps import refine, replan

NEAR = 0.003
"""A fresh plan is good enough this far above a perfect split: below it exchanges cost more time than they save."""
TRIES = 10
"""Exchanges of a layer of a fresh plan that lower the largest load without reaching that."""


def balanced(load: Floats, request: Request, speed: Floats, current: Ints | None, tolerance: float) -> Ints:
    """The expert in each slot [L, S]. load: [L, E]; speed: [R]; current: the plan in force [L, S]."""
    new, worst = fresh(load, request, speed)
    if current is None:
        return new
    enough = worst * (1 + tolerance)
    changed, reached = _changed(load, request, speed, current, enough)
    if not reached.all():
        left = ~reached
        changed[left] = relabelled(current[left], new[left], speed, request.nodes, request.experts)
    return changed


def fresh(load: Floats, request: Request, speed: Floats) -> tuple[Ints, Floats]:
    """A plan that looks at loads alone: the expert in each slot [L, S], the largest load over speed [L]."""
    layers, nodes = len(load), request.nodes
    ids: Ints | None = None
    mine = load
    if request.groups > 1:
        ids = groups_to_nodes(load, nodes, request.groups).reshape(layers * nodes, -1)
        mine = np.take_along_axis(np.repeat(load, nodes, 0), ids, 1)
    if request.crowded:
        slots = crowded(request, len(mine))
        per_rank = rank_loads(mine, slots, request.ranks // nodes)
        worst = (per_rank / _paces(speed, request, layers)).max(1)
    else:
        slots, worst = _spread_out(mine, request, _paces(speed, request, layers))
    if ids is not None:
        slots = np.take_along_axis(ids, slots, 1).reshape(layers, request.slots)
    return slots, worst.reshape(layers, nodes).max(1)


def crowded(request: Request, rows: int) -> Ints:
    """Plans of nodes whose ranks have room for all experts of the node: all on each, extra slots alike, so that every
    rank has the same load."""
    local = np.arange(request.slots // request.ranks) % (request.experts // request.nodes)
    return np.tile(local, (rows, request.ranks // request.nodes))


def _spread_out(load: Floats, request: Request, paces: Floats) -> tuple[Ints, Floats]:
    """Plans of rows [B, E / nodes] with fewer slots on a rank than experts."""
    # without any load all experts count alike
    idle = load.sum(1) == 0
    load = np.where(idle[:, None], 1.0, load)
    replicas, counts, shares = spread(load, request.slots // request.nodes, request.ranks // request.nodes)
    order = np.argsort(-np.take_along_axis(shares, replicas, 1), axis=1)
    slots = pack(replicas, order, shares, paces)
    worst = refine(slots, load, counts, shares, paces, NEAR, TRIES)
    return slots, np.where(idle, 0.0, worst)


def _paces(speed: Floats, request: Request, layers: int) -> Floats:
    """The speeds [L * nodes, R / nodes] of each row's ranks."""
    return np.tile(speed.reshape(request.nodes, -1), (layers, 1))


def _changed(load: Floats, request: Request, speed: Floats, current: Ints, enough: Floats) -> tuple[Ints, Flags]:
    """The plans in force changed until no rank is above `enough` [L], and whether that was reached [L]."""
    layers, nodes = len(load), request.nodes
    if request.crowded:
        return _whole(load, request, speed, current, enough)
    if request.groups == 1:
        slots = current.copy()
        return slots, replan(slots, load, _paces(speed, request, layers), enough, 4 * request.slots)
    ids, usable = _nodes_in_force(request, current)
    rows = np.repeat(usable, nodes)
    position = np.empty((layers, request.experts), np.int64)
    local = np.broadcast_to(np.arange(request.experts) % (request.experts // nodes), position.shape)
    np.put_along_axis(position, ids, local, 1)
    slots = np.take_along_axis(position, current, 1).reshape(layers * nodes, -1)[rows]
    mine = np.take_along_axis(load, ids, 1).reshape(layers * nodes, -1)[rows]
    reached = np.zeros(layers * nodes, np.bool_)
    reached[rows] = replan(
        slots, mine, _paces(speed, request, layers)[rows], np.repeat(enough, nodes)[rows], 4 * request.slots
    )
    changed = current.copy()
    table = ids.reshape(layers * nodes, -1)[rows]
    changed[usable] = np.take_along_axis(table, slots, 1).reshape(-1, request.slots)
    return changed, np.logical_and.reduce(reached.reshape(layers, nodes), axis=1)


def _whole(load: Floats, request: Request, speed: Floats, current: Ints, enough: Floats) -> tuple[Ints, Flags]:
    """The plans in force, and which of them [L] have all experts of its node on every rank, none above `enough`."""
    copies = held(current, request.ranks, request.experts)
    kept = _nodes_in_force(request, current)[1]
    kept &= ((copies > 0).sum(2) == request.experts // request.nodes).all(1)
    kept &= (rank_loads(load, current, request.ranks) / speed).max(1) <= enough
    return current.copy(), kept


def _nodes_in_force(request: Request, current: Ints) -> tuple[Ints, Flags]:
    """The experts [L, E] of the nodes in turn, and where [L] a plan keeps each group whole on one node, and as many on
    each; where it does not, the experts are in an order without meaning."""
    on = held(current, request.nodes, request.experts) > 0
    node = on.argmax(1)
    grouped = node.reshape(len(node), request.groups, -1)
    usable = (on.sum(1) == 1).all(1) & (grouped == grouped[:, :, :1]).all((1, 2))
    usable &= (on.sum(2) == request.experts // request.nodes).all(1)
    return np.argsort(node, axis=1, kind="stable"), usable


__all__ = ["balanced", "crowded", "fresh"]
