"""Shapes and tokens small enough to train for a second in a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained import ced_draft, ced_model, data, v3_model
from tests.trained.jobs import CedJob, Crops, DraftJob
from tests.trained.loop import Job
from tests.trained.v3_job import V3Job

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


def ced_of(tokenizer: Tokenizer) -> tuple[DeepseekV41, dict[str, Any]]:
    """A small V4.1-form model with its first weights, and its config."""
    raw = ced_model.shape(tokenizer, **CED)
    model = ced_model.build(raw, tokenizer)
    ced_model.start(model)
    return model, raw


def job_of(
    kind: str,
    prepared: Path,
    tokenizer: Tokenizer,
    folder: Path,
    device: str = "cpu",
    batch: int = 4,
    length: int = 32,
) -> Job:
    """A stage on a small model: `ced`, `draft` or `v3`."""
    crops = Crops(data.load("train", prepared).line, torch.device(device))
    if kind == "v3":
        model = v3_model.build(tokenizer.get_vocab_size(), **V3).to(device)
        return V3Job(model, tokenizer, folder, crops, batch, length)
    ced, raw = ced_of(tokenizer)
    saved = (ced.to(device), raw, tokenizer, folder)
    if kind == "ced":
        return CedJob(*saved, crops=crops, batch=batch, length=length)
    new = Crops(data.load("tune", prepared).line, torch.device(device))
    known, fresh = (ced_draft.rollouts(ced, source.draw(4, 8), 3 * length) for source in (crops, new))
    return DraftJob(*saved, crops=crops, known=known, new=fresh, batch=batch, prompt=8)
