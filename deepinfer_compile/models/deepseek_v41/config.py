"""The published configuration keys of DeepSeek-V4.1's text part, with the released model's values as defaults.

A frozen dataclass and no library class, so that sizes and layer roles can be derived where Transformers is not
installed or does not know the architecture. Keys that do not change the forward pass (dropout, training losses,
quantisation of the files) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from deepinfer_compile.errors import BadModelConfig

RELEASED_RATIOS = (0,) * 2 + (2,) * 18 + (1,) * 20
FIXED: dict[str, object] = {
    "num_key_value_heads": 1,
    "attention_bias": False,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "n_shared_experts": 1,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Yarn:
    """Stretching of rotary frequencies: from `original` positions by `factor`, between `fast` and `slow` turns."""

    factor: float = 16.0
    fast: float = 32.0
    slow: float = 1.0
    original: int = 65536

    @staticmethod
    def read(raw: Mapping[str, Any]) -> Yarn:
        """From a `rope_scaling` entry. Raises BadModelConfig if it is of another type."""
        kind = raw.get("rope_type", raw.get("type", "yarn"))
        if kind != "yarn":
            raise BadModelConfig(key="rope_scaling", value=kind, reason="only yarn is known for this architecture")
        return Yarn(
            factor=float(raw.get("factor", 16)),
            fast=float(raw.get("beta_fast", 32)),
            slow=float(raw.get("beta_slow", 1)),
            original=int(raw.get("original_max_position_embeddings", 65536)),
        )


@dataclass(frozen=True)
class DeepseekV41Config:
    """Every field is the published key of the same name; `rope_scaling` is read into `yarn`.

    `compress_ratios` has one entry a layer: 0 reads a window alone, 1 reads every global row, r > 1 reads rows that
    pool r tokens. Trailing entries of draft layers are dropped. None means the released schedule, sources and tables.
    Raises BadModelConfig for values that contradict each other (see also `layers.layer_map`).
    """

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    num_attention_heads: int = 64
    head_dim: int = 512
    q_lora_rank: int = 1280
    qk_rope_head_dim: int = 64
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    yarn: Yarn = field(default_factory=Yarn)
    max_position_embeddings: int = 1048576
    sliding_window: int = 128
    compress_ratios: tuple[int, ...] = RELEASED_RATIOS
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    candidate_source_layer_id: int = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    o_groups: int = 8
    o_lora_rank: int = 1024
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    gate_temp: float = 1.0
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_vocab_size: int = 16000000
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_pad_id: int = 2
    engram_compressed_vocab_size: int = 99092
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    rms_norm_eps: float = 1e-20

    def __post_init__(self) -> None:
        checks = (
            ("compress_ratios", len(self.compress_ratios) == self.num_hidden_layers, "one entry a layer is needed"),
            ("o_groups", self.num_attention_heads % self.o_groups == 0, "heads must divide into groups"),
            ("qk_rope_head_dim", self.qk_rope_head_dim % 2 == 0, "rotation works on pairs"),
            ("head_dim", self.head_dim >= self.qk_rope_head_dim, "it must hold the rotated channels"),
            ("index_head_dim", self.index_head_dim >= self.qk_rope_head_dim, "it must hold the rotated channels"),
            ("num_experts_per_tok", self.num_experts_per_tok <= self.n_routed_experts, "there are fewer experts"),
            (
                "engram_num_embeddings",
                len(self.engram_num_embeddings) == len(self.engram_layer_ids),
                "one number of rows for each of engram_layer_ids is needed",
            ),
        )
        for key, holds, reason in checks:
            if not holds:
                raise BadModelConfig(key=key, value=getattr(self, key), reason=reason)

    @staticmethod
    def read(raw: Mapping[str, Any]) -> DeepseekV41Config:
        """From a parsed config.json, composite (`text_config`) or of the text part alone.

        A missing key takes the released value; a missing candidate source is the last source of global rows.
        Raises BadModelConfig for a value of a fixed key that this definition does not implement.
        """
        text: Mapping[str, Any] = raw.get("text_config") or raw
        for key, value in FIXED.items():
            if text.get(key, value) != value:
                raise BadModelConfig(key=key, value=text[key], reason=f"only {value!r} is implemented")
        known = {f.name for f in fields(DeepseekV41Config)} - {"yarn"}
        found = {key: _plain(text[key]) for key in known if text.get(key) is not None}
        layers = found.get("num_hidden_layers", 40)
        found["compress_ratios"] = tuple(found.get("compress_ratios", RELEASED_RATIOS))[:layers]
        sources = found.get("kv_source_layer_ids", (2, 8, 14, 20))
        found.setdefault("candidate_source_layer_id", sources[-1] if sources else -1)
        if text.get("rope_scaling"):
            found["yarn"] = Yarn.read(text["rope_scaling"])
        return DeepseekV41Config(**found)

    def with_(self, **changes: Any) -> DeepseekV41Config:
        """A copy with some fields changed."""
        return replace(self, **changes)


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
