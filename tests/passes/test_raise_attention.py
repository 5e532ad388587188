"""Attention in every spelling becomes one op that knows what queries see; what is not understood stays and says why."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import argument, is_op
from deepinfer_compile.ops import ATTENTION
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import calls, check_equal
from tests.passes.toys import before_after, check_toy, check_twice_is_once, ops, raised, reasons, toy
from tests.plain_model import make_plain

LIBRARY = [
    ("llama", "sdpa", {"layer0": (0, True)}),
    ("gpt_oss", "eager", {"layer0": (16, True), "layer0_1": (0, True)}),
    ("deepseek_v2", "eager", {"layer0": (0, True), "layer1": (0, True)}),
]


def attentions(program: Program, block: str) -> list[Any]:
    """Calls of the op in a block."""
    return [n for n in program.blocks[block].graph.nodes if is_op(n, ATTENTION.overload)]


def stock(name: str, form: str) -> tuple[Any, Program]:
    """A tiny model and its program with one of Transformers' own implementations."""
    model = models.make(name)
    return model, capture(model, attention=form)


@functools.cache
def llama_sdpa() -> tuple[Any, Program]:
    """What two tests start from."""
    return stock("llama", "sdpa")


@pytest.mark.parametrize(("name", "form", "expected"), LIBRARY)
def test_stock_implementations(name: str, form: str, expected: dict[str, tuple[int, bool]]) -> None:
    model, before = llama_sdpa() if name == "llama" else stock(name, form)
    program, records = Pipeline((Canonicalize(), RaiseAttention())).run(before)
    for block in program.blocks:
        found = [(argument(n, "window"), argument(n, "causal")) for n in attentions(program, block)]
        assert found == ([expected[block]] if block in expected else [])
    layers = sorted(layer for block in expected for layer in program.layers_of(block))
    assert layers == list(range(model.config.num_hidden_layers))
    assert reasons(records) == []
    check_equal(program, model)
    cached, _ = Pipeline((RaiseLatentAttention(), CacheAttention()), given=program.facts).run(program)
    check_equal(cached, model, chunk=13)


def test_masks_leave_the_graph() -> None:
    program, _ = Pipeline((Canonicalize(), RaiseAttention())).run(llama_sdpa()[1])
    assert calls(program, "aten.arange") == calls(program, "aten.cumsum") == calls(program, "aten.expand") == 0
    assert [argument(n, "mask") for b in program.blocks for n in attentions(program, b)] == [None]
    heads = {int(n.args[i].meta["val"].shape[1]) for n in attentions(program, "layer0") for i in (1, 2)}
    assert heads == {2}


H, KV, D = 6, 2, 8


