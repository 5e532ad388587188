"""The published expert-placement algorithm, every layer at once, in numpy.

Source: https://github.com/deepseek-ai/EPLB (README and its worked example). Replicas go greedily to the expert with the
most load a replica; items go, heaviest first, to the lightest pack that has room. Hierarchical where groups divide by
nodes: groups to nodes, replicas inside a node, replicas to the node's ranks; otherwise one node and one group.

Kept as it is, two replicas of an expert on one rank included, because plans are compared with it. One difference: loads
are summed in fp64, where the published code rounds them to fp32, so counts above 2**24 keep their order. The loops run
over slots, each step over all layers: a step is short for numpy, so the time hardly grows with layers.
"""

from __future__ import annotations

import numpy as np

from deepinfer_compile.eplb.placement import Floats, Ints, Placement


def pack_evenly(weight: Floats, packs: int) -> tuple[Ints, Ints]:
    """The pack [L, N] of each of N weighted items and its place [L, N] there, each pack taking N / packs items."""
    layers, items = weight.shape
    room = items // packs
    if room == 1:
        identity = np.broadcast_to(np.arange(items), weight.shape)
        return identity, np.zeros_like(identity)
    order = np.argsort(-weight, axis=1, kind="stable")
    pack, place = np.empty((layers, items), np.int64), np.empty((layers, items), np.int64)
    filled, total = np.zeros((layers, packs), np.int64), np.zeros((layers, packs))
    row = np.arange(layers)
    for item in order.T:
        lightest = total.argmin(1)
        pack[row, item] = lightest
        place[row, item] = filled[row, lightest]
        filled[row, lightest] += 1
        total[row, lightest] += weight[row, item]
        total[row[filled[row, lightest] == room], lightest[filled[row, lightest] == room]] = np.inf
    return pack, place


def replicate(load: Floats, slots: int) -> tuple[Ints, Ints, Ints]:
    """The expert [L, slots] and the replica number [L, slots] of each replica, and the counts [L, E]."""
    layers, experts = load.shape
    expert, number = np.tile(np.arange(slots), (layers, 1)), np.zeros((layers, slots), np.int64)
    counts, share, row = np.ones((layers, experts), np.int64), load.copy(), np.arange(layers)
    for i in range(experts, slots):
        chosen = share.argmax(1)
        expert[:, i] = chosen
        number[:, i] = counts[row, chosen]
        counts[row, chosen] += 1
        share[row, chosen] = load[row, chosen] / counts[row, chosen]
    return expert, number, counts


def groups_to_nodes(load: Floats, nodes: int, groups: int) -> Ints:
    """The experts [L, nodes, E / nodes] of each node: groups packed by their load, experts of a group in order."""
    layers, experts = load.shape
    size, per_node = experts // groups, groups // nodes
    node, place = pack_evenly(load.reshape(layers, groups, size).sum(-1), nodes)
    first = (node * per_node + place) * size
    position = (first[:, :, None] + np.arange(size)).reshape(layers, experts)
    found = np.empty((layers, experts), np.int64)
    np.put_along_axis(found, position, np.broadcast_to(np.arange(experts), found.shape), 1)
    return found.reshape(layers, nodes, experts // nodes)


def published(load: Floats, slots: int, ranks: int, nodes: int, groups: int) -> Placement:
    """The published plan for loads [L, E]; sizes must fit as `request.checked` has them, groups divide by nodes."""
    layers, experts = load.shape
    ids = groups_to_nodes(load, nodes, groups).reshape(layers * nodes, experts // nodes)
    mine = np.take_along_axis(np.repeat(load, nodes, 0), ids, 1)
    expert, number, counts = replicate(mine, slots // nodes)
    share = np.take_along_axis(mine / counts, expert, 1)
    rank, place = pack_evenly(share, ranks // nodes)
    slot = rank * (slots // ranks) + place
    placed, numbered = np.empty_like(expert), np.empty_like(expert)
    np.put_along_axis(placed, slot, np.take_along_axis(ids, expert, 1), 1)
    np.put_along_axis(numbered, slot, number, 1)
    phy2log, replica = placed.reshape(layers, slots), numbered.reshape(layers, slots)
    logcnt = np.empty((layers, experts), np.int64)
    np.put_along_axis(logcnt, ids.reshape(layers, experts), counts.reshape(layers, experts), 1)
    log2phy = np.full((layers, experts, int(logcnt.max())), -1, np.int64)
    log2phy[np.arange(layers)[:, None], phy2log, replica] = np.arange(slots)
    return Placement(phy2log, log2phy, logcnt)


__all__ = ["groups_to_nodes", "pack_evenly", "published", "replicate"]
