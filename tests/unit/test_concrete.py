"""Evaluating index arithmetic of a graph on the CPU, wherever the graph itself runs."""

from __future__ import annotations

import torch
from torch.fx import Graph

from deepinfer_compile.match_moe import Concrete

A = torch.ops.aten


def test_a_graph_for_another_device_is_evaluated_here() -> None:
    """Factories name their device, and only the CPU counts floating numbers alone."""
    graph = Graph()
    ids = graph.placeholder("ids")
    count = graph.call_function(A.histc.default, (ids, 4, 0, 3))
    first = graph.call_function(A.arange.default, (4,), {"device": torch.device("cuda", 0)})
    there = graph.call_function(A.to.device, (first, torch.device("cuda", 0), torch.int32))
    both = graph.call_function(A.add.Tensor, (count, there))
    held = torch.tensor([3, 0, 3, 1], dtype=torch.int32)
    for node, shape in ((ids, 4), (count, 4), (first, 4), (there, 4), (both, 4)):
        node.meta["val"] = torch.empty(shape, dtype=torch.int32)
    made = Concrete(4, {ids: held}).value(both)
    assert made.tolist() == [1, 2, 2, 5]
    assert made.dtype == torch.int32
