"""What a program needs beside weights and caches: the peak of live values between blocks, per token."""

from __future__ import annotations

from torch import Tensor
from torch.fx import Node

from deepinfer_compile.graph import value
from deepinfer_compile.program import Program


def peak_bytes(program: Program) -> dict[str, int]:
    """Liveness over the skeleton: the largest sum of live block outputs, as bytes per token and bytes per wanted row.

    Inputs, weights and caches are not counted; each value dies after its last use, as in the executor. Workspace
    inside a block is the block's own.
    """
    place = {n: i for i, n in enumerate(program.skeleton.graph.nodes)}
    ids = next(n for n in program.inputs() if n.name == "input_ids")
    tokens = str(value(ids).shape[1])
    peak = {"per_token": 0, "per_row": 0}
    live: list[Node] = []
    for call in program.calls():
        # a value that nobody reads later still exists while the call that made it returns
        live = [n for n in live if last_use(n, place) >= place[call]] + outputs(call)
        sizes = [_bytes(n, tokens) for n in live]
        peak = {key: max(held, sum(s[key] for s in sizes)) for key, held in peak.items()}
    return peak


def outputs(call: Node) -> list[Node]:
    """The skeleton nodes that hold a call's results: the call, or the items taken from it."""
    return list(call.users) if isinstance(value(call), (tuple, list)) else [call]


def last_use(node: Node, place: dict[Node, int]) -> int:
    """Place of the last use of a value."""
    return max((place[u] for u in node.users), default=place[node])


def _bytes(node: Node, tokens: str) -> dict[str, int]:
    val = value(node)
    out = {"per_token": 0, "per_row": 0}
    if not isinstance(val, Tensor):
        return out
    size, key = val.element_size(), "per_row"
    for dim in val.shape:
        if isinstance(dim, int):
            size *= dim
        elif tokens in str(dim):
            key = "per_token"
    out[key] = size
    return out
