"""Shapes and tokens small enough to train for a second in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trained import data

CED: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "head_dim": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "sliding_window": 16,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_topk": 8,
    "o_groups": 2,
    "o_lora_rank": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "hc_mult": 2,
    "engram_vocab_size": 100,
    "engram_head_dim": 4,
    "num_nextn_predict_layers": 1,
    "dspark_markov_rank": 8,
    "dspark_n_routed_experts": 3,
}
V3: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}


def few(root: Path | None = None) -> list[data.Source]:
    """A few short files of each part of the split."""
    short = [file for file in data.sources(root) if 200 < len(file.text) < 4000]
    return [file for part, count in zip(data.KINDS, (3, 3, 25)) for file in data.of_kind(short, part)[:count]]
