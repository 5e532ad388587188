"""Mixture of experts: the router's choice and the chosen experts' work.

Ties go to the lower index and ids come in descending score, on every path. A logit that is NaN is treated as -inf:
the row is routed among the finite experts; a row with none of them gets weights NaN, so that the token is visibly bad
while ids stay distinct and in range. `scale` is applied here and nowhere else.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.ops.activation import gate_value
from deepinfer_compile.ops.registry import Work, define, size_bytes, wide

KINDS = ("softmax", "softmax_topk", "sigmoid", "sqrt_softplus")
GROUP_RANKS = ("none", "max", "top2")


def _top(scores: Tensor, k: int) -> Tensor:
    """i64[T, k] indices of the k largest along the last axis, stable: lower index first among equals."""
    indices: Tensor = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return indices[..., :k]


def _scores(logits: Tensor, kind: str) -> Tensor:
    if kind == "softmax":
        return torch.softmax(logits, -1)
    if kind == "sigmoid":
        return torch.sigmoid(logits)
    if kind == "sqrt_softplus":
        return torch.sqrt(torch.nn.functional.softplus(logits))
    return logits


def _keep_groups(choice: Tensor, groups: int, kept: int, rank: str) -> Tensor:
    """Scores of experts outside the `kept` best groups become -inf."""
    grouped = choice.unflatten(-1, (groups, -1))
    if rank == "top2":
        group_score = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
    else:
        group_score = grouped.amax(-1)
    alive = torch.zeros_like(group_score, dtype=torch.bool).scatter(-1, _top(group_score, kept), True)
    kept_only: Tensor = grouped.masked_fill(~alive.unsqueeze(-1), -math.inf).flatten(-2)
    return kept_only


def _route(
    logits: Tensor,
    bias: Tensor | None,
    kind: str,
    k: int,
    groups: int,
    kept_groups: int,
    group_rank: str,
    normalize: bool,
    eps: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    if kind not in KINDS or group_rank not in GROUP_RANKS:
        raise ValueError(f"no router of kind {kind!r} with group rank {group_rank!r}")
    clean = wide(logits)
    bad = torch.isnan(clean)
    clean = clean.masked_fill(bad, -math.inf)
    scores = _scores(clean, kind)
    choice = scores if bias is None else scores + wide(bias)
    choice = torch.where(bad | torch.isnan(choice), -math.inf, choice)
    if groups > 1:
        choice = _keep_groups(choice, groups, kept_groups, group_rank)
    ids = _top(choice, k)
    weights = scores.gather(-1, ids)
    if kind == "softmax_topk":
        weights = torch.softmax(weights, -1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    hopeless = (clean == -math.inf).all(-1, keepdim=True)
    return ids.to(torch.int32), (weights * scale).masked_fill(hopeless, math.nan)


def _route_fake(logits: Tensor, bias: Tensor | None, kind: str, k: int, *rest: object) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=torch.int32), logits.new_empty(shape, dtype=torch.float32)


ROUTE = define(
    "route(Tensor logits, Tensor? bias, str kind, int k, int groups, int kept_groups, str group_rank, bool normalize, "
    "float eps, float scale) -> (Tensor, Tensor)",
    reference=_route,
    fake=_route_fake,
    work=lambda logits, *rest: Work(10 * logits.numel(), size_bytes(logits)),
)
"""logits [T, E], bias [E] or None -> ids i32[T, k], weights f32[T, k].

softmax: scores over all experts. softmax_topk: chosen by logit, softmax over the chosen (GPT-OSS). sigmoid: DeepSeek-V3
(arXiv 2412.19437, section 2.1.2): `bias` and groups steer the choice, weights come from the unbiased scores.
sqrt_softplus: DeepSeek-V4. groups > 1 keeps `kept_groups` groups ranked by their best (`max`) or best two (`top2`)."""


def _experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w13: Tensor,
    w2: Tensor,
    b13: Tensor | None,
    b2: Tensor | None,
    act: str,
    alpha: float,
    limit: float,
    interleaved: bool,
    transposed: bool,
) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device)
    for e in torch.unique(ids).tolist():
        if not 0 <= e < w13.shape[0]:
            continue
        token, place = (ids == e).nonzero(as_tuple=True)
        h = x[token] @ (w13[e] if transposed else w13[e].t())
        h = h if b13 is None else h + b13[e]
        gate, up = (h[..., 0::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
        y = gate_value(gate, up, act, alpha, limit) @ (w2[e] if transposed else w2[e].t())
        y = y if b2 is None else y + b2[e]
        out.index_add_(0, token, y.to(out.dtype) * weights[token, place].to(out.dtype).unsqueeze(-1))
    return out.to(x.dtype)


def _experts_work(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, *rest: object) -> Work:
    pairs = ids.numel()
    hit = min(pairs, w13.shape[0])
    per_expert = (w13.shape[1] * w13.shape[2] + w2.shape[1] * w2.shape[2]) * w13.element_size()
    return Work(2 * pairs * (w13[0].numel() + w2[0].numel()), hit * per_expert + 2 * size_bytes(x))


EXPERTS = define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor w13, Tensor w2, Tensor? b13, Tensor? b2, str act, "
    "float alpha, float limit, bool interleaved, bool transposed) -> Tensor",
    reference=_experts,
    fake=lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    work=_experts_work,
)
"""x [T, H], ids int[T, k], weights [T, k], w13 [E, 2I, H], w2 [E, H, I] (transposed: [E, H, 2I] and [E, I, H]),
b13 [E, 2I], b2 [E, H] -> [T, H]. Gate and up are halves of w13's rows, or alternate where `interleaved`. An id outside
0..E-1 contributes nothing. The weighted sum over k is accumulated in fp32."""
