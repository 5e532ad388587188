"""The halves of cached attention: together they are the whole, apart they write once and read often."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from deepinfer_compile.ops import CACHED_ATTENTION, ROW_BATCH, SHARED_ATTENTION, WRITE_KV

PAGE = 64
NEW, LENGTH, SPARE = [3, 0, 70, 1], [3, 5, 100, 65], 2
HEADS, KV_HEADS, WIDTH, VALUE = 6, 2, 20, 12


def batch() -> tuple[tuple[Tensor, ...], Tensor, tuple[Tensor, ...]]:
    """q, k, v of all tokens, a cache that holds NaN wherever nothing was written, and its metadata."""
    gen = torch.Generator().manual_seed(1)
    tokens = sum(NEW) + SPARE
    q, k, v = (
        torch.randn(tokens, h, d, generator=gen) for h, d in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUE))
    )
    kv = torch.full((9, 2, PAGE, KV_HEADS, WIDTH), math.nan)
    table = torch.tensor([[4, -1], [2, -1], [7, 0], [3, 5]], dtype=torch.int32)
    slot, token = [], 0
    for r, (new, length) in enumerate(zip(NEW, LENGTH)):
        for p in range(length):
            at = int(table[r, p // PAGE]) * PAGE + p % PAGE
            if p < length - new:
                kv[at // PAGE, 0, at % PAGE] = torch.randn(KV_HEADS, WIDTH, generator=gen)
                kv[at // PAGE, 1, at % PAGE, :, :VALUE] = torch.randn(KV_HEADS, VALUE, generator=gen)
            else:
                slot.append(at)
                token += 1
    starts = torch.tensor([0, *NEW]).cumsum(0).to(torch.int32)
    meta = starts, torch.tensor(LENGTH, dtype=torch.int32), table, torch.tensor([*slot, *[-1] * SPARE])
    return (q, k, v), kv, meta


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (9, 2.0)])
def test_write_and_read_are_cached_attention(window: int, softcap: float) -> None:
    (q, k, v), kv, meta = batch()
    sinks = torch.linspace(-1, 1, HEADS)
    other = kv.clone()
    want = CACHED_ATTENTION.overload(q, k, v, kv, *meta, 0.3, window, softcap, sinks)
    slots = WRITE_KV.overload(k, v, other, meta[-1])
    assert torch.equal(slots, meta[-1])
    torch.testing.assert_close(other, kv, equal_nan=True, rtol=0, atol=0)
    got = SHARED_ATTENTION.overload(q, other, *meta[:3], slots, 0.3, window, softcap, sinks, VALUE)
    assert torch.equal(got, want)
    torch.testing.assert_close(other, kv, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [(), (0,), (2, 3, 72), tuple(range(76)), (40, 40, 73, 75)])
@pytest.mark.parametrize("window", [0, 9])
def test_chosen_rows_see_what_they_see_in_the_batch(rows: tuple[int, ...], window: int) -> None:
    (q, k, v), kv, meta = batch()
    want = CACHED_ATTENTION.overload(q, k, v, kv, *meta, 0.3, window, 0.0, None)
    picked = torch.tensor(rows, dtype=torch.int64)
    chosen = ROW_BATCH.overload(picked, *meta[:3])
    assert [t.dtype for t in chosen] == [torch.int32] * 3
    assert [t.shape for t in chosen] == [(len(rows) + 1,), (len(rows),), (len(rows), 2)]
    got = SHARED_ATTENTION.overload(q[picked], kv, *chosen, meta[-1][picked], 0.3, window, 0.0, None, VALUE)
    torch.testing.assert_close(got, want[picked], rtol=0, atol=2e-6)
