"""Residual streams: each token by the formulas in plain Python numbers, and what a well-balanced mix must be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.ops.registry import OPS

K, D = 3, 7
NAMES = ("balance_streams", "mix_streams", "collapse_streams", "join_streams")


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def by_hand(logits: list[list[float]], rounds: int, eps: float) -> list[list[float]]:
    rows = [[math.exp(x) / sum(map(math.exp, row)) + eps for x in row] for row in logits]
    for i in range(2 * rounds - 1):
        if i % 2 == 0:
            sums = [sum(row[k] for row in rows) + eps for k in range(len(rows))]
            rows = [[x / s for x, s in zip(row, sums)] for row in rows]
        else:
            rows = [[x / (sum(row) + eps) for x in row] for row in rows]
    return rows


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_balance(rounds: int) -> None:
    logits = drawn(2, 4, K, K)
    found = ops.BALANCE_STREAMS.reference(logits, rounds, 0.01)
    for a in range(2):
        for t in range(4):
            want = torch.tensor(by_hand(logits[a, t].tolist(), rounds, 0.01), dtype=torch.float64)
            torch.testing.assert_close(found[a, t], want, rtol=0, atol=1e-14)


def test_many_rounds_are_doubly_stochastic() -> None:
    found = ops.BALANCE_STREAMS.reference(drawn(50, 4, 4), 20, 1e-6)
    one = torch.ones((), dtype=torch.float64)
    torch.testing.assert_close(found.sum(-1), one.expand(50, 4), rtol=0, atol=1e-3)
    torch.testing.assert_close(found.sum(-2), one.expand(50, 4), rtol=0, atol=2e-5)
    assert bool((found > 0).all())


def test_a_mix() -> None:
    streams, weight, base, scale = (
        drawn(5, K, D),
        drawn(2 * K + K * K, K * D, seed=1),
        drawn(15, seed=2),
        drawn(3, seed=3),
    )
    pre, post, comb = ops.MIX_STREAMS.reference(streams, weight, base, scale, 0.5, 3, 0.01)
    for t in range(5):
        flat = streams[t].flatten()
        m = weight @ (flat / math.sqrt(float((flat * flat).sum()) / flat.numel() + 0.5))
        for k in range(K):
            gates = [1 / (1 + math.exp(-float(m[i] * scale[j] + base[i]))) for j, i in enumerate((k, K + k))]
            assert math.isclose(float(pre[t, k]), gates[0] + 0.01, abs_tol=1e-13)
            assert math.isclose(float(post[t, k]), 2 * gates[1], abs_tol=1e-13)
        logits = (m[2 * K :] * scale[2] + base[2 * K :]).view(K, K).tolist()
        want = torch.tensor(by_hand(logits, 3, 0.01), dtype=torch.float64)
        torch.testing.assert_close(comb[t], want, rtol=0, atol=1e-13)


def test_reading_and_writing_streams() -> None:
    streams, y, post, comb = (
        drawn(2, 3, K, D),
        drawn(2, 3, D, seed=1),
        drawn(2, 3, K, seed=2),
        drawn(2, 3, K, K, seed=3),
    )
    read = ops.COLLAPSE_STREAMS.reference(streams, post)
    new = ops.JOIN_STREAMS.reference(streams, y, post, comb)
    assert read.shape == (2, 3, D)
    assert new.shape == streams.shape
    for a, t in ((0, 0), (1, 2)):
        for d in range(D):
            total = sum(float(streams[a, t, k, d] * post[a, t, k]) for k in range(K))
            assert math.isclose(float(read[a, t, d]), total, abs_tol=1e-13)
            for k in range(K):
                old = sum(float(comb[a, t, j, k] * streams[a, t, j, d]) for j in range(K))
                want = float(post[a, t, k] * y[a, t, d]) + old
                assert math.isclose(float(new[a, t, k, d]), want, abs_tol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fakes_and_dtypes(dtype: torch.dtype) -> None:
    """What tracing is told is what references give; weights of streams are wide, streams keep their dtype."""
    streams, y = drawn(1, 4, K, D, dtype=dtype), drawn(1, 4, D, dtype=dtype)
    weight, base, scale = drawn(15, K * D, dtype=dtype), drawn(15, dtype=dtype), drawn(3, dtype=dtype)
    _, post, comb = ops.MIX_STREAMS.reference(streams, weight, base, scale, 1e-6, 2, 1e-6)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert post.dtype == comb.dtype == wide
    given = {
        "balance_streams": (comb, 2, 1e-6),
        "mix_streams": (streams, weight, base, scale, 1e-6, 2, 1e-6),
        "collapse_streams": (streams, post),
        "join_streams": (streams, y, post, comb),
    }
    for name, args in given.items():
        made, fake = (f(*args) for f in (OPS[name].reference, OPS[name].fake))
        for got, told in zip(*(m if isinstance(m, tuple) else (m,) for m in (made, fake)), strict=True):
            assert (got.shape, got.dtype, got.is_contiguous()) == (told.shape, told.dtype, told.is_contiguous())
        assert OPS[name].work(*args).bytes > 0
    assert set(given) == set(NAMES)
