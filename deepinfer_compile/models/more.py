"""More decoder architectures of Transformers for the support table, some of which cannot be captured yet.

Each entry is a configuration class and what differs from `tiny.BASE`, as in `tiny.CONFIGS`; none is needed by a test of
a pass, so a row here may fail without breaking anything.
"""

from __future__ import annotations

from typing import Any

Differences = dict[str, Any]
ALTERNATING = ["sliding_attention", "full_attention"] * 2
WINDOW: Differences = {"sliding_window": 16, "layer_types": ALTERNATING, "num_hidden_layers": 4}
LATENT: Differences = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "qk_nope_head_dim": 12,
}
ROUTED: Differences = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
GROUPED: Differences = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "n_group": 1,
    "topk_group": 1,
}
INDEXED: Differences = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2}
LONG_ROPE: Differences = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.05 * i for i in range(8)],
    "long_factor": [2.0 + 0.3 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}

MAMBA: Differences = {"mamba_n_heads": 12, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16}

DENSE: dict[str, tuple[str, Differences]] = {
    "apertus": ("ApertusConfig", {}),
    "arcee": ("ArceeConfig", {"head_dim": 16}),
    "bitnet": ("BitNetConfig", {}),
    "bloom": ("BloomConfig", {}),
    "codegen": ("CodeGenConfig", {"rotary_dim": 8, "num_attention_heads": 4}),
    "cohere": ("CohereConfig", {}),
    "cohere2": ("Cohere2Config", WINDOW),
    "cwm": ("CwmConfig", {**WINDOW, "head_dim": 16}),
    "diffllama": ("DiffLlamaConfig", {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 20}),
    "exaone4": ("Exaone4Config", {**WINDOW, "sliding_window_pattern": 2}),
    "falcon": ("FalconConfig", {}),
    "gemma2": ("Gemma2Config", {**WINDOW, "head_dim": 20, "query_pre_attn_scalar": 20}),
    "gemma1": ("GemmaConfig", {"head_dim": 20}),
    "gemma3n_text": (
        "Gemma3nTextConfig",
        {
            **WINDOW,
            "head_dim": 20,
            "vocab_size_per_layer_input": 1009,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        },
    ),
    "gemma4_text": (
        "Gemma4TextConfig",
        {
            **WINDOW,
            "head_dim": 20,
            "global_head_dim": 20,
            "vocab_size_per_layer_input": 1009,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
        },
    ),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "gpt2": ("GPT2Config", {}),
    "gpt_bigcode": ("GPTBigCodeConfig", {}),
    "gpt_neo": (
        "GPTNeoConfig",
        {"num_hidden_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 16},
    ),
    "gpt_neox": ("GPTNeoXConfig", {}),
    "gptj": ("GPTJConfig", {"rotary_dim": 8}),
    "granite": ("GraniteConfig", {"attention_multiplier": 0.25, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "helium": ("HeliumConfig", {"head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", {"head_dim": 16}),
    "jais2": ("Jais2Config", {"head_dim": 16}),
    "ministral": ("MinistralConfig", {"head_dim": 16, **WINDOW}),
    "ministral3": ("Ministral3Config", {"head_dim": 16}),
    "modernbert_decoder": ("ModernBertDecoderConfig", {}),
    "mpt": ("MptConfig", {}),
    "nanochat": ("NanoChatConfig", {}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "olmo": ("OlmoConfig", {}),
    "olmo2": ("Olmo2Config", {}),
    "olmo3": ("Olmo3Config", WINDOW),
    "opt": ("OPTConfig", {"ffn_dim": 152, "word_embed_proj_dim": 96}),
    "persimmon": ("PersimmonConfig", {}),
    "phi2": ("PhiConfig", {}),
    "phi3_longrope": ("Phi3Config", {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 32}),
    "qwen2": ("Qwen2Config", {}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
    "stablelm": ("StableLmConfig", {}),
    "starcoder2": ("Starcoder2Config", {}),
    "vaultgemma": ("VaultGemmaConfig", {**WINDOW, "head_dim": 20, "query_pre_attn_scalar": 20}),
    "xglm": ("XGLMConfig", {"d_model": 96, "ffn_dim": 152, "num_layers": 3, "attention_heads": 6}),
}

EXPERTS: dict[str, tuple[str, Differences]] = {
    "afmoe": ("AfmoeConfig", {**WINDOW, **ROUTED, "head_dim": 16, "num_shared_experts": 1, "num_dense_layers": 1}),
    "cohere2_moe": ("Cohere2MoeConfig", {**WINDOW, "head_dim": 16, "num_experts": 7, "num_experts_per_tok": 3}),
    "dbrx": (
        "DbrxConfig",
        {
            "d_model": 96,
            "n_heads": 6,
            "n_layers": 3,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 40, "hidden_size": 96, "moe_num_experts": 5, "moe_top_k": 2},
        },
    ),
    "dots1": ("Dots1Config", {**GROUPED, "head_dim": 16, "first_k_dense_replace": 1}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "moe_intermediate_size": 40,
            "moe_k": 3,
            "moe_num_experts": 7,
            "moe_num_shared_experts": 1,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": 2,
        },
    ),
    "flex_olmo": ("FlexOlmoConfig", {"num_experts": 5, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoeConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "hunyuan_v1_moe": ("HunYuanMoEV1Config", {"num_experts": 5, "moe_topk": 2, "head_dim": 16}),
    "hy_v3": ("HYV3Config", {**ROUTED, "num_shared_experts": 1, "head_dim": 16}),
    "jetmoe": ("JetMoeConfig", {"kv_channels": 16, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "laguna": ("LagunaConfig", {**ROUTED, "head_dim": 16, "shared_expert_intermediate_size": 40}),
    "llama4_text": (
        "Llama4TextConfig",
        {"head_dim": 16, "num_local_experts": 5, "intermediate_size_mlp": 152, "num_hidden_layers": 4},
    ),
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {**GROUPED, **WINDOW, "num_key_value_heads": 1, "head_dim": 24, "v_head_dim": 20},
    ),
    "minimax_m2": ("MiniMaxM2Config", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**ROUTED, "shared_expert_intermediate_size": 56},
    ),
    "solar_open": ("SolarOpenConfig", {**GROUPED, "head_dim": 16}),
}

LATENT_ATTENTION: dict[str, tuple[str, Differences]] = {
    "deepseek_v32": (
        "DeepseekV32Config",
        {**LATENT, **GROUPED, **INDEXED, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "deepseek_v4": (
        "DeepseekV4Config",
        {
            "head_dim": 24,
            "num_key_value_heads": 1,
            "q_lora_rank": 40,
            "o_lora_rank": 16,
            "o_groups": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            **INDEXED,
        },
    ),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**LATENT, **GROUPED, "mlp_layer_types": ["dense", "sparse", "sparse"]}),
    "glm_moe_dsa": ("GlmMoeDsaConfig", {**LATENT, **GROUPED, **INDEXED}),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 152,
            "expert_ffn_hidden_size": 40,
            "n_routed_experts": 8,
            "zero_expert_num": 2,
            "moe_topk": 3,
            "head_dim": 8,
        },
    ),
    "minicpm3": ("MiniCPM3Config", LATENT),
    "youtu": ("YoutuConfig", LATENT),
}

RECURRENT: dict[str, tuple[str, Differences]] = {
    "bamba": ("BambaConfig", {**MAMBA, "attn_layer_indices": [1]}),
    "falcon_mamba": ("FalconMambaConfig", {}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {**MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
    ),
    "jamba": ("JambaConfig", {}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **LATENT,
            **GROUPED,
            "q_lora_rank": None,
            "num_local_experts": 8,
            "linear_head_dim": 16,
            "linear_num_heads": 6,
        },
    ),
    "lfm2": ("Lfm2Config", {"layer_types": ["conv", "full_attention", "conv"]}),
    "mamba2": ("Mamba2Config", {"num_heads": 12, "head_dim": 16, "state_size": 16, "n_groups": 2}),
    "minimax": ("MiniMaxConfig", {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **ROUTED,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "shared_expert_intermediate_size": 40,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "recurrent_gemma": ("RecurrentGemmaConfig", {"lru_width": 96}),
}

MORE: dict[str, tuple[str, Differences]] = {**DENSE, **EXPERTS, **LATENT_ATTENTION, **RECURRENT}
"""Configurations by name."""
