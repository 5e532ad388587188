"""Residual streams and hyper-connections: how a sublayer reads several streams of one token and writes them back.

A token has K streams of D channels (Zhu et al., arXiv 2409.19606). A sublayer reads their sum weighted by `pre`; what
it returns is added to each by `post`, while `comb` mixes the streams among themselves. All three come from the streams
themselves, `comb` brought close to doubly stochastic by Sinkhorn's rounds (mHC, arXiv 2512.24880). Weights and sums are
wide (fp32, or fp64 for fp64 operands), streams keep their dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes, wide


def _balance(logits: Tensor, rounds: int, eps: float) -> Tensor:
    comb = wide(logits).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _fake_balance(logits: Tensor, rounds: int, eps: float) -> Tensor:
    return wide(torch.empty_like(logits, memory_format=torch.contiguous_format))


BALANCE_STREAMS = define(
    "balance_streams(Tensor logits, int rounds, float eps) -> Tensor",
    reference=_balance,
    fake=_fake_balance,
    work=lambda logits, rounds, eps: Work(
        4 * rounds * logits.numel(), size_bytes(logits) + logits.numel() * max(4, logits.element_size())
    ),
)
"""logits [..., K, K] -> the same, wide: softmax of rows plus eps, columns divided by their sum + eps, then `rounds` - 1
times rows and columns."""


def _mix(
    streams: Tensor, weight: Tensor, base: Tensor, scale: Tensor, norm_eps: float, rounds: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    count = streams.shape[-2]
    flat = wide(streams.flatten(-2))
    mixes = (flat * torch.rsqrt(flat.pow(2).mean(-1, keepdim=True) + norm_eps)) @ wide(weight).t()
    sizes = (count, count, count * count)
    (pre, post, comb), bases = mixes.split(sizes, -1), base.split(sizes)
    pre = torch.sigmoid(pre * scale[0] + bases[0]) + eps
    post = 2 * torch.sigmoid(post * scale[1] + bases[1])
    comb = (comb * scale[2] + bases[2]).unflatten(-1, (count, count))
    return pre, post, _balance(comb, rounds, eps)


def _fake_mix(streams: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    count, dtype = streams.shape[-2], torch.float64 if streams.dtype == torch.float64 else torch.float32
    shape = streams.shape[:-1]
    return (
        streams.new_empty(shape, dtype=dtype),
        streams.new_empty(shape, dtype=dtype),
        streams.new_empty((*shape, count), dtype=dtype),
    )


def _mix_work(streams: Tensor, weight: Tensor, *rest: object) -> Work:
    tokens = streams.numel() // max(1, weight.shape[1])
    return Work(2 * tokens * weight.numel(), size_bytes(streams, weight) + 4 * tokens * weight.shape[0])


MIX_STREAMS = define(
    "mix_streams(Tensor streams, Tensor weight, Tensor base, Tensor scale, float norm_eps, int rounds, float eps) "
    "-> (Tensor, Tensor, Tensor)",
    reference=_mix,
    fake=_fake_mix,
    work=_mix_work,
)
"""streams [..., K, D], weight [2K + KK, K * D], base [2K + KK], scale [3] -> pre [..., K], post [..., K], comb [..., K,
K], wide.

All streams of a token are normalised together (rms with norm_eps) and multiplied with weight; the results for pre, post
and comb, in that order, are each scaled by an entry of `scale` before base is added. pre is the sigmoid plus eps, post
twice the sigmoid, comb balanced as by `balance_streams`."""


def _collapse(streams: Tensor, pre: Tensor) -> Tensor:
    return (wide(streams) * pre.unsqueeze(-1)).sum(-2).to(streams.dtype)


COLLAPSE_STREAMS = define(
    "collapse_streams(Tensor streams, Tensor pre) -> Tensor",
    reference=_collapse,
    fake=lambda streams, pre: streams.new_empty((*streams.shape[:-2], streams.shape[-1])),
    work=lambda streams, pre: Work(
        2 * streams.numel(), size_bytes(streams, pre) + size_bytes(streams) // max(1, streams.shape[-2])
    ),
)
"""streams [..., K, D], pre [..., K] -> [..., D], the streams' sum weighted by pre."""


def _join(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    old = torch.einsum("...jk,...jd->...kd", wide(comb), wide(streams))
    return (post.unsqueeze(-1) * wide(y).unsqueeze(-2) + old).to(streams.dtype)


JOIN_STREAMS = define(
    "join_streams(Tensor streams, Tensor y, Tensor post, Tensor comb) -> Tensor",
    reference=_join,
    fake=lambda streams, *rest: torch.empty_like(streams, memory_format=torch.contiguous_format),
    work=lambda streams, y, post, comb: Work(
        2 * streams.numel() * (1 + streams.shape[-2]), 2 * size_bytes(streams) + size_bytes(y, post, comb)
    ),
)
"""streams [..., K, D], y [..., D], post [..., K], comb [..., K, K] -> streams: new[k] = post[k] * y + sum over j of
comb[j, k] * old[j]."""
