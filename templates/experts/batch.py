"""Routed batches to test and to measure with. What a kernel must not read is NaN: weights of experts that no token
chose, the gaps between rows, and the routing weights of choices that are no expert."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.kernels import Case
from deepinfer_compile.templates.experts.params import Params

F32, BF16 = torch.float32, torch.bfloat16


def routed_batch(case: Case[Params], generator: torch.Generator) -> dict[str, Any]:
    """Operands of experts. The tokens of a request of length 0 are padding: their ids are -1 and the expert count."""
    params, tokens = case.params, sum(case.new)
    score = torch.rand(tokens, params.experts, generator=generator)
    ids = score.topk(params.top_k).indices
    padding = torch.tensor([n == 0 for count, n in zip(case.new, case.lengths) for _ in range(count)], dtype=torch.bool)
    nobody = torch.where(torch.arange(params.top_k) % 2 == 0, -1, params.experts)
    ids = torch.where(padding[:, None], nobody, ids)
    known = (ids >= 0) & (ids < params.experts)
    shares = torch.rand(ids.shape, generator=generator).masked_fill(~known, math.nan)
    hit = ids[known].unique()
    first, second = (2 * params.width, params.hidden), (params.hidden, params.width)
    if params.transposed:
        first, second = first[::-1], second[::-1]

    def matrices(*shape: int, size: float) -> Tensor:
        found = torch.full((params.experts, *shape), math.nan, dtype=params.dtype)
        for expert in hit.tolist():
            found[expert] = torch.randn(shape, generator=generator) * size
        return found

    x = torch.randn(tokens, params.hidden, generator=generator).to(params.dtype)
    return {
        "x": apart(x, params.align, math.nan),
        "ids": apart(ids.to(params.ids_dtype), 1, 0),
        "weights": apart(shares.to(params.weights_dtype), 1, math.nan),
        "w13": matrices(*first, size=params.hidden**-0.5),
        "w2": matrices(*second, size=params.width**-0.5),
        "b13": matrices(2 * params.width, size=1.0) if params.up_bias else None,
        "b2": matrices(params.hidden, size=1.0) if params.down_bias else None,
        "act": params.act,
        "alpha": params.alpha,
        "limit": params.limit,
        "interleaved": params.interleaved,
        "transposed": params.transposed,
    }


def apart(rows: Tensor, align: int, fill: float) -> Tensor:
    """The same rows at odd multiples of `align` elements, with `fill` between them."""
    size = rows.shape[1]
    wide = torch.full((rows.shape[0] + 1, ((size // align) | 1) * align + 2 * align), fill, dtype=rows.dtype)
    found: Tensor = wide[1:, align : align + size]
    found.copy_(rows)
    return found


def _case(name: str, new: tuple[int, ...], lengths: tuple[int, ...], **changes: Any) -> Case[Params]:
    usual = Params(64, 32, 8, 2, BF16, torch.int32, F32, "silu", 0.0, 0.0, False, False, False, False, 16)
    return Case(name, replace(usual, **changes), new, lengths)


LARGE: dict[str, Any] = {"hidden": 7168, "width": 2048, "experts": 256, "top_k": 8}
TURNED: dict[str, Any] = {"interleaved": True, "transposed": True, "up_bias": True, "down_bias": True}
CASES = (
    _case("one", (3,), (3,), hidden=1, width=1, experts=1, top_k=1, dtype=F32, align=1),
    _case("odd", (4, 3), (9, 3), hidden=33, width=19, experts=5, top_k=3, dtype=F32, act="gelu", up_bias=True, align=1),
    _case("even", (9,), (9,)),
    _case("turned", (2, 5), (40, 5), hidden=40, width=24, act="swiglu_oai", alpha=1.702, limit=0.5, **TURNED, align=8),
    _case("upright", (5,), (5,), hidden=32, width=48, dtype=F32, act="gelu_tanh", transposed=True, down_bias=True),
    _case(
        "alternate",
        (6,),
        (6,),
        hidden=72,
        width=40,
        act="relu",
        interleaved=True,
        ids_dtype=torch.int64,
        weights_dtype=BF16,
        align=8,
    ),
    _case("crowded", (150,), (150,), experts=3, act="swiglu_clamp", limit=0.5, hidden=48, width=80),
    _case("padding", (3, 2, 1), (3, 0, 70), experts=6, top_k=4, dtype=F32, hidden=36, width=20, align=4),
    _case("many", (1,), (1,), experts=70, top_k=6, hidden=16, width=16),
    _case("typical", (1,) * 64, (4096,) * 64, **LARGE),
    _case("largest", (1024,) * 4, (4096,) * 4, **LARGE),
)
