"""mix_streams and join_streams of the CPU library against the dialect's references in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from deepinfer_compile.ops import JOIN_STREAMS, MIX_STREAMS
from tests.cpu_library import load

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 5, 1), (2, 16, 3), (3, 48, 3), (4, 700, 20), (6, 1100, 2)]
"""Streams, channels, rounds."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def operands(tokens: int, count: int, channels: int, dtype: torch.dtype, other: torch.dtype) -> tuple[Tensor, ...]:
    outputs, width = count * (2 + count), count * channels
    return (
        drawn(1, tokens, count, channels, dtype=dtype),
        drawn(outputs, width, dtype=other, seed=1, size=width**-0.5),
        drawn(outputs, dtype=other, seed=2),
        drawn(3, dtype=other, seed=3),
    )


def close(got: Tensor, want: Tensor, dtype: torch.dtype, tolerance: float) -> None:
    assert got.dtype == dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("other", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 16, 100])
def test_mix_streams(tokens: int, dtype: torch.dtype, other: torch.dtype) -> None:
    ops = load() and torch.ops.deepinfer_cpu
    for count, channels, rounds in SHAPES:
        given = operands(tokens, count, channels, dtype, other)
        wanted = MIX_STREAMS.reference(*(t.double() for t in given), 1e-3, rounds, 1e-4)
        for got, want in zip(ops.mix_streams(*given, 1e-3, rounds, 1e-4), wanted, strict=True):
            close(got, want, torch.float32, 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 3, 100])
def test_join_streams(tokens: int, dtype: torch.dtype) -> None:
    ops = load() and torch.ops.deepinfer_cpu
    for count, channels, _ in SHAPES:
        streams, y = drawn(1, tokens, count, channels, dtype=dtype), drawn(1, tokens, channels, dtype=dtype, seed=1)
        for other in DTYPES:
            post = drawn(1, tokens, count, dtype=other, seed=2)
            comb = drawn(1, tokens, count, count, dtype=other, seed=3, size=0.5)
            want = JOIN_STREAMS.reference(*(t.double() for t in (streams, y, post, comb)))
            got = ops.join_streams(streams, y, post, comb)
            assert got.shape == streams.shape
            largest = float(want.abs().max()) if want.numel() else 1.0
            close(got, want, dtype, largest * (2e-6 if dtype == torch.float32 else 2**-8))


def test_strides_and_threads() -> None:
    """Streams that are one row repeated, a weight with gaps, and any number of threads give the same."""
    ops = load() and torch.ops.deepinfer_cpu
    streams, weight, base, scale = operands(5, 3, 200, torch.float32, torch.float32)
    spread = streams[:, :, :1].expand(-1, -1, 3, -1)
    wide = torch.full((15, 700), torch.nan)
    wide[:, :600] = weight
    before, want = (
        torch.get_num_threads(),
        MIX_STREAMS.reference(*(t.double() for t in (spread, weight, base, scale)), 0.1, 4, 1e-6),
    )
    y = drawn(5, 200, dtype=torch.float32).t().contiguous().t()[None]
    joined = JOIN_STREAMS.reference(spread.double(), y.double(), want[1], want[2])
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found = ops.mix_streams(spread, wide[:, :600], base, scale, 0.1, 4, 1e-6)
            for got, one in zip(found, want, strict=True):
                close(got, one, torch.float32, 1e-5)
            close(ops.join_streams(spread, y, found[1], found[2]), joined, torch.float32, 1e-5)
    finally:
        torch.set_num_threads(before)


def test_operands_that_do_not_fit() -> None:
    ops = load() and torch.ops.deepinfer_cpu
    streams, weight, base, scale = operands(2, 3, 8, torch.float32, torch.float32)
    for wrong in (
        (streams, weight[1:], base, scale),
        (streams, weight, base[1:], scale),
        (streams, weight, base, scale[1:]),
    ):
        with pytest.raises(RuntimeError, match="do not fit"):
            ops.mix_streams(*wrong, 1e-6, 2, 1e-6)
    with pytest.raises(RuntimeError, match="do not fit"):
        ops.join_streams(streams, streams[:, :1, 0], base[None, :6], weight[None, :2, :9])
    with pytest.raises(RuntimeError, match="float32 and bfloat16"):
        ops.mix_streams(streams.double(), weight, base, scale, 1e-6, 2, 1e-6)
