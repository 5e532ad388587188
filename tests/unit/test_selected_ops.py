"""Recent rows, choices of rows and attention over them: packed requests in chunks against whole sequences."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.runtime.batch import PAGE_SIZE

COLUMNS = 4


@dataclass
class Cached:
    """Requests whose pages lie scattered, with poison where nothing was written. cuts: new tokens of each step."""

    cuts: tuple[tuple[int, ...], ...]
    tables: Tensor = field(init=False)

    def __post_init__(self) -> None:
        requests = len(self.cuts[0])
        order = torch.randperm(requests * COLUMNS, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(requests, COLUMNS).to(torch.int32)

    def cache(self, rows: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        fill = float("nan") if dtype.is_floating_point else -99
        return torch.full((self.tables.numel(), rows, *shape), fill, dtype=dtype)

    def steps(self):
        """Metadata of each step: first token of each request, new tokens, query_start, seq_len, slot with one of nobody
        behind."""
        done = [0] * len(self.cuts[0])
        for cut in self.cuts:
            first = list(done)
            done = [a + n for a, n in zip(done, cut)]
            start = torch.tensor([0, *torch.tensor(cut).cumsum(0).tolist()], dtype=torch.int32)
            slots = [
                int(self.tables[r, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE
                for r, n in enumerate(cut)
                for p in range(first[r], first[r] + n)
            ]
            yield first, cut, start, torch.tensor(done, dtype=torch.int32), torch.tensor([*slots, -1])


CUTS = (((5, 0, 67, 1), (1, 3, 1, 0), (30, 1, 65, 1), (1, 1, 1, 1)), ((1,), (1,), (7,), (80,)))


def packed(whole: list[Tensor], first: list[int], cut: tuple[int, ...]) -> Tensor:
    """The step's rows of sequences [T, ...], and a row of nobody."""
    rows = [x[a : a + n] for x, a, n in zip(whole, first, cut)]
    return torch.cat((*rows, torch.full_like(whole[0][:1], 3)))


def lengths(cuts: tuple[tuple[int, ...], ...]) -> list[int]:
    return torch.tensor(cuts).sum(0).tolist()


def drawn(cuts: tuple[tuple[int, ...], ...], *shape: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, *shape, generator=generator) for n in lengths(cuts)]


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("fill", [None, 7])
def test_recent_rows(cuts, fill) -> None:
    batch = Cached(cuts)
    given = [(x * 100).long() if fill else x for x in drawn(cuts, 2)]
    filler = None if fill is None else torch.tensor(fill)
    whole = [ops.RECENT.reference(x[None], filler, 3)[0] for x in given]
    for n, x in enumerate(given):  # by hand
        for t in range(min(4, len(x))):
            old = x[t - 2] if t >= 2 else torch.full_like(x[0], fill or 0)
            assert torch.equal(whole[n][t, 0], old)
            assert torch.equal(whole[n][t, 2], x[t])
    cache = batch.cache(PAGE_SIZE, 2, dtype=given[0].dtype)
    for first, cut, start, length, slot in batch.steps():
        found = ops.CACHED_RECENT.reference(
            packed(given, first, cut), cache, start, length, batch.tables, slot, filler, 3
        )
        assert torch.equal(found[:-1], packed(whole, first, cut)[:-1])


