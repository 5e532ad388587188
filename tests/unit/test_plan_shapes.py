"""What a plan knows of a model: equal to what modules, captured programs and published arithmetic say."""

from __future__ import annotations

import json
from math import prod
from typing import Any

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.capture.source import meta_model
from deepinfer_compile.errors import BadModelConfig, UnsupportedArchitecture, UnsupportedWeightFormat
from deepinfer_compile.graph import argument, is_op, tensor
from deepinfer_compile.models import tiny
from deepinfer_compile.models.deepseek_v41.checkpoint import published_names
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.sizes import sizes
from deepinfer_compile.ops import EXPERTS
from deepinfer_compile.plan.load import drawn, in_order, slots_of
from deepinfer_compile.plan.reading import shape_of
from deepinfer_compile.plan.shape import Shape
from deepinfer_compile.presets import default
from tests.unit.test_prefill_work import by_hand

RELEASED = {"model_type": "deepseek_v41"}
MOE = [
    "afmoe", "cohere2_moe", "deepseek_v2", "dots1", "ernie4_5_moe", "flex_olmo", "glm4_moe", "glm4_moe_lite",
    "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "laguna", "mimo_v2_flash", "minimax_m2", "mixtral",
    "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
]  # fmt: skip
"""Architectures of the support table that route to experts, beside those that are always tried."""


@pytest.fixture(scope="module")
def released() -> Shape:
    return shape_of(RELEASED, "config.json")


def test_sizes_are_those_of_the_modules(released: Shape) -> None:
    config = DeepseekV41Config()
    known = sizes(config)
    assert released.active() == known.decode
    assert released.active(filling=True) == known.prefill
    assert sum(w.count for w in released.weights) == known.backbone + known.engram + known.draft
    stored = published_names(config)
    files = sum(entry.nbytes for name, entry in stored.items() if not name.endswith("bias_vl"))
    assert sum(w.nbytes for w in released.weights) == files
    assert released.cache_bytes == 890
    assert round(released.expert_bytes / 1e6, 2) == 18.80


