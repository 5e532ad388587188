"""Whether a piece of graph treats every column of a tensor alone and alike, so that a few columns show what it does.

A weighted sum of experts is tried on random outputs [tokens, experts, H], of which a large model's are hundreds of
megabytes, while every call between them and the sum reads and makes each of the H columns by itself.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.graph import argument, is_op, tensor, value
from deepinfer_compile.match import CASTS
from deepinfer_compile.match_moe import COPIES, A, ancestors

COLUMNS = 64
"""Columns to try what acts on each column alone with."""


def by_column(source: Node, result: Node) -> bool:
    """Whether column c of `result` [..., H] is made of column c of `source` [..., H] alone, and in one way for all c.

    False where a call between them is none of those that are known to be so.
    """
    between = set(ancestors(result, (source,)))
    made = dict.fromkeys((source,))
    for node in (order := [source]):
        found = [user for user in node.users if user in between and user not in made]
        made.update(dict.fromkeys(found))
        order += found
    return result in made and all(_alone(node, made) for node in order[1:])


def _alone(node: Node, made: Collection[Node]) -> bool:
    """Whether a call keeps the columns of its operands in `made` apart and treats them alike."""
    if not isinstance(value(node), Tensor) or not tensor(node).dim():
        return False
    if is_op(node, A.sum.dim_IntList):
        axis, dims = node.args[0], argument(node, "dim")
        rank = tensor(axis).dim()  # type: ignore[arg-type]
        return bool(dims) and all(d % rank != rank - 1 for d in dims)
    if not is_op(node, *COPIES, *CASTS) and torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return False
    others = [value(n) for n in node.all_input_nodes if n not in made]
    return all(not isinstance(held, Tensor) or not held.dim() or held.shape[-1] == 1 for held in others)


__all__ = ["COLUMNS", "by_column"]
