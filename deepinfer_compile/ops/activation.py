"""Gated activations: act(gate) * up, in the forms that language models use."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes

KINDS = ("silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "swiglu_clamp")


def gate_value(gate: Tensor, up: Tensor, kind: str, alpha: float, limit: float) -> Tensor:
    """act(gate) combined with up, elementwise, in the dtype of the operands.

    swiglu_oai (GPT-OSS): gate clamped from above by limit, up to [-limit, limit], (up + 1) * gate * sigmoid(alpha
    gate). swiglu_clamp (DeepSeek-V4): the same clamps, then silu(gate) * up. alpha and limit are unused elsewhere.
    """
    if kind == "silu":
        return F.silu(gate) * up
    if kind == "gelu":
        return F.gelu(gate) * up
    if kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    if kind == "relu":
        return F.relu(gate) * up
    if kind not in KINDS:
        raise ValueError(f"gated activations are {KINDS}, not {kind!r}")
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if kind == "swiglu_oai":
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    return F.silu(gate) * up


GATED_ACT = define(
    "gated_act(Tensor gate, Tensor up, str kind, float alpha, float limit) -> Tensor",
    reference=gate_value,
    fake=lambda gate, up, kind, alpha, limit: torch.empty_like(gate, memory_format=torch.contiguous_format),
    work=lambda gate, up, *rest: Work(6 * gate.numel(), 3 * size_bytes(gate)),
)
"""gate, up [..., I] -> [..., I]."""