@pytest.mark.parametrize(
    ("ranks", "redundant", "experts", "megabytes"),
    [
        (8, 0, 48, 902), (8, 32, 52, 978), (64, 0, 6, 113), (64, 64, 7, 132),
        (128, 0, 3, 56), (128, 64, 3.5, 66), (128, 128, 4, 75),
    ],
)  # fmt: skip
def test_experts_on_a_rank(released: Shape, ranks: int, redundant: int, experts: float, megabytes: int) -> None:
    a_rank = (released.experts + redundant) / ranks
    assert a_rank == experts
    assert round(a_rank * released.expert_bytes / 1e6) == megabytes
    assert slots_of(released.experts, redundant, ranks) == -(-experts // 1)


def test_traffic_of_wide_parallelism(released: Shape) -> None:
    few, many = (slots_of(released.experts, 0, n) * released.expert_bytes for n in (64, 8))
    assert 1 - few / many == 1 - 6 / 48 == 0.875
    few, many = (slots_of(released.experts, r, n) * released.expert_bytes for n, r in ((64, 64), (8, 32)))
    assert 1 - few / many == pytest.approx(1 - 7 / 52)


@pytest.mark.parametrize("tokens", [1 << 10, 1 << 12, 1 << 15, 1 << 17])
def test_operations_of_a_prompt(released: Shape, tokens: int) -> None:
    """Against formulas that are tested against the captured graph: upper layers on the last rows of a prompt."""
    assert released.keep == 134
    products = 0
    for w in released.weights:
        rows = tokens if w.fills else 1 if w.layer is None else released.rows(w.layer, tokens)
        products += 2 * w.active * rows
    ours = products + sum(one.flops for one in released.prompt(0, tokens))
    assert ours == pytest.approx(by_hand(DeepseekV41Config(), tokens, 134)[1], rel=0.01)


def check_against_program(name: str) -> None:
    config = tiny.config(name)
    raw = json.loads(json.dumps({k: v for k, v in config.to_dict().items() if k != "dtype"}))
    shape = shape_of(raw, name)
    model = meta_model(config, torch.bfloat16)
    program, _ = default().run(capture(model))
    rows = [(prod(c.shape) * 2 / 64, program.windows[c.group]) for c in program.caches]
    assert shape.cache_bytes == sum(size for size, window in rows if not window)
    assert shape.request_bytes == sum(size * window for size, window in rows)
    assert sum(w.count for w in shape.weights) == sum(p.numel() for p in model.parameters())
    routed: list[int] = []
    for block, gm in program.blocks.items():
        for node in (n for n in gm.graph.nodes if is_op(n, EXPERTS.overload)):
            assert shape.top == tensor(argument(node, "ids")).shape[-1]
            assert shape.experts == tensor(argument(node, "w13")).shape[0]
            routed += program.layers_of(block)
    assert list(shape.routed_layers) == sorted(routed)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_a_library_model_is_what_is_captured(name: str) -> None:
    check_against_program(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", MOE)
def test_every_routed_model_is_what_is_captured(name: str) -> None:
    check_against_program(name)


def test_latent_attention_by_hand() -> None:
    config = tiny.config("deepseek_v3").to_dict()
    shape = shape_of({k: v for k, v in config.items() if k != "dtype"}, "v3")
    heads, rank, rope, nope, value = 6, 24, 8, 12, 20
    assert [w.flops for w in shape.step(1, 100)] == [2 * heads * 100 * (2 * rank + rope)] * 4
    assert [w.bytes for w in shape.step(2, 100)] == [100 * 2 * (rank + rope)] * 4
    seen = sum(t + 1 for t in range(40, 101))
    flops = 2 * heads * (nope + rope + value) * seen
    assert [w.flops for w in shape.prompt(40, 101)] == [flops] * 4


def test_formats_of_a_checkpoint() -> None:
    config = {k: v for k, v in tiny.config("deepseek_v3").to_dict().items() if k != "dtype"}
    plain = shape_of(config, "v3")
    packed = shape_of({**config, "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}}, "v3")
    inner, hidden = 40, config["hidden_size"]
    grids = 2 * -(-2 * inner // 16) * -(-hidden // 16) // 2 + -(-hidden // 16) * -(-inner // 16)
    assert plain.expert_bytes == 2 * 3 * inner * hidden
    assert packed.expert_bytes == 3 * inner * hidden + 4 * grids
    with pytest.raises(UnsupportedWeightFormat, match="awq"):
        shape_of({**config, "quantization_config": {"quant_method": "awq"}}, "v3")


@pytest.mark.parametrize(
    ("name", "changes", "field"),
    [
        ("llama", {}, "n_routed_experts"),
        ("qwen3_moe", {"num_experts_per_tok": None}, "num_experts_per_tok"),
        ("deepseek_v32", {}, "index_topk"),
        ("qwen3_moe", {"layer_types": ["full_attention", "other", "other"]}, "layer_types"),
    ],
)
def test_what_is_missing_is_named(name: str, changes: dict[str, Any], field: str) -> None:
    raw = {k: v for k, v in tiny.config(name).to_dict().items() if k != "dtype"}
    with pytest.raises((BadModelConfig, UnsupportedArchitecture), match=field):
        shape_of({**raw, **changes}, "config.json")


def test_an_unknown_architecture() -> None:
    with pytest.raises(UnsupportedArchitecture, match="no model_type 'nothing'"):
        shape_of({"model_type": "nothing"}, "config.json")


def test_ranks_that_do_not_divide() -> None:
    """30 experts on 8 ranks, 3 on 4: sizes differ by one at most, every expert once, the rest empty."""
    for experts, ranks in ((30, 8), (3, 4), (128, 6), (384, 64)):
        plan = in_order(drawn(2, experts, 0.3, 0), ranks)
        held = [[e for e in row if e < experts] for row in plan.phy2log[0].reshape(ranks, -1)]
        assert sorted(e for row in held for e in row) == list(range(experts))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        assert plan.slots * ranks == experts + plan.empty
