"""Every spelling of RMSNorm becomes one op with the same bits; what only looks like it stays, with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.errors import ExpectedMatchMissing
from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import RMS_NORM
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.replay import logits_of, weights_from
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import IDS, ROWS, check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run

WIDTH = 10
LAYER_NORMS = dict.fromkeys(("llama", "phi", "mistral", "mixtral", "gpt_oss", "glm4_moe"), 2)
LAYER_NORMS |= dict.fromkeys(("qwen3", "qwen3_moe", "olmoe", "deepseek_v3"), 4)
LAYER_NORMS |= {"deepseek_v2": 3, "gemma": 6}


Norm = Callable[[Tensor, Tensor], Tensor]


class Small(nn.Module):
    """Every f(x, weight), with a weight of x's dtype: many cases are one trace."""

    def __init__(self, *functions: Norm, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.functions = functions
        self.weight = nn.Parameter((1 + 0.3 * torch.randn(WIDTH, generator=torch.Generator().manual_seed(1))).to(dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x, self.weight) for f in self.functions)


def root(x: Tensor, eps: float = 1e-5) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def llama(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return w * (y * root(y)).to(x.dtype)


def gpt_oss(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (w * (y * root(y))).to(x.dtype)


def gemma(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return ((y * root(y)) * (1.0 + w.float())).type_as(x)


def rounded_offset(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return ((y * root(y)) * (1.0 + w).float()).type_as(x)


def offset_after_cast(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (root(y) * y).to(x.dtype) * (w + 1)


def no_weight(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * root(y)).to(x.dtype)


def square(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return torch.rsqrt(y.square().mean(-1, True) + 1e-6).mul(y).to(x.dtype).mul(w)


def product(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (torch.rsqrt((y * y).mean(2, keepdim=True) + 1e-6) * y).to(x.dtype) * w


def two_casts(x: Tensor, w: Tensor) -> Tensor:
    return (x * root(x.float())).to(x.dtype) * w


def stays_wide(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return F.silu(w.float() * (y * root(y)))


def native(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), w, 1e-5)


def native_default_eps(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x * 1e-3, (WIDTH,), w)


def native_no_weight(x: Tensor, w: Tensor) -> Tensor:
    return F.rms_norm(x, (WIDTH,), None, 1e-5)


def middle_used(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    r = root(y)
    n = (y * r).to(x.dtype)
    return w * n + n + r.to(x.dtype)


SPELLINGS = (
    *(llama, gpt_oss, gemma, rounded_offset, offset_after_cast, no_weight, square, product, two_casts, stays_wide),
    *(native, native_default_eps, native_no_weight, middle_used),
)


def divided(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * w


def reciprocal(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * (1 / torch.sqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5))).to(x.dtype) * w


def power(x: Tensor, w: Tensor) -> Tensor:
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + 1e-5).pow(-0.5)).to(x.dtype) * w


MISSES: dict[str, tuple[Norm, str]] = {
    "other dim": (lambda x, w: x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5) * w, "over dimensions [1] of 3"),
    "all dims": (lambda x, w: x * torch.rsqrt(x.pow(2).mean((1, 2), keepdim=True) + 1e-5), "over dimensions [1, 2]"),
    "no keepdim": (
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-5).unsqueeze(-1) * w,
        "the mean drops its dimension (keepdim is false)",
    ),
    "eps outside": (
        lambda x, w: x * (torch.rsqrt(x.pow(2).mean(-1, True)) + 1e-5) * w,
        "no eps is added under the root",
    ),
    "eps after sqrt": (lambda x, w: x / (x.pow(2).mean(-1, True).sqrt() + 1e-5) * w, "no eps is added under the root"),
    "cube": (lambda x, w: x * torch.rsqrt(x.abs().pow(3).mean(-1, True) + 1e-5) * w, "the mean is not of squares"),
    "another value": (lambda x, w: (x + 1) * root(x), "not multiplied with, or divided into, the value"),
    "layer norm": (lambda x, w: F.layer_norm(x, (WIDTH,), w), "LayerNorm subtracts the mean"),
    "spelled layer norm": (
        lambda x, w: (x - x.mean(-1, True)) * torch.rsqrt((x - x.mean(-1, True)).pow(2).mean(-1, True) + 1e-5) * w,
        "the mean is subtracted first: this is LayerNorm",
    ),
    "variance": (
        lambda x, w: (x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-5) * w,
        "the variance is about the mean: this is LayerNorm",
    ),
    "two dims": (lambda x, w: F.rms_norm(x, (3, WIDTH), None, 1e-5), "normalises over the last 2 dimensions, not one"),
}


def example(dtype: torch.dtype, batch: int = 2, tokens: int = 3) -> Tensor:
    return torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseRmsNorm(), RaiseRmsNorm())
    layers = {block: LAYER_NORMS[name] for block in before.blocks if block.startswith("layer")}
    assert counts(records[0]) == {**layers, "suffix": 1}
    assert not reasons(records[0])
    assert records[1].count("applied") == 0
    assert not any("rsqrt" in str(n.target) for gm in after.blocks.values() for n in gm.graph.nodes)
    check_equal(after, model)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma"])
def test_bf16_architectures_keep_every_bit(name: str) -> None:
    """The op rounds where the spelled form rounds, so the logits are the same bits, not merely close."""
    model, before = canonical(name, torch.bfloat16)
    after, records = go_on(before, RaiseRmsNorm())
    assert counts(records[0])["suffix"] == 1
    weights = weights_from(model)
    assert torch.equal(logits_of(after, weights, IDS, ROWS), logits_of(before, weights, IDS, ROWS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_spellings_keep_every_bit(dtype: torch.dtype) -> None:
    module = Small(*SPELLINGS, dtype=dtype)
    before = program_of(module, {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, x=example(dtype))
    after, records = go_on(before, RaiseRmsNorm(), RaiseRmsNorm())
    # middle_used has two values of its norm: with the weight and without
    assert [r.count("applied") for r in records] == [len(SPELLINGS) + 1, 0]
    for batch, tokens in ((2, 3), (1, 7), (3, 1), (2, 0)):
        x = example(dtype, batch, tokens)
        for spelling, got, want in zip(SPELLINGS, run(after, x=x), module(x)):
            assert torch.equal(got, want), spelling.__name__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_roots(dtype: torch.dtype) -> None:
    """1 / sqrt rounds twice where rsqrt rounds once: one unit in the last place of the result."""
    module = Small(divided, reciprocal, power, dtype=dtype)
    after, records = go_on(program_of(module, {"x": {1: Dim.AUTO}}, x=example(dtype)), RaiseRmsNorm())
    assert records[0].count("applied") == 3
    x = example(dtype, 2, 5)
    for got, want in zip(run(after, x=x), module(x)):
        assert torch.allclose(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_double_is_normalised_in_double() -> None:
    module = Small(lambda x, w: x * root(x) * w, dtype=torch.float64)
    after, records = go_on(program_of(module, x=example(torch.float64)), RaiseRmsNorm())
    assert records[0].count("applied") == 1
    x = example(torch.float64)
    assert torch.equal(run(after, x=x)[0], module(x)[0])


def test_near_misses() -> None:
    module = Small(*(f for f, _ in MISSES.values()))
    before = program_of(module, x=example(torch.float32))
    after, records = go_on(before, RaiseRmsNorm())
    assert records[0].count("applied") == 0
    wanted = [reason for _, reason in MISSES.values()]
    assert len(reasons(records[0])) == len(wanted)
    assert [w in r for w, r in zip(wanted, reasons(records[0]))] == [True] * len(wanted)
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_half_precision_mean_is_left_alone() -> None:
    module = Small(lambda x, w: x * root(x) * w, dtype=torch.bfloat16)
    _, records = go_on(program_of(module, x=example(torch.bfloat16)), RaiseRmsNorm())
    assert reasons(records[0]) == ["the mean of squares is taken in half precision, rms_norm takes it in fp32"]


def test_offset_and_default_eps_are_read() -> None:
    module = Small(gemma, rounded_offset, offset_after_cast, native_default_eps, dtype=torch.bfloat16)
    after, _ = go_on(program_of(module, x=example(torch.bfloat16)), RaiseRmsNorm())
    nodes = [n for n in after.blocks["prefix"].graph.nodes if is_op(n, RMS_NORM.overload)]
    assert [tuple(argument(n, k) for k in ("eps", "offset", "cast_first")) for n in nodes] == [
        (1e-5, 1.0, False),
        (1e-5, 0.0, False),
        (1e-5, 1.0, True),
        (torch.finfo(torch.float32).eps, 0.0, False),
    ]


def test_bisection_caps_the_pass() -> None:
    _, before = canonical("llama")
    after, records = go_on(before, RaiseRmsNorm(), limits={"raise-rms-norm": 1})
    assert records[0].count("applied") == 1
    assert sum(is_op(n, RMS_NORM.overload) for gm in after.blocks.values() for n in gm.graph.nodes) == 1


def test_required_sites() -> None:
    _, before = canonical("llama")
    go_on(before, RaiseRmsNorm(required=2))
    with pytest.raises(ExpectedMatchMissing, match="had to match 3 and matched 2 in layer0"):
        go_on(before, RaiseRmsNorm(required=3))


def test_golden() -> None:
    before = program_of(Small(llama, dtype=torch.bfloat16), {"x": {1: Dim.AUTO}}, x=example(torch.bfloat16))
    after, _ = go_on(before, RaiseRmsNorm())
    check_golden("raise_rms_norm", before_and_after(before, after, "prefix"))
