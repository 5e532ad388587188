"""Products with a weight: a linear layer as kernels compute it, several of one input, and the output projection, where
only the rows whose logits are wanted reach the vocabulary matrix. A wide linear forms and adds up its products in a
wider type than its operands have, and gives that type."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes

LINEAR = define(
    "linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    reference=F.linear,
    fake=lambda x, weight, bias: x.new_empty(*x.shape[:-1], weight.shape[0]),
    work=lambda x, weight, bias: Work(
        2 * (x.numel() // x.shape[-1]) * weight.numel(),
        size_bytes(x, weight, bias) + x.numel() // x.shape[-1] * weight.shape[0] * x.element_size(),
    ),
)
"""x [..., K], weight [N, K], bias [N] or None -> [..., N]. Graphs hold aten.linear, kernels are bound to this."""


def _linears(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _linears_work(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> Work:
    each = [LINEAR.work(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    again = (len(each) - 1) * size_bytes(x)
    return Work(sum(work.flops for work in each), sum(work.bytes for work in each) - again)


LINEARS = define(
    "linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]",
    reference=_linears,
    fake=lambda x, weights, biases: tuple(x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights),
    work=_linears_work,
)
"""x [..., K], weights [N_i, K], biases [N_i] or None, as many -> [..., N_i] each. x is read once."""


def _wide_linear(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


WIDE_LINEAR = define(
    "wide_linear(Tensor x, Tensor weight, Tensor? bias, ScalarType dtype) -> Tensor",
    reference=_wide_linear,
    fake=lambda x, weight, bias, dtype: x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype),
    work=lambda x, weight, bias, dtype: Work(
        2 * (x.numel() // x.shape[-1]) * weight.numel(),
        size_bytes(x, weight, bias) + x.numel() // x.shape[-1] * weight.shape[0] * dtype.itemsize,
    ),
)
"""As a linear of operands cast to `dtype`, which is at least as wide as each of theirs; gives `dtype`. Products of
half-precision numbers are exact in fp32, so casting first and summing in fp32 are the same."""


def _output_projection(x: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.index_select(-2, rows), weight, bias)


OUTPUT_PROJECTION = define(
    "output_projection(Tensor x, Tensor rows, Tensor weight, Tensor? bias) -> Tensor",
    reference=_output_projection,
    fake=lambda x, rows, weight, bias: x.new_empty(*x.shape[:-2], rows.shape[0], weight.shape[0]),
    work=lambda x, rows, weight, bias: Work(
        2 * rows.shape[0] * weight.numel(),
        size_bytes(weight, bias, rows) + rows.shape[0] * (weight.shape[0] + weight.shape[1]) * x.element_size(),
    ),
)
"""x [..., T, H], rows i64[N], weight [V, H], bias [V] or None -> [..., N, V] in x's dtype."""
