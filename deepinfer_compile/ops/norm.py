"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467), alone and after a residual addition."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes, wide


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool) -> Tensor:
    x32 = wide(x)
    y = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if cast_first:
        return (weight if offset == 0 else weight + offset) * y.to(x.dtype)
    scale = weight.to(x32.dtype)
    return (y * (scale if offset == 0 else scale + offset)).to(x.dtype)


def _rms_norm_work(x: Tensor, weight: Tensor | None, *rest: object) -> Work:
    return Work(4 * x.numel(), 2 * size_bytes(x) + size_bytes(weight))


RMS_NORM = define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, bool cast_first) -> Tensor",
    reference=_rms_norm,
    fake=lambda x, weight, eps, offset, cast_first: torch.empty_like(x, memory_format=torch.contiguous_format),
    work=_rms_norm_work,
)
"""x [..., H], weight [H] or None -> [..., H]. Normalised in fp32 (fp64 for fp64 x). The factor is `weight + offset`
(offset 1 in Gemma). cast_first: the normalised value is cast to x's dtype before the weight is applied (Llama), else
after (Gemma, GPT-OSS)."""


def _add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, cast_first: bool
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps, offset, cast_first), total


ADD_RMS_NORM = define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, bool cast_first) "
    "-> (Tensor, Tensor)",
    reference=_add_rms_norm,
    fake=lambda x, residual, *rest: (torch.empty_like(x), torch.empty_like(x)),
    work=lambda x, residual, weight, *rest: Work(5 * x.numel(), 4 * size_bytes(x) + size_bytes(weight)),
)
"""x, residual [..., H] -> (norm(x + residual), x + residual)."""
