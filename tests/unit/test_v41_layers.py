"""DeepSeek-V4.1: the published sizes and the layer map, derived; configurations that contradict themselves refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config, Yarn
from deepinfer_compile.models.deepseek_v41.engram import plain_map, table_sizes
from deepinfer_compile.models.deepseek_v41.layers import boundary, kv_bytes_per_token, layer_map
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.sizes import sizes

RELEASED = DeepseekV41Config()


def test_the_released_model_has_the_published_sizes() -> None:
    found = sizes(RELEASED)
    billions = {name: getattr(found, name) / 1e9 for name in ("backbone", "engram", "prefill", "decode")}
    assert round(billions["backbone"], 1) == 551.9
    assert round(billions["engram"], 1) == 196.6
    assert round(billions["prefill"], 2) == 7.90
    assert round(billions["decode"], 2) == 16.13
    assert 13e9 < found.draft < 15e9


def test_the_released_model_runs_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = DeepseekV41(RELEASED, plain_map(RELEASED)).to("meta")
        logits = model(torch.zeros(1, 300, dtype=torch.int64))
    assert logits.shape == (1, 300, 129280)


def test_a_token_adds_890_bytes_of_global_cache() -> None:
    assert kv_bytes_per_token(RELEASED) == 890


def test_the_layer_map_of_the_released_model() -> None:
    roles = layer_map(RELEASED)
    assert boundary(RELEASED) == 20
    assert [r.ratio for r in roles] == [0] * 2 + [2] * 18 + [1] * 20
    assert [r.kv_source for r in roles] == [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 20
    chosen = [None] * 2 + [2] * 6 + [8] * 6 + [14] * 6 + [20] * 4 + [24] * 4 + [28] * 4 + [32] * 4 + [36] * 4
    assert [r.index_source for r in roles] == chosen
    assert [r.index for r in roles if r.makes_rows] == [2, 8, 14, 20]
    assert [r.index for r in roles if r.chooses] == [2, 8, 14, 20, 24, 28, 32, 36]
    assert [r.index for r in roles if r.candidates is not None] == [20, 24, 28, 32, 36]
    assert [r.index for r in roles if r.makes_candidates] == [20]
    assert [r.index for r in roles if r.engram] == [1, 14]


def test_memory_tables_have_distinct_prime_sizes_that_sum_to_the_published_rows() -> None:
    tables = table_sizes(RELEASED)
    assert {layer: sum(rows) for layer, rows in tables.items()} == {1: 384006168, 14: 384016682}
    every = [rows for layer in tables.values() for rows in layer]
    assert len(set(every)) == 48
    assert min(every) > 16_000_000 - 1


def test_a_published_config_is_read() -> None:
    text: dict[str, Any] = {
        "model_type": "deepseek_v41_text",
        "compress_ratios": [0, 0] + [2] * 18 + [1] * 20 + [0] * 3,
        "num_hidden_layers": 40,
        "kv_source_layer_ids": [2, 8, 14, 20],
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 65536,
        },
        "attention_dropout": 0.0,
        "dspark_target_layer_ids": [37, 38, 39],
    }
    assert DeepseekV41Config.read({"model_type": "deepseek_v41", "text_config": text}) == RELEASED
    assert DeepseekV41Config.read(text) == RELEASED
    changed = DeepseekV41Config.read({**text, "rms_norm_eps": 1e-6, "rope_scaling": {"factor": 8}})
    assert changed == RELEASED.with_(rms_norm_eps=1e-6, yarn=Yarn(factor=8.0))


@pytest.mark.parametrize(
    ("key", "value"),
    [("scoring_func", "softmax"), ("num_key_value_heads", 8), ("rope_scaling", {"rope_type": "linear"})],
)
def test_what_is_not_implemented_is_refused(key: str, value: object) -> None:
    with pytest.raises(BadModelConfig, match=key):
        DeepseekV41Config.read({key: value})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kv_source_layer_ids": (2, 4)}, "kv_source_layer_ids"),  # 6 would read pooled rows at ratio 1
        ({"kv_source_layer_ids": (4, 6)}, "kv_source_layer_ids"),  # 2 has nothing to read
        ({"kv_source_layer_ids": (1, 2, 4, 6)}, "compress_ratios"),  # a source that reads no rows
        ({"index_source_layer_ids": (2, 6, 8)}, "index_source_layer_ids"),  # 4 makes rows, nobody chooses of them
        ({"engram_layer_ids": (1, 7)}, "engram_layer_ids"),  # memory above the boundary
        ({"dspark_target_layer_ids": (4, 8)}, "dspark_target_layer_ids"),  # features of both sides
        ({"candidate_source_layer_id": 7}, "candidate_source_layer_id"),  # does not choose
        ({"kv_source_layer_ids": (2, 4, 6, 8)}, "candidate_source_layer_id"),  # 8 would choose by blocks of 6
    ],
)
def test_maps_that_do_not_nest_are_refused(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(BadModelConfig, match=key):
        layer_map(tiny.config(**changes))


def test_ratios_must_cover_the_layers() -> None:
    with pytest.raises(BadModelConfig, match="compress_ratios"):
        tiny.config(num_hidden_layers=9)