def by_hand(q, weights, keys, ratio, top, block, blocks, candidates):
    """Chosen rows and candidate blocks of the last token, as sets."""
    seen = len(q) // ratio
    scores = [float((torch.relu(q[-1] @ keys[ratio * (s + 1) - 1]) * 0.5 * weights[-1]).sum()) for s in range(seen)]
    allowed = [s for s in range(seen) if candidates is None or s // block in candidates]
    chosen = sorted(allowed, key=lambda s: (-scores[s], s))[:top]
    peaks = {b: max(scores[s] for s in range(seen) if s // block == b) for b in {s // block for s in range(seen)}}
    if seen:
        peaks[(seen - 1) // block] = float("inf")
    return set(chosen), set(sorted(peaks, key=lambda b: (-peaks[b], b))[:blocks])


@pytest.mark.parametrize("ratio", [1, 2, 4])
@pytest.mark.parametrize("cuts", CUTS)
def test_chosen_rows_and_attention_over_them(cuts, ratio: int) -> None:
    batch = Cached(cuts)
    heads, width, top, block, blocks, window = 3, 8, 5, 3, 2, 6
    q, weights, keys = drawn(cuts, heads, width), drawn(cuts, heads, seed=1), drawn(cuts, width, seed=2)
    queries, latents, rows = (drawn(cuts, *s, seed=3 + i) for i, s in enumerate(((heads, 10), (10,), (10,))))
    sinks = torch.tensor([0.3, -2.0, 1.0])
    selects = [
        ops.SELECT_ROWS.reference(a[None], w[None], k[None], None, 0.5, ratio, top, block, blocks)
        for a, w, k in zip(q, weights, keys)
    ]
    again = [
        ops.SELECT_ROWS.reference(a[None], w[None], k[None], made[1], 0.5, ratio, top, block, 0)[0]
        for a, w, k, made in zip(q, weights, keys, selects)
    ]
    for n, (chosen, candidates) in enumerate(selects):
        want = by_hand(q[n], weights[n], keys[n], ratio, top, block, blocks, None)
        assert set(chosen[0, -1].tolist()) - {-1} == want[0]
        assert set(candidates[0, -1].tolist()) - {-1} == want[1]
        limited = by_hand(q[n], weights[n], keys[n], ratio, top, block, blocks, want[1])
        assert set(again[n][0, -1].tolist()) - {-1} == limited[0]
    outs = [
        ops.SELECTED_ATTENTION.reference(a[None], c[None], r[None], s[0], sinks, 0.4, window, ratio)[0]
        for a, c, r, s in zip(queries, latents, rows, selects)
    ]
    key_cache, row_cache = batch.cache(PAGE_SIZE // ratio, width), batch.cache(PAGE_SIZE // ratio, 10)
    cache = batch.cache(PAGE_SIZE, 10)
    for first, cut, start, length, slot in batch.steps():
        meta = (start, length, batch.tables)
        written = ops.WRITE_ROWS.reference(packed(keys, first, cut), key_cache, slot, ratio)
        ops.WRITE_ROWS.reference(packed(rows, first, cut), row_cache, slot, ratio)
        limits = (0.5, ratio, top, block)
        given = (packed(q, first, cut), packed(weights, first, cut), key_cache, written, *meta)
        chosen, candidates = ops.CACHED_SELECT_ROWS.reference(*given, None, *limits, blocks)
        wanted = [packed([s[i][0] for s in selects], first, cut)[:-1] for i in (0, 1)]
        assert torch.equal(chosen[:-1], wanted[0])
        assert torch.equal(candidates[:-1], wanted[1])
        assert (chosen[-1] == -1).all()
        limited = ops.CACHED_SELECT_ROWS.reference(*given, candidates, *limits, 0)[0]
        assert torch.equal(limited[:-1], packed([s[0] for s in again], first, cut)[:-1])
        out = ops.CACHED_SELECTED_ATTENTION.reference(
            *(packed(x, first, cut) for x in (queries, latents)), cache, *meta, slot,
            row_cache, written, batch.tables, chosen, sinks, 0.4, window,
        )  # fmt: skip
        torch.testing.assert_close(out[:-1], packed(outs, first, cut)[:-1], atol=2e-6, rtol=2e-6)
        assert out[-1].isfinite().all()


def test_attention_over_a_window_alone_is_attention_with_equal_keys_and_values() -> None:
    q, latents = torch.randn(2, 9, 3, 8), torch.randn(2, 9, 8)
    keys = latents.unsqueeze(1)
    want = ops.ATTENTION.reference(q.transpose(1, 2), keys, keys, None, None, 0.3, 4, 0.0, True)
    found = ops.SELECTED_ATTENTION.reference(q, latents, None, None, None, 0.3, 4, 1)
    torch.testing.assert_close(found, want, atol=2e-6, rtol=2e-6)
