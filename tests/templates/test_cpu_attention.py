"""cached_attention of the CPU library against a float64 loop over visible keys, on poisoned pages."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.cpu_library import load

PAGE = 64
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error allowed for values of size about 1; bfloat16 rounds the output to 2^-9 and its inputs are exact."""


@dataclass
class Case:
    """R requests: `new[r]` new tokens at the end of `length[r]` positions. Pages are shuffled, the rest is NaN."""

    new: list[int]
    length: list[int]
    heads: int = 6
    kv_heads: int = 2
    width: int = 20
    value_width: int = 20
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    spare: int = 0  # padding tokens after the last request

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        tokens, wide = sum(self.new) + self.spare, max(self.width, self.value_width)
        self.q = random(tokens, self.heads, self.width)
        self.k = random(tokens, self.kv_heads, self.width)
        self.v = random(tokens, self.kv_heads, self.value_width)
        self.keys = [random(n, self.kv_heads, self.width) for n in self.length]
        self.values = [random(n, self.kv_heads, self.value_width) for n in self.length]
        self.sink_logits = random(self.heads) if self.sinks else None
        counts = [-(-n // PAGE) for n in self.length]
        total = sum(counts) + 3
        order = torch.randperm(total, generator=generator).tolist()
        self.kv = torch.full((total, 2, PAGE, self.kv_heads, wide), math.nan, dtype=self.dtype)
        self.table = torch.full((len(self.new), max([*counts, 1]) + 1), -1, dtype=torch.int32)
        self.slot = torch.full((tokens,), -1, dtype=torch.int64)
        start = torch.tensor([0, *self.new]).cumsum(0)
        for r, count in enumerate(counts):
            pages = [order.pop() for _ in range(count)]
            self.table[r, :count] = torch.tensor(pages, dtype=torch.int32)
            old = self.length[r] - self.new[r]
            for j in range(self.length[r]):
                page, row = pages[j // PAGE], j % PAGE
                if j < old:
                    self.kv[page, 0, row, :, : self.width] = self.keys[r][j]
                    self.kv[page, 1, row, :, : self.value_width] = self.values[r][j]
                else:
                    token = int(start[r]) + j - old
                    self.slot[token] = page * PAGE + row
                    self.keys[r][j], self.values[r][j] = self.k[token], self.v[token]
        self.start = start.to(torch.int32)
        self.seq_len = torch.tensor(self.length, dtype=torch.int32)
        self.scale = self.width**-0.5

    def run(self) -> Tensor:
        load()
        return torch.ops.deepinfer_cpu.cached_attention(
            self.q,
            self.k,
            self.v,
            self.kv,
            self.start,
            self.seq_len,
            self.table,
            self.slot,
            self.scale,
            self.window,
            self.softcap,
            self.sink_logits,
        )

    def expected(self) -> Tensor:
        out = torch.zeros(self.q.shape[0], self.heads, self.value_width, dtype=torch.float64)
        for r, count in enumerate(self.new):
            for i in range(count):
                token, position = int(self.start[r]) + i, self.length[r] - count + i
                if self.slot[token] < 0:
                    continue
                low = max(0, position - self.window + 1) if self.window else 0
                for h in range(self.heads):
                    g = h // (self.heads // self.kv_heads)
                    keys = self.keys[r][low : position + 1, g].double()
                    s = keys @ self.q[token, h].double() * self.scale
                    if self.softcap:
                        s = self.softcap * torch.tanh(s / self.softcap)
                    e = torch.exp(s - s.max())
                    total = e.sum() + (
                        torch.exp(self.sink_logits[h].double() - s.max()) if self.sink_logits is not None else 0
                    )
                    out[token, h] = (e / total) @ self.values[r][low : position + 1, g].double()
        return out

    def check(self) -> None:
        got = self.run()
        assert got.dtype == self.dtype
        assert got.shape == (self.q.shape[0], self.heads, self.value_width)
        torch.testing.assert_close(got.double(), self.expected(), atol=TOLERANCE[self.dtype], rtol=0)
        assert torch.equal(got, self.run()), "two runs differ"


DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [(20, 20), (64, 64), (24, 40), (40, 16)])
@pytest.mark.parametrize(
    ("new", "length"), [([1], [1]), ([1], [700]), ([1, 1, 1], [64, 65, 300]), ([3, 1, 2], [3, 9, 130])]
)
def test_decode(new: list[int], length: list[int], width: tuple[int, int], dtype: torch.dtype) -> None:
    Case(new, length, width=width[0], value_width=width[1], dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("new", "length"), [([70], [70]), ([128, 1, 33], [128, 200, 163]), ([63, 64, 65], [63, 128, 66])]
)
def test_prefill_and_chunks(new: list[int], length: list[int], dtype: torch.dtype) -> None:
    Case(new, length, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_window_reads_nothing_left_of_it(window: int, dtype: torch.dtype) -> None:
    case = Case([1, 40, 3], [300, 170, 64], window=window, dtype=dtype)
    want = case.expected()
    for r, count in enumerate(case.new):
        first = case.length[r] - count - window + 1
        gone = max(0, first) // PAGE
        for page in case.table[r, :gone].tolist():
            case.kv[page] = math.nan
        case.table[r, :gone] = -1
    torch.testing.assert_close(case.run().double(), want, atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("softcap", "sinks"), [(5.0, False), (0.0, True), (2.0, True)])
def test_softcap_and_sinks(softcap: float, sinks: bool, dtype: torch.dtype) -> None:
    Case([1, 20, 2], [900, 90, 65], softcap=softcap, sinks=sinks, dtype=dtype).check()
    Case([1], [3], softcap=softcap, sinks=sinks, dtype=dtype, window=2).check()


def test_one_key_head_for_many_queries() -> None:
    Case([5, 1], [200, 77], heads=40, kv_heads=1, width=32, value_width=48).check()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        Case([1, 1, 90], [1500, 30, 400], sinks=True).check()
        Case([1, 2], [700, 66], heads=8, kv_heads=8).check()
    finally:
        torch.set_num_threads(before)


def test_padding_requests_and_padding_tokens() -> None:
    case = Case([1, 0, 2, 0], [10, 0, 80, 0], spare=3)
    case.slot[2] = -1  # a padding token inside a request, the newest one
    got = case.run()
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-5, rtol=0)
    assert not got[2:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [(20, 20), (24, 40), (40, 16)])
def test_written_by_one_and_read_by_others(width: tuple[int, int], dtype: torch.dtype) -> None:
    case = Case(
        [3, 0, 70, 1], [3, 0, 100, 65], width=width[0], value_width=width[1], window=9, sinks=True, dtype=dtype, spare=2
    )
    want, whole = case.run(), case.kv.clone()
    new = case.slot[case.slot >= 0]
    case.kv[new // PAGE, :, new % PAGE] = math.nan
    library = torch.ops.deepinfer_cpu
    slots = library.write_kv(case.k, case.v, case.kv, case.slot)
    assert torch.equal(slots, case.slot)
    torch.testing.assert_close(case.kv, whole, rtol=0, atol=0, equal_nan=True)
    meta = case.start, case.seq_len, case.table, slots
    options = case.scale, case.window, case.softcap, case.sink_logits, case.value_width
    assert torch.equal(library.shared_attention(case.q, case.kv, *meta, *options), want)
    assert torch.equal(library.shared_attention(case.q[:0], case.kv, *empty(case), *options), want[:0])
    with pytest.raises(RuntimeError, match="do not fit"):
        library.write_kv(case.k, case.v[1:], case.kv, case.slot)
    with pytest.raises(RuntimeError, match="is not"):
        library.shared_attention(case.q, case.kv, *meta, *options[:-1], case.value_width + 40)


def empty(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Metadata of no request."""
    return torch.zeros(1, dtype=torch.int32), case.seq_len[:0], case.table[:0], case.slot[:0]


def test_no_tokens() -> None:
    case = Case([0], [0])
    assert case.run().shape == (0, 6, 20)
    assert case.kv.isnan().all()


def test_writes_only_its_slots() -> None:
    case = Case([2, 1], [66, 5], width=20, value_width=12)
    before = case.kv.clone()
    case.run()
    changed = ~torch.isclose(before, case.kv, equal_nan=True)
    pages = {(int(s) // PAGE, int(s) % PAGE) for s in case.slot}
    where = changed.any(-1).any(-1).any(1).nonzero().tolist()
    assert {(page, row) for page, row in where} == pages
    for token, s in enumerate(case.slot.tolist()):
        assert torch.equal(case.kv[s // PAGE, 0, s % PAGE], case.k[token])
        assert torch.equal(case.kv[s // PAGE, 1, s % PAGE, :, :12], case.v[token])
        assert case.kv[s // PAGE, 1, s % PAGE, :, 12:].isnan().all()


def test_strided_inputs() -> None:
    case = Case([1, 30], [100, 30])
    want = case.expected()
    packed = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], 1)
    q, k, v = packed.split([120, 40, 40], 1)
    case.q, case.k, case.v = q.view(-1, 6, 20), k.view(-1, 2, 20), v.view(-1, 2, 20)
    assert not case.q.is_contiguous()
    torch.testing.assert_close(case.run().double(), want, atol=2e-5, rtol=0)


def test_large_scores_do_not_overflow() -> None:
    case = Case([1, 70], [200, 70])
    case.scale = 60.0
    got = case.run()
    assert got.isfinite().all()
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-3, rtol=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("table", torch.full((1, 2), 99, dtype=torch.int32), "page 99"),
        ("table", torch.zeros(1, 0, dtype=torch.int32), "block table"),
        ("slot", torch.tensor([10**6]), "slot 1000000"),
        ("start", torch.tensor([0, 7], dtype=torch.int32), "query_start"),
        ("start", torch.tensor([0, 1]), "query_start"),
        ("k", torch.zeros(1, 4, 20), "do not fit"),
        ("kv", torch.zeros(3, 2, 32, 2, 20), "pages"),
        ("kv", torch.zeros(3, 2, PAGE, 2, 20, dtype=torch.float64), "kv"),
    ],
)
def test_bad_input_is_refused(field: str, value: Tensor, message: str) -> None:
    case = Case([1], [10])
    setattr(case, field, value)
    with pytest.raises(RuntimeError, match=message):
        case.run()
