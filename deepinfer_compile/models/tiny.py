"""Tiny random models of every architecture, with odd sizes on purpose: heads 6, latent 24, v != nope, vocab 1009.

Small enough to compile and compare with eager in seconds, odd enough that a transposed or broadcast dimension shows.
`CONFIGS` is what every pass is tested on; `more.MORE` is what else the support table reports.
"""

from __future__ import annotations

from typing import Any

import torch

from deepinfer_compile.capture import hf
from deepinfer_compile.models.more import MORE

VOCAB = 1009
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 152,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MLA: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "qk_nope_head_dim": 12,
    "n_routed_experts": 12,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 40,
    "first_k_dense_replace": 1,
}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 20}),
    "gemma": (
        "Gemma3TextConfig",
        {
            "head_dim": 20,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "query_pre_attn_scalar": 20,
        },
    ),
    "phi": ("Phi3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 16}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            "head_dim": 20,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "norm_topk_prob": True,
        },
    ),
    "olmoe": ("OlmoeConfig", {"num_experts": 7, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOssConfig",
        {
            "head_dim": 16,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 64,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "moe_intermediate_size": 40,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**MLA, "q_lora_rank": None, "n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {**MLA, "n_group": 3, "topk_group": 2, "num_hidden_layers": 4, "first_k_dense_replace": 2},
    ),
}


def config(name: str, **changes: Any) -> Any:
    """The tiny configuration of an architecture of `CONFIGS` or `MORE`. Raises KeyError, MissingExtra."""
    cls, extra = CONFIGS[name] if name in CONFIGS else MORE[name]
    return getattr(hf.transformers(), cls)(**{**BASE, **extra, **changes})


def make(name: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A tiny random model in eval mode, biases and sinks not zero. Raises KeyError, MissingExtra."""
    return randomised(config(name, **changes), seed).to(dtype)


def randomised(config: Any, seed: int = 0) -> Any:
    """A random fp32 causal LM of a configuration in eval mode, biases and sinks not zero."""
    torch.manual_seed(seed)
    model = hf.transformers().AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, p in model.named_parameters():
            if "bias" in key or "sink" in key:
                p.normal_(0, 0.3)
            elif "norm" in key:
                p.add_(torch.randn_like(p) * 0.2)
        for key, b in model.named_buffers():
            if "e_score_correction_bias" in key:
                b.normal_(0, 0.3)
    return model
