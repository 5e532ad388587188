"""The small V4.1-form model: its shape, its first weights, its files.

Ten million parameters, every part on: layer 0 reads a window alone, 1-3 pool pairs of tokens (sources 1 and 3), 4 is
the boundary and 4-7 read its rows; 4 publishes candidate blocks and 6 chooses anew among them; tables of n-grams
before layers 1 and 3; two draft layers on the inputs of layers 5-7. At 1024 tokens 512 or 1024 rows compete for 64
places, and candidates are a quarter of them, so that the window, both ratios and both levels of choice have work.

Numbers that the published checkpoint keeps in fp32 (mixing of streams, sinks, router biases) are fp32 in the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from deepinfer_compile.models.deepseek_v41 import engram
from deepinfer_compile.models.deepseek_v41.config import FIXED, DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import normalised_map, table_sizes
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained.data import NOISE, PAD, token_texts

LENGTH = 1024
SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "head_dim": 96,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 32,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": LENGTH,
    },
    "max_position_embeddings": 4 * LENGTH,
    "sliding_window": 128,
    "compress_ratios": [0, 2, 2, 2, 1, 1, 1, 1],
    "kv_source_layer_ids": [1, 3, 4],
    "index_source_layer_ids": [1, 3, 4, 6],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 32,
    "candidate_block_size": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "index_topk": 64,
    "o_groups": 2,
    "o_lora_rank": 64,
    "moe_intermediate_size": 64,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "gate_temp": 1.0,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 6,
    "hc_eps": 1e-6,
    "engram_layer_ids": [1, 3],
    "engram_vocab_size": 3000,
    "engram_max_ngram_size": 4,
    "engram_n_heads": 2,
    "engram_head_dim": 16,
    "engram_pad_id": PAD,
    "num_nextn_predict_layers": 2,
    "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE,
    "dspark_target_layer_ids": [5, 6, 7],
    "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 8,
    "dspark_num_experts_per_tok": 2,
    "rms_norm_eps": 1e-20,
}
WIDE = ("_fn", "_base", "_scale", "attn_sink", "gate.bias")
"""Endings of the names of tensors that stay fp32 in the file."""


def shape(tokenizer: Tokenizer, **changes: Any) -> dict[str, Any]:
    """A parsed config.json for a tokenizer; sizes of vocabularies and tables follow from it."""
    raw = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41_text",
        **FIXED,
        **SHAPE,
        **changes,
        "vocab_size": tokenizer.get_vocab_size(),
    }
    empty = {**raw, "engram_num_embeddings": [0] * len(raw["engram_layer_ids"])}
    rows = [sum(sizes) for sizes in table_sizes(DeepseekV41Config.read(empty)).values()]
    return {**raw, "engram_num_embeddings": rows, "engram_compressed_vocab_size": _normalised(tokenizer)}


def build(raw: dict[str, Any], tokenizer: Tokenizer) -> DeepseekV41:
    """The model of a config with the tokenizer's normalised vocabulary; its weights are not set."""
    config = DeepseekV41Config.read(raw)
    return DeepseekV41(config, normalised_map(config, token_texts(tokenizer)))


@torch.no_grad()
def start(model: DeepseekV41, seed: int = 0) -> None:
    """First weights. Streams start alike; what breaks the tie is that sublayer s reads mostly stream s mod K."""
    generator = torch.Generator().manual_seed(seed)
    depth = 2 * len(model.blocks)
    for name, p in model.named_parameters():
        if "norm" in name or name.endswith(("q_weight", "k_weight")):
            p.fill_(1.0)
        elif name.endswith("_scale"):
            p.fill_(0.1)
        elif name.endswith(("attn_sink", "gate.bias", "_base")):
            p.zero_()
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * _deviation(name, p, depth))
    draft = [] if model.mtp is None else model.mtp.blocks
    for layers in (model.blocks, draft):
        for i, layer in enumerate(layers):
            for part, base in enumerate((layer.hc_attn_base, layer.hc_ffn_base)):
                _start_mixing(base, model.config.hc_mult, 2 * i + part + 1)


def save(model: DeepseekV41, raw: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors, the weights renamed into place when they are whole."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    found = {n: p.detach() for n, p in model.named_parameters()}
    kept = {n: (p if n.endswith(WIDE) else p.bfloat16()).cpu().contiguous() for n, p in found.items()}
    save_file(kept, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DeepseekV41, Tokenizer]:
    """The saved model in eval mode in one dtype, and its tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = build(json.loads((folder / "config.json").read_text()), tokenizer)
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model.to(dtype).eval(), tokenizer


def _normalised(tokenizer: Tokenizer) -> int:
    """The size of the normalised vocabulary: the only one that `normalised_map` accepts."""
    return len({engram._normalised(text) for text in token_texts(tokenizer)})


def _deviation(name: str, p: torch.Tensor, depth: int) -> float:
    if name in ("embed.weight", "mtp.markov_embed.weight") or name.endswith("engram.embed.weight"):
        return 0.1
    if name.endswith(("markov_head.weight", "confidence.weight", "engram.wkv.weight")):
        return 0.02
    fan = math.prod(p.shape[1:]) if p.ndim == 2 else p.shape[-1]
    out = name.endswith(("wo_b.weight", "w2", "w2.weight"))
    return float(fan**-0.5 * (depth**-0.5 if out else 1.0))


def _start_mixing(base: torch.Tensor, count: int, reader: int) -> None:
    """pre: mostly stream `reader` mod count (it feeds the next sublayer); post: 1 to all; comb: nearly the identity."""
    base[:count] = -2.0
    base[reader % count] = 2.0
    base[2 * count :] = 4.0 * torch.eye(count).flatten()


def counts(model: DeepseekV41) -> dict[str, int]:
    """Parameters in all, of the memory tables, of the drafter."""
    sizes = {n: p.numel() for n, p in model.named_parameters()}
    return {
        "all": sum(sizes.values()),
        "tables": sum(n for name, n in sizes.items() if name.endswith("engram.embed.weight")),
        "drafter": sum(n for name, n in sizes.items() if name.startswith("mtp.")),
    }
