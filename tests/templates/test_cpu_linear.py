"""linear and linears of the CPU library against float64 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.cpu_library import load

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""Largest error for outputs of size about 1; bfloat16 rounds the output (2^-8 of up to 4) and the library twice."""

DTYPES = [torch.float32, torch.bfloat16]


def values(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def check(x: Tensor, w: Tensor, b: Tensor | None, got: Tensor) -> None:
    want = x.double() @ w.double().t() + (0 if b is None else b.double())
    assert got.dtype == x.dtype
    assert got.shape == want.shape
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, atol=TOLERANCE[x.dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 24, 25, 31, 48, 63, 64, 65, 130])
def test_linear(rows: int, dtype: torch.dtype) -> None:
    ops = load() and torch.ops.deepinfer_cpu
    for depth, outputs in [(1, 1), (7, 3), (64, 50), (130, 33), (576, 192), (2501, 70)]:
        x = values(rows, depth, dtype=dtype)
        w = values(outputs, depth, dtype=dtype, seed=1, size=depth**-0.5)
        b = values(outputs, dtype=dtype, seed=2)
        check(x, w, None, ops.linear(x, w, None))
        check(x, w, b, ops.linear(x, w, b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 3, 40, 100])
def test_linears_equals_one_by_one(rows: int, dtype: torch.dtype) -> None:
    ops = load() and torch.ops.deepinfer_cpu
    x = values(rows, 96, dtype=dtype)
    weights = [values(n, 96, dtype=dtype, seed=n, size=0.1) for n in (64, 1, 333, 7)]
    biases = [None, values(1, dtype=dtype), values(333, dtype=dtype), None]
    for w, b, got in zip(weights, biases, ops.linears(x, weights, biases), strict=True):
        check(x, w, b, got)
        assert torch.equal(got, ops.linear(x, w, b))


@pytest.mark.parametrize("rows", [1, 7, 20])
def test_threads_share_the_columns(rows: int) -> None:
    ops = load() and torch.ops.deepinfer_cpu
    x, before = values(rows, 600, dtype=torch.float32), torch.get_num_threads()
    weights = [values(n, 600, dtype=torch.float32, seed=n, size=0.04) for n in (500, 1, 301)]
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for w, got in zip(weights, ops.linears(x, weights, [None] * 3), strict=True):
                check(x, w, None, got)
    finally:
        torch.set_num_threads(before)


def test_leading_shape_and_strides() -> None:
    ops = load() and torch.ops.deepinfer_cpu
    x = values(3, 40, 2, dtype=torch.float32).transpose(1, 2)
    many = values(100, 80, dtype=torch.float32)[:, ::2]
    wide = values(10, 80, dtype=torch.float32, seed=1, size=0.1)
    wide[:, 40:] = torch.nan
    column_order = values(40, 10, dtype=torch.float32, seed=2, size=0.1).t()
    spread = values(10, 80, dtype=torch.float32, seed=3, size=0.1)[:, ::2]
    for w in (wide[:, :40], column_order, spread):
        check(x, w, None, ops.linear(x, w, None))
        check(many, w, None, ops.linear(many, w, None))
    bias = values(20, dtype=torch.float32)[::2]
    check(x[0, 0], column_order.contiguous(), bias, ops.linear(x[0, 0], column_order.contiguous(), bias))


def test_reads_nothing_beyond_the_weight() -> None:
    ops = load() and torch.ops.deepinfer_cpu
    for rows in (1, 2, 5, 8, 30):
        x = torch.full((rows + 2, 37), torch.nan)
        x[1:-1] = values(rows, 37, dtype=torch.float32)
        w = torch.full((9, 37), torch.nan)
        w[1:-1] = values(7, 37, dtype=torch.float32, seed=1, size=0.1)
        check(x[1:-1], w[1:-1], None, ops.linear(x[1:-1], w[1:-1], None))


def test_nan_and_infinity_pass_through() -> None:
    ops = load() and torch.ops.deepinfer_cpu
    x = values(2, 64, dtype=torch.bfloat16)
    x[0, 63], x[1, 0] = torch.nan, torch.inf
    got = ops.linear(x, torch.ones(5, 64, dtype=torch.bfloat16), None)
    assert got[0].isnan().all()
    assert (got[1] == torch.inf).all()


def test_bad_input_is_refused() -> None:
    ops = load() and torch.ops.deepinfer_cpu
    x, w = torch.zeros(2, 8), torch.zeros(3, 8)
    with pytest.raises(RuntimeError, match="does not fit weight"):
        ops.linear(x, torch.zeros(3, 9), None)
    with pytest.raises(RuntimeError, match="weight is BFloat16"):
        ops.linear(x, w.bfloat16(), None)
    with pytest.raises(RuntimeError, match="bias"):
        ops.linear(x, w, torch.zeros(4))
    with pytest.raises(RuntimeError, match="takes float32 and bfloat16"):
        ops.linear(x.double(), w.double(), None)
    with pytest.raises(RuntimeError, match="2 weights, 1 biases"):
        ops.linears(x, [w, w], [None])