class Attend(nn.Module):
    """q, k, v [1, H, T, D] from x; `function` is one of the forms below."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options
        self.qkv = nn.Linear(24, (H + 2 * KV) * D, bias=False)
        self.sinks = nn.Parameter(torch.empty(H))
        self.register_buffer("block", torch.ones(64, 64, dtype=torch.bool).tril(), persistent=False)
        self.register_buffer("kept", torch.ones(64, 64, dtype=torch.bool).tril())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([H * D, KV * D, KV * D], dim=-1)
        q, k, v = (t.view(x.shape[0], x.shape[1], -1, D) for t in (q, k, v))
        return self.function(self, q, k, v, **self.options)


def repeat(t: Tensor) -> Tensor:
    """[B, T, KV, D] -> [B, H, T, D] as Transformers does it."""
    t = t.transpose(1, 2)
    b, h, n, d = t.shape
    return t[:, :, None].expand(b, h, H // KV, n, d).reshape(b, H, n, d)


def causal(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril()


def sdpa_flag(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), is_causal=True).transpose(1, 2)


def sdpa_grouped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, causal(q.shape[2]), scale=0.2, enable_gqa=True)


def sdpa_both_ways(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), is_causal=True)


def sdpa_additive(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.full((q.shape[1], q.shape[1]), float("-inf")).triu(1)
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), mask[None, None])


def sdpa_no_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v))


def eager(m: Any, q: Tensor, k: Tensor, v: Tensor, cap: float = 0.0, window: int = 0) -> Tensor:
    scores = q.transpose(1, 2) @ repeat(k).transpose(2, 3) * D**-0.5
    if cap:
        scores = torch.tanh(scores / cap) * cap
    t = torch.arange(q.shape[1])
    seen = t[None] <= t[:, None]
    if window:
        seen = seen & (t[None] > t[:, None] - window)
    scores = torch.where(seen, scores, torch.tensor(float("-inf")))
    return (scores.softmax(-1, dtype=torch.float32) @ repeat(v)).transpose(1, 2)


def eager_scaled_late(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.transpose(1, 2) @ repeat(k).transpose(2, 3)
    scores = scores.masked_fill(m.block[: q.shape[1], : q.shape[1]].logical_not(), float("-inf"))
    return (torch.softmax(scores / math.sqrt(D), dim=-1) @ repeat(v)).transpose(1, 2)


def einsum(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(H // KV, dim=2) for t in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) * 0.3
    scores = scores + torch.full_like(scores[0, 0], torch.finfo(scores.dtype).min).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def sinks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q.transpose(1, 2), repeat(k).transpose(2, 3)) * 0.3
    scores = scores.masked_fill(~causal(q.shape[1]), float("-inf"))
    scores = torch.cat([scores, m.sinks.reshape(1, -1, 1, 1).expand(1, -1, q.shape[1], 1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return (scores.softmax(-1)[..., :-1] @ repeat(v)).transpose(1, 2)


def batched(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q.transpose(1, 2)[0], repeat(k)[0], repeat(v)[0]
    scores = torch.bmm(q * 0.3, k.transpose(1, 2)).masked_fill(~causal(q.shape[1]), float("-inf"))
    return torch.bmm(scores.softmax(-1), v).transpose(0, 1)[None]


def one_head(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = q[0, :, 0], k[0, :, 0], v[0, :, 0]
    scores = (q @ k.transpose(0, 1) * 0.3).masked_fill(~causal(q.shape[0]), float("-inf"))
    return (scores.softmax(-1) @ v)[None]


@pytest.mark.parametrize(
    ("function", "options", "words"),
    [
        (sdpa_flag, {}, "causal"),
        (sdpa_grouped, {}, "causal"),
        (sdpa_both_ways, {}, "causal"),
        (sdpa_additive, {}, "causal"),
        (sdpa_no_mask, {}, "every key visible"),
        (eager, {}, "causal"),
        (eager, {"cap": 3.0}, "causal, softcap"),
        (eager, {"window": 5}, "causal, window 5"),
        (eager, {"window": 50, "cap": 2.0}, "causal, window 50, softcap"),
        (eager_scaled_late, {}, "causal"),
        (einsum, {}, "causal"),
        (sinks, {}, "causal, sinks"),
        (batched, {}, "causal"),
        (one_head, {}, "causal"),
    ],
)
def test_forms(function: Any, options: dict[str, Any], words: str) -> None:
    model = toy(Attend(function, **options))
    program, records = raised(model, RaiseAttention())
    assert ops(program) == ["deepinfer.attention"]
    assert reasons(records, "applied") == [words]
    (node,) = attentions(program, "prefix")
    if function not in (batched, one_head):
        assert node.args[1].meta["val"].shape[1] == KV
    assert argument(node, "softcap") == options.get("cap", 0.0)
    check_toy(program, model, lengths=(1, 2, 13, 60))


def alibi(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(q.shape[1], dtype=torch.float32)
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), t[None] * -0.5)


def stored_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.transpose(1, 2) @ repeat(k).transpose(2, 3) * 0.5
    scores = scores.masked_fill(~m.kept[: q.shape[1], : q.shape[1]], float("-inf"))
    return (scores.softmax(-1) @ repeat(v)).transpose(1, 2)


def by_content(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = (k[..., 0, 0] > -100.0)[:, None, None]
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), mask)


def reversed_mask(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.transpose(1, 2), repeat(k), repeat(v), causal(q.shape[1]).transpose(0, 1))


def huge_window(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    t = torch.arange(q.shape[1])
    hidden = (t[None] > t[:, None]) | (t[None] <= t[:, None] - 131072)
    scores = (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).masked_fill(hidden, float("-inf"))
    return scores.softmax(-1) @ repeat(v)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (alibi, "mask kept: the mask adds numbers that are neither 0 nor large and negative"),
        (stored_mask, "mask kept: the mask reads the checkpoint tensor body.kept"),
        (by_content, "mask kept: the mask reads the checkpoint tensor"),
        (reversed_mask, "mask kept: the mask is neither causal nor a causal window"),
        (huge_window, "mask kept: the mask has the constant 131072; windows are tried up to 4200"),
    ],
)
def test_unknown_masks_stay_operands(function: Any, words: str) -> None:
    model = toy(Attend(function))
    program, records = raised(model, RaiseAttention())
    (found,) = reasons(records, "applied")
    assert found.startswith(words)
    assert argument(attentions(program, "prefix")[0], "mask") is not None
    check_toy(program, model)
    with pytest.raises(UnsupportedConstruct, match="explicit mask"):
        raised(model, RaiseAttention(), CacheAttention())


def weights_read(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).softmax(-1)
    return p @ repeat(v) + p.mean()


def mask_before_cap(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).masked_fill(~causal(q.shape[1]), -1e9)
    return (torch.tanh(scores / 3.0) * 3.0).softmax(-1) @ repeat(v)


def small_fill(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).masked_fill(~causal(q.shape[1]), -2.0).softmax(-1) @ repeat(
        v
    )


def odd_cap(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.tanh(q.transpose(1, 2) @ repeat(k).transpose(2, 3) / 3.0) * 2.0).softmax(-1) @ repeat(v)


def powered(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).abs().softmax(-1) @ repeat(v)


def filled_by_tensor(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.transpose(1, 2) @ repeat(k).transpose(2, 3)
    return torch.where(m.kept[: q.shape[1], : q.shape[1]], scores, torch.tensor(-2.0)).softmax(-1) @ repeat(v)


def two_masks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q.transpose(1, 2) @ repeat(k).transpose(2, 3)).masked_fill(~causal(q.shape[1]), -1e9)
    return (scores + v[..., 0, 0][:, None, None]).softmax(-1) @ repeat(v)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (weights_read, "the attention weights are read by something other than the product with the values"),
        (mask_before_cap, "the mask is applied before the scale or the softcap"),
        (small_fill, "hidden scores are filled with -2.0"),
        (odd_cap, "the softcap divides and multiplies by different numbers"),
        (powered, "aten.abs stands between the scores and their softmax"),
        (two_masks, "of 2 masks one is not known: "),
        (filled_by_tensor, "of 1 masks one is not known: the mask reads the checkpoint tensor"),
    ],
)
def test_near_misses(function: Any, reason: str) -> None:
    model = toy(Attend(function))
    program, records = raised(model, RaiseAttention())
    assert ops(program) == []
    (found,) = reasons(records)
    assert found.startswith(reason)
    check_toy(program, model)


@pytest.mark.parametrize("form", ["loop", "einsum"])
def test_plain_decoder(form: str) -> None:
    program, records = raised(make_plain(form), RaiseAttention())
    assert ops(program) == ["deepinfer.attention"]
    assert reasons(records, "applied") == ["causal"]
    check_twice_is_once(program, RaiseAttention())


def half(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores upcast to f32, weights cast back, as Transformers' eager form does."""
    scores = q.transpose(1, 2) @ repeat(k).transpose(2, 3) * 0.3
    scores = scores.float().masked_fill(~causal(q.shape[1]), float("-inf"))
    return (scores.softmax(-1).to(q.dtype) @ repeat(v)).transpose(1, 2)


def test_half_precision_keeps_dtype() -> None:
    model = toy(Attend(half), dtype=torch.bfloat16)
    program, _ = raised(model, RaiseAttention())
    assert ops(program) == ["deepinfer.attention"]
    check_toy(program, model, tol=2e-2)


def test_golden() -> None:
    check_golden("raise_attention", before_after(toy(Attend(eager, window=5)), RaiseAttention()))
