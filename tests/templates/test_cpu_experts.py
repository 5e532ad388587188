"""experts of the CPU library against a float64 loop over tokens and their experts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.cpu_library import load

LARGEST = {torch.float32: 5e-6, torch.bfloat16: 2**-7}
MEAN = {torch.float32: 1e-6, torch.bfloat16: 2**-8}
"""Largest error over the largest output, and root mean squares of the two. bfloat16 rounds the final sum; experts with
many tokens also round gates, ups, hidden values and results, each by 2^-9 / sqrt(3) of the value."""

DTYPES = [torch.float32, torch.bfloat16]
ALPHA, LIMIT = 1.702, 1.5


def gated(gate: Tensor, up: Tensor, act: str) -> Tensor:
    if act == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if act == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    if act == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    if act == "relu":
        return gate.clamp(min=0) * up
    gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    if act == "swiglu_oai":
        return (up + 1) * gate / (1 + torch.exp(-ALPHA * gate))
    assert act == "swiglu_clamp"
    return gate / (1 + torch.exp(-gate)) * up


class Case:
    """tokens [T, hidden] over E experts of width I. Experts that no token names hold NaN."""

    def __init__(
        self,
        tokens: int,
        hidden: int = 40,
        width: int = 24,
        experts: int = 6,
        k: int = 2,
        act: str = "silu",
        dtype: torch.dtype = torch.float32,
        interleaved: bool = False,
        transposed: bool = False,
        bias: bool = False,
        ids: Tensor | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(5)

        def random(*shape: int, size: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator) * size).to(dtype)

        self.act, self.interleaved, self.transposed = act, interleaved, transposed
        self.x = random(tokens, hidden, size=2.0)
        order = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :k]
        self.ids = order.to(torch.int32) if ids is None else ids
        self.weights = torch.rand(self.ids.shape, generator=generator)
        self.w13 = random(experts, 2 * width, hidden, size=hidden**-0.5)
        self.w2 = random(experts, hidden, width, size=width**-0.5)
        self.b13 = random(experts, 2 * width) if bias else None
        self.b2 = random(experts, hidden) if bias else None
        unused = sorted(set(range(experts)) - set(self.ids.flatten().tolist()))
        for tensor in (self.w13, self.w2, self.b13, self.b2):
            if tensor is not None:
                tensor[unused] = math.nan

    def run(self) -> Tensor:
        load()
        w13, w2 = self.w13, self.w2
        if self.transposed:
            w13, w2 = w13.transpose(1, 2).contiguous(), w2.transpose(1, 2).contiguous()
        return torch.ops.deepinfer_cpu.experts(
            self.x,
            self.ids,
            self.weights,
            w13,
            w2,
            self.b13,
            self.b2,
            self.act,
            ALPHA,
            LIMIT,
            self.interleaved,
            self.transposed,
        )

    def expected(self) -> Tensor:
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for t in range(self.x.shape[0]):
            for e, weight in zip(self.ids[t].tolist(), self.weights[t].double()):
                if not 0 <= e < self.w13.shape[0]:
                    continue
                h = self.w13[e].double() @ self.x[t].double() + (0 if self.b13 is None else self.b13[e].double())
                half = h.shape[0] // 2
                gate, up = (h[0::2], h[1::2]) if self.interleaved else (h[:half], h[half:])
                y = self.w2[e].double() @ gated(gate, up, self.act)
                out[t] += weight * (y + (0 if self.b2 is None else self.b2[e].double()))
        return out

    def check(self) -> None:
        got = self.run()
        assert got.dtype == self.x.dtype
        want = self.expected()
        largest = float(want.abs().max()) if want.numel() else 0.0
        torch.testing.assert_close(got.double(), want, atol=LARGEST[self.x.dtype] * largest, rtol=0)
        assert (got - want).pow(2).mean().sqrt() <= MEAN[self.x.dtype] * want.pow(2).mean().sqrt()
        assert torch.equal(got, self.run()), "two runs differ"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "swiglu_oai", "swiglu_clamp"])
def test_activations_and_layouts(act: str, interleaved: bool, transposed: bool, dtype: torch.dtype) -> None:
    for tokens in (1, 5):
        Case(tokens, act=act, interleaved=interleaved, transposed=transposed, bias=True, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("hidden", "width"), [(17, 5), (96, 70), (300, 33), (64, 300)])
def test_sizes(hidden: int, width: int, transposed: bool, dtype: torch.dtype) -> None:
    for tokens in (1, 3, 30):
        Case(tokens, hidden, width, k=3, transposed=transposed, dtype=dtype).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("interleaved", "transposed"), [(False, False), (True, True), (False, True)])
def test_experts_with_many_and_with_few_tokens(interleaved: bool, transposed: bool, dtype: torch.dtype) -> None:
    ids = torch.full((150, 2), 2)
    ids[:5, 1], ids[5:30, 1], ids[30:100, 1] = 0, 4, -1  # expert 2 twice for the last tokens
    Case(150, ids=ids, bias=True, interleaved=interleaved, transposed=transposed, dtype=dtype).check()


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_ids_outside_the_experts_contribute_nothing(kind: torch.dtype) -> None:
    ids = torch.tensor([[-1, 2], [6, 0], [-1, -7], [1, 1000]], dtype=kind)
    case = Case(4, bias=True, ids=ids)
    case.check()
    assert not case.run()[2].any()


def test_an_expert_named_twice_counts_twice() -> None:
    Case(2, ids=torch.tensor([[3, 3], [0, 3]], dtype=torch.int32)).check()


def test_no_tokens_and_no_experts_hit() -> None:
    assert Case(0).run().shape == (0, 40)
    assert not Case(2, ids=torch.full((2, 2), -1)).run().any()


def test_large_gates_stay_finite() -> None:
    for act in ("silu", "gelu_tanh", "swiglu_oai"):
        case = Case(2, act=act)
        case.x *= 300
        got = case.run()
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), case.expected(), rtol=1e-4, atol=0.5)


def test_bad_input_is_refused() -> None:
    case = Case(2)
    case.act = "sigmoid"
    with pytest.raises(RuntimeError, match="no gated activation sigmoid"):
        case.run()
    case = Case(2)
    case.ids = case.ids.float()
    with pytest.raises(RuntimeError, match="do not fit"):
        case.run()
    case = Case(2)
    case.w2 = torch.zeros(6, 40, 25)
    with pytest.raises(RuntimeError, match="do not fit"):
        case.run()
    case = Case(2)
    case.w13 = case.w13.bfloat16()
    with pytest.raises(RuntimeError, match="w13 is BFloat16"):
        case.run()
