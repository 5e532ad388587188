"""Weights that a graph computes of weights, as recipes: so that a bundle can hold what comes of it, or parts of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node

from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import argument, is_op, place_of, target_name, tensor
from deepinfer_compile.program import WeightRef

A = torch.ops.aten


def derivation(node: Node, refs: Mapping[Node, WeightRef | None]) -> tuple[dict[str, Any], tuple[WeightRef, ...]]:
    """The recipe of a value of a block over the tensors of its weight inputs, and these.

    Raises UnsupportedConstruct where it takes more than stacking, joining, casting and transposing.
    """
    parts: dict[Node, WeightRef] = {}

    def recipe(value: Any) -> Any:
        ref = refs.get(value)
        if ref is not None and ref.value is None:
            parts[value] = ref
            return ref.name
        return _step(value, recipe)

    found = recipe(node)
    return found, tuple(parts.values())


def _step(node: Node, recipe: Any) -> dict[str, Any]:
    rank = tensor(node).dim()
    if is_op(node, A.stack.default, A.cat.default):
        of = [recipe(n) for n in argument(node, "tensors")]
        return {
            "op": "stack" if is_op(node, A.stack.default) else "concat",
            "of": of,
            "dim": argument(node, "dim") % rank,
        }
    if is_op(node, A.transpose.int):
        dims = [argument(node, name) % rank for name in ("dim0", "dim1")]
        return {"op": "transpose", "of": recipe(node.args[0]), "dims": dims}
    if is_op(node, A.permute.default):
        order = [d % rank for d in argument(node, "dims")]
        moved = [i for i, d in enumerate(order) if i != d]
        if len(moved) == 2:
            return {"op": "transpose", "of": recipe(node.args[0]), "dims": moved}
    if is_op(node, A._to_copy.default) and set(node.kwargs) == {"dtype"}:
        return {"op": "cast", "of": recipe(node.args[0]), "to": str(tensor(node).dtype).removeprefix("torch.")}
    raise UnsupportedConstruct(
        construct=f"experts whose weights are made by {target_name(node)}",
        fix="leave out `experts`, or give the model stacked weights",
        where=place_of(node),
    )


__all__ = ["derivation"]
