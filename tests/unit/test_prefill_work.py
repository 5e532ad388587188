"""Operations of a prefill, counted from the graph, against formulas written by hand and against a count by running."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import plain_map
from deepinfer_compile.models.deepseek_v41.layers import Role, boundary, layer_map
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.prefill_work import PrefillWork
from tests.shared_kv import HEADS, VOCAB, WIDTH, Form, raised

LENGTHS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)
WITHIN = 0.005
# pooled rows with memory, the boundary, a layer that chooses anew: a capture takes seconds a layer
SHORT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "compress_ratios": (2, 1, 1),
    "kv_source_layer_ids": (0, 1),
    "index_source_layer_ids": (0, 1, 2),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (0,),
    "dspark_target_layer_ids": (1, 2),
    "hc_sinkhorn_iters": 1,
}


def work_of(config: DeepseekV41Config) -> PrefillWork:
    """The count of a configuration's program; nothing is allocated."""
    with torch.device("meta"):
        model = DeepseekV41(config, plain_map(config)).eval().to(torch.bfloat16).requires_grad_(False)
    return PrefillWork(Pipeline((Canonicalize(),)).run(capture(model))[0])


# -- by hand ----------------------------------------------------------------------------------------------------------


def seen(first: int, tokens: int, ratio: int, most: int) -> int:
    """Rows of a global cache that tokens first..tokens-1 see, at most `most` each (0: any number), in closed form."""

    def every(n: int) -> int:  # of tokens 0..n-1, the sum of (t + 1) // ratio
        whole, rest = divmod(n, ratio)
        return ratio * (whole - 1) * whole // 2 + (rest + 1) * whole

    def upto(n: int) -> int:
        start = ratio * most - 1  # the first token that sees `most`
        return every(n) if not most or n <= start else every(start) + (n - start) * most

    return upto(tokens) - upto(first)


def windowed(rows: int, window: int) -> int:
    """Window rows that `rows` tokens see, the first of which has none before it."""
    short = min(rows, window)
    return short * (short + 1) // 2 + (rows - short) * window


def boundary_products(c: DeepseekV41Config) -> int:
    """Per token: the row and its key of ratio 1. Rows are made of streams read through the weights of the sublayer
    before, so that the layer's own mix is not needed."""
    return c.hidden_size * c.head_dim + c.head_dim * c.index_head_dim


def token_products(c: DeepseekV41Config, role: Role) -> int:
    """Multiply-adds of one token in one layer, attention over other tokens apart."""
    h, heads = c.hidden_size, c.num_attention_heads * c.head_dim
    attention = h * c.q_lora_rank + c.q_lora_rank * heads + h * c.head_dim
    attention += heads * c.o_lora_rank + c.o_groups * c.o_lora_rank * h
    streams = 2 * (c.hc_mult * h * c.hc_mult * (2 + c.hc_mult) + c.hc_mult**2 * h)
    experts = h * c.n_routed_experts + 3 * h * c.moe_intermediate_size * (c.num_experts_per_tok + 1)
    total = attention + streams + experts
    if role.makes_rows:
        total += h * c.head_dim * (2 if role.ratio > 1 else 1) + c.head_dim * c.index_head_dim
    if role.chooses:
        total += c.q_lora_rank * c.index_n_heads * c.index_head_dim + h * c.index_n_heads
    if role.engram:
        width = (c.engram_max_ngram_size - 1) * c.engram_n_heads * c.engram_head_dim
        total += width * (c.hc_mult + 1) * h
    return total


def layer(c: DeepseekV41Config, role: Role, tokens: int, rows: int) -> int:
    """Multiply-adds of a layer for the last `rows` of `tokens` tokens."""
    read = windowed(rows, c.sliding_window)
    if role.ratio:
        read += seen(tokens - rows, tokens, role.ratio, c.index_topk)
    total = rows * token_products(c, role) + 2 * c.num_attention_heads * c.head_dim * read
    if role.chooses:
        total += c.index_n_heads * c.index_head_dim * seen(tokens - rows, tokens, role.ratio, 0)
    return total


