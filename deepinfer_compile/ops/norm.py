"""Root-mean-square normalisation (Zhang and Sennrich, arXiv 1910.07467): alone, after a residual addition, and of the
rows that are wanted."""

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


def _rows_rms_norm(
    x: Tensor,
    residual: Tensor | None,
    rows: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    cast_first: bool,
) -> Tensor:
    chosen = x.index_select(-2, rows)
    if residual is not None:
        chosen = chosen + residual.index_select(-2, rows)
    return _rms_norm(chosen, weight, eps, offset, cast_first)


def _rows_rms_norm_work(x: Tensor, residual: Tensor | None, rows: Tensor, weight: Tensor | None, *rest: object) -> Work:
    elements = rows.shape[0] * x.shape[-1]
    read, flops = (2, 5) if residual is not None else (1, 4)
    return Work(flops * elements, (read + 1) * elements * x.element_size() + size_bytes(weight, rows))


ROWS_RMS_NORM = define(
    "rows_rms_norm(Tensor x, Tensor? residual, Tensor rows, Tensor? weight, float eps, float offset, bool cast_first) "
    "-> Tensor",
    reference=_rows_rms_norm,
    fake=lambda x, residual, rows, *rest: x.new_empty(*x.shape[:-2], rows.shape[0], x.shape[-1]),
    work=_rows_rms_norm_work,
)
"""x [..., T, H], residual alike or None, rows i64[N] in 0..T-1 -> norm of x, or x + residual, at these rows:
[..., N, H]. The normalisation at the end of a model, of which only the rows with wanted logits are read."""
