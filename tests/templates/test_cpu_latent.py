"""cached_latent_attention of the CPU library, both forms, against a float64 loop over expanded keys and values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.cpu_library import load

PAGE = 64
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest error for outputs of size about 1; intermediate values stay in fp32, so bfloat16 rounds once at the end."""

FORMS = ["absorbed", "expanded"]
DTYPES = [torch.float32, torch.bfloat16]


@dataclass
class Case:
    """R requests: `new[r]` new tokens at the end of `length[r]` positions. Pages are shuffled, the rest is NaN."""

    new: list[int]
    length: list[int]
    heads: int = 6
    nope: int = 12
    rope: int = 8
    latent: int = 24
    value: int = 20
    dtype: torch.dtype = torch.float32
    stored: str = "projection"  # how w_uk and w_uv lie: views of one kv_b projection, or dense
    spare: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(3)

        def random(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(self.dtype)

        tokens, row = sum(self.new) + self.spare, self.latent + self.rope
        self.q_nope, self.q_rope = random(tokens, self.heads, self.nope), random(tokens, self.heads, self.rope)
        self.c, self.k_rope = random(tokens, self.latent), random(tokens, self.rope)
        kv_b = random(self.heads, self.nope + self.value, self.latent, size=self.latent**-0.5)
        self.w_uk, self.w_uv = kv_b[:, : self.nope], kv_b[:, self.nope :].transpose(1, 2)
        if self.stored == "dense":
            self.w_uk, self.w_uv = self.w_uk.contiguous(), self.w_uv.contiguous()
        if self.stored == "strided":
            self.w_uk = torch.stack([self.w_uk, self.w_uk], -1)[..., 0]
        self.context = [random(n, row) for n in self.length]
        counts = [-(-n // PAGE) for n in self.length]
        order = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        self.cache = torch.full((sum(counts) + 2, PAGE, row), math.nan, dtype=self.dtype)
        self.table = torch.full((len(self.new), max([*counts, 1])), -1, dtype=torch.int32)
        self.slot = torch.full((tokens,), -1, dtype=torch.int64)
        start = torch.tensor([0, *self.new]).cumsum(0)
        for r, count in enumerate(counts):
            pages = [order.pop() for _ in range(count)]
            self.table[r, :count] = torch.tensor(pages, dtype=torch.int32)
            old = self.length[r] - self.new[r]
            for j in range(self.length[r]):
                if j < old:
                    self.cache[pages[j // PAGE], j % PAGE] = self.context[r][j]
                    continue
                token = int(start[r]) + j - old
                self.slot[token] = pages[j // PAGE] * PAGE + j % PAGE
                self.context[r][j] = torch.cat([self.c[token], self.k_rope[token]])
        self.start, self.seq_len = start.to(torch.int32), torch.tensor(self.length, dtype=torch.int32)
        self.scale = (self.nope + self.rope) ** -0.5

    def run(self, form: str) -> Tensor:
        load()
        return torch.ops.deepinfer_cpu.cached_latent_attention(
            self.q_nope,
            self.q_rope,
            self.c,
            self.k_rope,
            self.w_uk,
            self.w_uv,
            self.cache,
            self.start,
            self.seq_len,
            self.table,
            self.slot,
            self.scale,
            form,
        )

    def expected(self) -> Tensor:
        out = torch.zeros(self.q_nope.shape[0], self.heads, self.value, dtype=torch.float64)
        for r, count in enumerate(self.new):
            latents, ropes = self.context[r].double().split([self.latent, self.rope], 1)
            for h in range(self.heads):
                keys = torch.cat([latents @ self.w_uk[h].double().t(), ropes], 1)
                values = latents @ self.w_uv[h].double()
                for i in range(count):
                    token, seen = int(self.start[r]) + i, self.length[r] - count + i + 1
                    q = torch.cat([self.q_nope[token, h], self.q_rope[token, h]]).double()
                    out[token, h] = torch.softmax(keys[:seen] @ q * self.scale, 0) @ values[:seen]
        return out

    def check(self, form: str) -> None:
        got = self.run(form)
        assert got.dtype == self.dtype
        torch.testing.assert_close(got.double(), self.expected(), atol=TOLERANCE[self.dtype], rtol=0)
        assert torch.equal(got, self.run(form)), "two runs differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("stored", ["projection", "dense", "strided"])
@pytest.mark.parametrize(("new", "length"), [([1], [1]), ([1], [500]), ([1, 3, 70], [64, 67, 150]), ([65], [65])])
def test_both_forms(new: list[int], length: list[int], stored: str, form: str, dtype: torch.dtype) -> None:
    Case(new, length, stored=stored, dtype=dtype).check(form)


@pytest.mark.parametrize("form", FORMS)
def test_wide_heads(form: str) -> None:
    Case([1, 2], [130, 5], heads=128, nope=16, rope=16, latent=64, value=32).check(form)


@pytest.mark.parametrize("form", FORMS)
def test_padding_requests_and_tokens(form: str) -> None:
    case = Case([2, 0, 1], [66, 0, 3], spare=2)
    got = case.run(form)
    torch.testing.assert_close(got.double(), case.expected(), atol=2e-5, rtol=0)
    assert not got[3:].any()


@pytest.mark.parametrize("form", FORMS)
def test_no_tokens(form: str) -> None:
    case = Case([0], [0])
    assert case.run(form).shape == (0, 6, 20)
    assert case.cache.isnan().all()


def test_writes_latent_then_rope_at_its_slots() -> None:
    case = Case([2, 1], [66, 5])
    before = case.cache.clone()
    case.run("absorbed")
    changed = (~torch.isclose(before, case.cache, equal_nan=True)).any(-1).nonzero().tolist()
    assert {(page, row) for page, row in changed} == {(int(s) // PAGE, int(s) % PAGE) for s in case.slot}
    for token, s in enumerate(case.slot.tolist()):
        row = case.cache[s // PAGE, s % PAGE]
        assert torch.equal(row, torch.cat([case.c[token], case.k_rope[token]]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("table", torch.full((1, 1), 99, dtype=torch.int32), "page 99"),
        ("table", torch.zeros(1, 0, dtype=torch.int32), "block table"),
        ("slot", torch.tensor([10**6]), "slot 1000000"),
        ("w_uk", torch.zeros(6, 12, 23), "w_uk"),
        ("w_uv", torch.zeros(6, 24, 20, dtype=torch.bfloat16), "w_uv"),
        ("cache", torch.zeros(3, PAGE, 33), "pages"),
    ],
)
def test_bad_input_is_refused(field: str, value: Tensor, message: str, form: str) -> None:
    case = Case([1], [10])
    setattr(case, field, value)
    with pytest.raises(RuntimeError, match=message):
        case.run(form)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(RuntimeError, match="no form folded"):
        Case([1], [10]).run("folded")