def by_hand(c: DeepseekV41Config, tokens: int, keep: int) -> tuple[int, int, int]:
    """Operations of the whole, of the cut inside the boundary layer, and of the cut behind it."""
    roles, edge, keep = layer_map(c), boundary(c), min(tokens, keep)
    head = c.hidden_size * c.vocab_size
    whole = sum(layer(c, r, tokens, tokens) for r in roles)
    below = sum(layer(c, r, tokens, tokens) for r in roles[:edge])
    above = sum(layer(c, r, tokens, keep) for r in roles[edge:]) + (tokens - keep) * boundary_products(c)
    behind = layer(c, roles[edge], tokens, tokens) + sum(layer(c, r, tokens, keep) for r in roles[edge + 1 :])
    return tuple(2 * (n + head) for n in (whole, below + above, below + behind))  # type: ignore[return-value]


def check(c: DeepseekV41Config, work: PrefillWork, lengths: tuple[int, ...], keep: int) -> None:
    for tokens in lengths:
        found = work.saving(tokens, keep)
        for got, wanted in zip((found.whole, found.inside, found.after), by_hand(c, tokens, keep), strict=True):
            assert abs(got - wanted) <= WITHIN * wanted, (tokens, found, wanted)


def test_closed_forms_are_sums() -> None:
    for ratio in (1, 2, 3):
        for most in (0, 1, 5):
            for first, tokens in ((0, 1), (0, 40), (7, 23), (30, 40)):
                rows = [(t + 1) // ratio for t in range(first, tokens)]
                assert seen(first, tokens, ratio, most) == sum(min(r, most) if most else r for r in rows)
    assert windowed(9, 4) == sum(min(t + 1, 4) for t in range(9))


@functools.cache
def small() -> tuple[DeepseekV41Config, PrefillWork]:
    config = tiny.config(**SHORT)
    return config, work_of(config)


def test_a_small_model_costs_what_is_written_by_hand() -> None:
    config, work = small()
    assert work.found.layer == 1
    check(config, work, (1, 10, 17, 100, 1 << 15), 22)


def test_all_rows_kept_costs_the_whole() -> None:
    found = small()[1].saving(100, 100)
    assert found.whole == found.inside == found.after
    assert found.saved(found.inside) == 0


@pytest.mark.slow
def test_ten_layers_cost_what_is_written_by_hand() -> None:
    config = tiny.config()
    check(config, work_of(config), (1, 100, 1 << 15), 22)


@pytest.mark.slow
def test_the_published_model_costs_what_is_written_by_hand() -> None:
    config = DeepseekV41Config()
    work = work_of(config)
    assert work.found.layer == boundary(config) == 20
    assert work.program.info["traced_layers"] == [0, 1, 2, 3, 14, 15, 20, 21, 24, 25]
    check(config, work, LENGTHS, 134)
    found = work.saving(1 << 15, 134)
    assert 0.49 <= found.saved(found.inside) <= 0.50
    assert found.saved(found.after) < found.saved(found.inside)


def test_another_decoder_with_shared_keys() -> None:
    """One layer of its own keys below, two above that read the boundary's, one of them behind a window of 4."""
    work = PrefillWork(raised(Form((0, 4, None), (False, True, True), 1)))
    tokens, keep, pair = 1000, 7, WIDTH * 2
    found = work.saving(tokens, keep)
    kv, mlp = pair * WIDTH // 2, 2 * WIDTH * 40
    every = sum(t + 1 for t in range(tokens))
    last = sum(t + 1 for t in range(tokens - keep, tokens))
    head = WIDTH * VOCAB
    assert HEADS == 4
    own = 2 * WIDTH * WIDTH + kv
    cross = 2 * WIDTH * WIDTH
    whole = tokens * (own + mlp) + pair * every + tokens * kv
    whole += tokens * (own + cross + mlp) + pair * (windowed(tokens, 4) + every)
    whole += tokens * (cross + mlp) + pair * every
    inside = tokens * (own + mlp + kv) + pair * every
    inside += keep * (own + 2 * cross + 2 * mlp) + pair * (windowed(keep, 4) + 2 * last)
    assert abs(found.whole - 2 * (whole + head)) <= WITHIN * found.whole
    assert abs(found.inside - 2 * (inside + head)) <= WITHIN * found.inside
