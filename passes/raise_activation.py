"""Find gated activations in ATen spelling: the anchor is the activation, its other factor tells the kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import GraphModule, Node

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op
from deepinfer_compile.match import (
    alike,
    dtype_of,
    factors_of,
    number,
    operand,
    plus_number,
    products,
    same_shape,
    times_number,
)
from deepinfer_compile.ops import GATED_ACT
from deepinfer_compile.passbase import NONE, PassContext, register

A = torch.ops.aten


@dataclass(frozen=True)
class _Act:
    """act(gate), not yet multiplied. kind "scaled" is gate * sigmoid(alpha * gate)."""

    gate: Node
    kind: str
    alpha: float = 0.0


@dataclass(frozen=True)
class _Clamp:
    """A value and its bounds."""

    source: Node
    low: float | None
    high: float | None


@register
@dataclass(frozen=True)
class RaiseActivation:
    """Replace act(gate) * up by deepinfer::gated_act.

    Before: `silu(gate) * up`, or `(clamp(up, -l, l) + 1) * (g * sigmoid(g * a))` with `g = clamp(gate, None, l)`
    After:  `gated_act(gate, up, "silu", 0.0, 0.0)`, `gated_act(gate, up, "swiglu_oai", a, l)`
    Also gelu (both forms), relu, silu between the clamps (swiglu_clamp), and `g * sigmoid(g)`, which the op rounds once
    and not twice. How gate and up are cut out of one tensor (halves, alternating) stays ATen in front of it.
    Left alone: an activation that is not multiplied with a second value of its own shape and dtype, or with itself, and
    the scaled sigmoid without `up + 1` and equal clamps.
    """

    name: ClassVar[str] = "raise-activation"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.CANONICAL})
    makes: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        done: set[Node] = set()
        for node in list(gm.graph.nodes):
            act = _activation(node)
            if act is None:
                continue
            uses = list(factors_of(node))
            if not uses:
                ctx.miss(node, f"{act.kind} is not multiplied with a second value")
            for product, up in ((p, up) for p, up in uses if p not in done):
                found = _kind(act, node, up)
                if isinstance(found, str):
                    ctx.miss(node, found)
                elif ctx.claim(product, f"{found[2]} of gate times up"):
                    done.add(product)
                    edit = Editor(gm.graph, product)
                    edit.replace(product, edit.call(GATED_ACT.overload, *found))


def _activation(node: Node) -> _Act | None:
    """The activation at a node."""
    if is_op(node, A.silu.default):
        return _Act(operand(node), "silu")
    if is_op(node, A.relu.default):
        return _Act(operand(node), "relu")
    if is_op(node, A.gelu.default):
        return _Act(operand(node), "gelu_tanh" if argument(node, "approximate") == "tanh" else "gelu")
    for gate, curve in products(node):
        if not is_op(curve, A.sigmoid.default):
            continue
        inner, alpha = times_number(operand(curve)) or (operand(curve), 1.0)
        if inner is gate:
            return _Act(gate, "silu" if alpha == 1.0 else "scaled", alpha)
    return None


def _kind(act: _Act, node: Node, up: Node) -> tuple[Any, ...] | str:
    """(gate, up, kind, alpha, limit) of a product of the activation at `node` with `up`, or why there is none."""
    if alike(up, node):
        return "the activation is multiplied with itself"
    if not same_shape(node, up) or dtype_of(node) != dtype_of(up):
        return "the activation is multiplied with a value of another shape or dtype"
    plus = plus_number(up)
    base = plus[0] if plus is not None and plus[1] == 1.0 else None
    limit = _limit(act.gate, base if act.kind == "scaled" and base is not None else up)
    if act.kind == "scaled":
        if base is None or limit is None:
            return f"gate * sigmoid({act.alpha} gate) has no kind without `up + 1` and equal clamps of gate and up"
        return _clamp(act.gate).source, _clamp(base).source, "swiglu_oai", act.alpha, limit
    if act.kind == "silu" and limit is not None:
        return _clamp(act.gate).source, _clamp(up).source, "swiglu_clamp", 0.0, limit
    return act.gate, up, act.kind, 0.0, 0.0


def _limit(gate: Node, up: Node) -> float | None:
    """l where gate is clamped from above by l and up to [-l, l]."""
    g, u = _clamp(gate), _clamp(up)
    return g.high if g.high is not None and g.low is None and (u.low, u.high) == (-g.high, g.high) else None


def _clamp(node: Node) -> _Clamp:
    """The bounds put on a value by clamp calls in a row; no bounds for any other node."""
    low: float | None = None
    high: float | None = None
    while is_op(node, A.clamp.default, A.clamp_max.default, A.clamp_min.default):
        low = _tighter(low, number(argument(node, "min")), max)
        high = _tighter(high, number(argument(node, "max")), min)
        node = operand(node)
    return _Clamp(node, low, high)


def _tighter(a: float | None, b: float | None, choose: Callable[[float, float], float]) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return choose(a, b)
