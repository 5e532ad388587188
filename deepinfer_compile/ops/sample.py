"""The choice of a token from logits: the most likely one, or a draw from what min_p, top_k and top_p leave.

Every cut keeps the logits from some value on, so it is one threshold on the logits; what ties with the last one kept is
kept. Ties are those of the logits themselves: logits that differ, however little, are ranked, also where their
probabilities round to one number. The cuts apply in the order min_p, top_k, top_p, each to what the one before left.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes, wide

NUMBERS = {
    "temperature": torch.float32,
    "min_p": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "noise": torch.float64,
}
"""Operands beside the logits, one number a row, in the order of the schema."""


def _nucleus(ranked: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The smallest logit kept per row, [N, 1]: the first, from the top, at which the running share reaches top_p."""
    running = weights.cumsum(-1, dtype=torch.float64)
    goal = top_p.double()[:, None] * running[:, -1:]
    at = torch.searchsorted(running, goal).clamp(max=ranked.shape[1] - 1)
    return torch.where(top_p[:, None] < 1, ranked.gather(1, at), -math.inf)


def running_weights(
    logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor
) -> tuple[Tensor, Tensor]:
    """f64[N, V], the weights of what is kept added up in order of id; and i64[N, 1], the most likely token."""
    ranked, order = torch.sort(wide(logits), dim=-1, descending=True, stable=True)
    size = logits.shape[1]
    heat = torch.where(temperature > 0, temperature, 1).to(ranked.dtype)[:, None]
    weights = torch.exp((ranked - ranked[:, :1]) / heat)
    weights = torch.where(weights < min_p[:, None], 0, weights)
    some = (top_k > 0) & (top_k < size)
    kth = ranked.gather(1, torch.where(some, top_k, size).long()[:, None] - 1)
    weights = torch.where(ranked < kth, 0, weights)
    weights = torch.where(ranked < _nucleus(ranked, weights, top_p), 0, weights)
    by_id = torch.zeros_like(weights).scatter(1, order, weights)
    return by_id.cumsum(-1, dtype=torch.float64), order[:, :1]


def first_above(running: Tensor, noise: Tensor) -> Tensor:
    """i64[N, 1]: the first column whose sum exceeds the share `noise` of the whole; the last that adds anything where
    rounding leaves none."""
    last = (running < running[:, -1:]).sum(-1, keepdim=True)
    return torch.searchsorted(running, noise.double()[:, None] * running[:, -1:], right=True).minimum(last)


def _sample(logits: Tensor, temperature: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor, noise: Tensor) -> Tensor:
    running, likely = running_weights(logits, temperature, min_p, top_k, top_p)
    token = torch.where(temperature[:, None] > 0, first_above(running, noise), likely)
    return torch.where(torch.isfinite(logits.gather(1, likely)), token, -1)[:, 0]


SAMPLE = define(
    "sample(Tensor logits, Tensor temperature, Tensor min_p, Tensor top_k, Tensor top_p, Tensor noise) -> Tensor",
    reference=_sample,
    fake=lambda logits, *rest: logits.new_empty(logits.shape[0], dtype=torch.int64),
    work=lambda logits, *rest: Work(10 * logits.numel(), size_bytes(logits)),
)
"""logits [N, V], temperature, min_p, top_p f32[N], top_k i32[N], noise f64[N] in [0, 1) -> ids i64[N].

temperature 0 takes the most likely token, the lowest id of equal ones. Else the token at which the cumulative weight
of what is kept, in order of id, exceeds noise times the whole. min_p keeps at least that share of the largest
probability, 0 is off; top_k 0, negative or at least V is off; top_p 1 is off. A row whose largest logit is not finite,
and one that holds NaN, gives -1."""
