"""A tiny random model with every part on, odd sizes on purpose: 3 streams, 7 experts, 10 layers, vocabulary 307.

Layers 0-1 read a window alone, 2-5 pool pairs (sources 2 and 4), 6-9 read the rows of 6, the boundary. On both sides
there is a layer that makes rows, one that only reads them, and, in the decoder, one that only chooses anew. So few rows
are chosen that short sequences already leave some out, on both levels.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config, Yarn
from deepinfer_compile.models.deepseek_v41.engram import plain_map, table_sizes
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, Forms

TINY: dict[str, Any] = {
    "vocab_size": 307,
    "hidden_size": 48,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "head_dim": 20,
    "q_lora_rank": 28,
    "qk_rope_head_dim": 8,
    "rope_theta": 100.0,
    "compress_rope_theta": 500.0,
    "yarn": Yarn(factor=4.0, fast=8.0, slow=1.0, original=64),
    "max_position_embeddings": 512,
    "sliding_window": 16,
    "compress_ratios": (0, 0, 2, 2, 2, 2, 1, 1, 1, 1),
    "kv_source_layer_ids": (2, 4, 6),
    "index_source_layer_ids": (2, 4, 6, 8),
    "candidate_source_layer_id": 6,
    "candidate_topk_blocks": 4,
    "candidate_block_size": 5,
    "index_n_heads": 3,
    "index_head_dim": 12,
    "index_topk": 11,
    "o_groups": 2,
    "o_lora_rank": 14,
    "moe_intermediate_size": 20,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
    "hc_mult": 3,
    "engram_layer_ids": (1, 4),
    "engram_vocab_size": 40,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 3,
    "engram_head_dim": 6,
    "engram_compressed_vocab_size": 211,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 300,
    "dspark_target_layer_ids": (7, 8, 9),
    "dspark_markov_rank": 10,
    "dspark_n_routed_experts": 5,
    "dspark_num_experts_per_tok": 2,
}


def config(**changes: Any) -> DeepseekV41Config:
    """The tiny configuration; the rows of memory tables follow from the rest."""
    fields = {**TINY, **changes}
    drafted = DeepseekV41Config(**{**fields, "engram_num_embeddings": (0,) * len(fields["engram_layer_ids"])})
    rows = tuple(sum(sizes) for sizes in table_sizes(drafted).values())
    return drafted.with_(engram_num_embeddings=rows)


def make(seed: int = 0, dtype: torch.dtype = torch.float32, forms: Forms = PLAIN, **changes: Any) -> DeepseekV41:
    """A tiny random model in eval mode, biases, sinks and norms not trivial."""
    shape = config(**changes)
    model = DeepseekV41(shape, plain_map(shape), forms).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            drawn = torch.randn(p.shape, generator=generator)
            p.copy_(_random(name, drawn))
    return model.to(dtype)


def _random(name: str, drawn: torch.Tensor) -> torch.Tensor:
    if "norm" in name or name.endswith(("q_weight", "k_weight", "_scale")):
        return 1 + 0.2 * drawn
    if drawn.ndim == 1:
        return 0.3 * drawn
    if name.endswith(("embed.weight", "markov_embed.weight")):
        return drawn
    return drawn * float(drawn.shape[-1] ** -0.5)
