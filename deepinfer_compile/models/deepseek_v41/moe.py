"""Routed experts: scores sqrt(softplus), chosen with a bias, weighted without it, one shared expert beside them.

Expert weights are one tensor with an expert axis, so that a layer's graph does not grow with experts and no Python
loop reads counts. Every expert sees every token here and unchosen ones get weight 0: dense, slow and plainly right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.parts import wide


def gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """silu(gate) * up, gate clamped from above by limit and up to [-limit, limit]."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


class Gate(nn.Module):
    """Chooses `top` of `weight` [E, D]'s experts per token. `bias` [E] moves the choice, never the weights."""

    def __init__(self, config: DeepseekV41Config, experts: int, top: int) -> None:
        super().__init__()
        self.top, self.temperature, self.scaling = top, config.gate_temp, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """ids i64 [N, top] and their weights, wide, of x [N, D]."""
        logits = wide(x) @ wide(self.weight).t() / self.temperature
        scores = torch.sqrt(F.softplus(logits))
        ids = torch.topk(scores + self.bias, self.top, dim=-1).indices
        weights = scores.gather(-1, ids)
        return ids, weights / (weights.sum(-1, keepdim=True) + 1e-20) * self.scaling


class Experts(nn.Module):
    """All routed experts: `w13` [E, 2I, D] holds gate rows (published w1) above up rows (w3), `w2` is [E, D, I]."""

    def __init__(self, config: DeepseekV41Config, experts: int) -> None:
        super().__init__()
        inner, self.limit = config.moe_intermediate_size, config.swiglu_limit
        self.w13 = nn.Parameter(torch.empty(experts, 2 * inner, config.hidden_size))
        self.w2 = nn.Parameter(torch.empty(experts, config.hidden_size, inner))

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of the chosen experts, wide, of x [N, D]. The weight is applied before w2."""
        share = weights.new_zeros(x.shape[0], self.w2.shape[0]).scatter(1, ids, weights)
        gate, up = torch.einsum("nd,eid->nei", x, self.w13).chunk(2, dim=-1)
        inner = wide(gated(gate, up, self.limit)) * share.unsqueeze(-1)
        return torch.einsum("nei,edi->nd", inner, wide(self.w2))


class SharedExpert(nn.Module):
    """The expert every token passes, unweighted."""

    def __init__(self, config: DeepseekV41Config) -> None:
        super().__init__()
        hidden, inner, self.limit = config.hidden_size, config.moe_intermediate_size, config.swiglu_limit
        self.w1 = nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.w3 = nn.Linear(hidden, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.w2(gated(self.w1(x), self.w3(x), self.limit))
        return y


class MoE(nn.Module):
    """The feed-forward sublayer: x [B, T, D] to the same shape and dtype."""

    def __init__(self, config: DeepseekV41Config, experts: int, top: int) -> None:
        super().__init__()
        self.gate = Gate(config, experts, top)
        self.experts = Experts(config, experts)
        self.shared_experts = SharedExpert(config)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        ids, weights = self.gate(rows)
        y: Tensor = self.experts(rows, ids, weights) + self.shared_experts(rows)
        return y.type_as(x).view_as(x)
