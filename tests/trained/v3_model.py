"""The small V3-form model: Transformers' own class for the main part, and the extra layer that predicts one token more.

Published files hold that extra layer as one more decoder layer, after the last, with `enorm`, `hnorm`, `eh_proj`,
`shared_head` and copies of the embedding and the head; Transformers does not load it with the main model. The same
here. Experts lie in the file one by one, as published, and are one tensor a layer in memory.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from tests.trained.data import BEGIN, END, PAD

LENGTH = 1024
SHAPE: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 10,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 4 * LENGTH,
    "rope_parameters": {"rope_type": "default", "rope_theta": 40000.0},
    "num_nextn_predict_layers": 1,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "pad_token_id": PAD,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


class Mtp(DeepseekV3DecoderLayer):
    """The extra layer: of the main model's hidden state at p (after its final norm) and token p + 1, token p + 2.

    Embedding and output head are the main model's. `norm` is the published `shared_head.norm`.
    """

    def __init__(self, config: DeepseekV3Config) -> None:
        super().__init__(config, config.num_hidden_layers)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(width, eps), DeepseekV3RMSNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.norm = DeepseekV3RMSNorm(width, eps)


class V3(nn.Module):
    """The main model and its extra layer, side by side."""

    def __init__(self, main: DeepseekV3ForCausalLM) -> None:
        super().__init__()
        self.main, self.mtp = main, Mtp(main.config)

    @property
    def depth(self) -> int:
        """Layers of the main model, which is the published number of the extra one."""
        return int(self.main.config.num_hidden_layers)


def build(vocabulary: int, **changes: Any) -> V3:
    """A model in fp32 whose weights are those `start` sets."""
    model = V3(DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=vocabulary, **{**SHAPE, **changes}))).eval()
    start(model)
    return model


def ahead(model: V3, hidden: Tensor, following: Tensor) -> Tensor:
    """Logits [B, T, V] for token p + 2, of hidden [B, T, D] at p and token p + 1 i64 [B, T]; the layer's own code."""
    mtp, base = model.mtp, model.main.model
    x = mtp.eh_proj(torch.cat((mtp.enorm(base.embed_tokens(following)), mtp.hnorm(hidden)), dim=-1))
    places = torch.arange(x.shape[1], device=x.device)
    mask = torch.zeros(1, 1, len(places), len(places), dtype=x.dtype, device=x.device)
    mask = mask.masked_fill(places.unsqueeze(1) < places, torch.finfo(x.dtype).min)
    angles = base.rotary_emb(x, position_ids=places.unsqueeze(0))
    y: Tensor = model.main.lm_head(mtp.norm(mtp(x, attention_mask=mask, position_embeddings=angles)))
    return y


def both(model: V3, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [B, T, V] of ids i64 [B, T], and where the extra layer names the token that the model then does."""
    hidden = model.main.model(ids, use_cache=False).last_hidden_state
    logits: Tensor = model.main.lm_head(hidden)
    agrees = ahead(model, hidden[:, :-1], ids[:, 1:]).argmax(-1) == logits[:, 1:].argmax(-1)
    return logits, agrees.flatten()


@torch.no_grad()
def start(model: V3, seed: int = 0) -> None:
    """First weights: by fan-in, smaller where a sublayer joins the residual."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if "norm" in name:
            p.fill_(1.0)
            continue
        out = name.endswith(("o_proj.weight", "down_proj", "down_proj.weight"))
        scale = 0.1 if "embed_tokens" in name else p.shape[-1] ** -0.5 * ((2 * model.depth) ** -0.5 if out else 1.0)
        p.copy_(torch.randn(p.shape, generator=generator) * scale)


def save(model: V3, tokenizer: Tokenizer, folder: Path) -> None:
    """config.json, tokenizer.json and model.safetensors in published names, bf16 but for the routers' biases."""
    folder.mkdir(parents=True, exist_ok=True)
    config = model.main.config
    config.architectures, config.dtype = ["DeepseekV3ForCausalLM"], torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    found = {
        name: (t if name.endswith("e_score_correction_bias") else t.bfloat16()).cpu().contiguous()
        for name, t in published(model).items()
    }
    save_file(found, folder / "model.safetensors.part", metadata={"format": "pt"})
    (folder / "model.safetensors.part").rename(folder / "model.safetensors")


def load(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[V3, Tokenizer]:
    """The main model as Transformers loads it, the extra layer beside it, and the tokenizer."""
    main: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    model = V3(main)
    prefix = f"model.layers.{model.depth}."
    files = load_file(folder / "model.safetensors")
    mine = {name.removeprefix(prefix): t for name, t in files.items() if name.startswith(prefix)}
    mine["norm.weight"] = mine.pop("shared_head.norm.weight")
    del mine["embed_tokens.weight"], mine["shared_head.head.weight"]
    model.mtp.load_state_dict(_stacked(mine, main.config.n_routed_experts))
    model.mtp.to(dtype)
    gate: Any = model.mtp.mlp.gate
    gate.e_score_correction_bias = mine["mlp.gate.e_score_correction_bias"].float()
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def published(model: V3) -> dict[str, Tensor]:
    """Every tensor by its published name."""
    found: dict[str, Tensor] = {}
    for name, tensor in model.main.state_dict().items():
        found |= _apart(name, tensor)
    prefix = f"model.layers.{model.depth}."
    for name, tensor in model.mtp.state_dict().items():
        found |= _apart(prefix + re.sub(r"^norm\.", "shared_head.norm.", name), tensor)
    found[f"{prefix}embed_tokens.weight"] = found["model.embed_tokens.weight"].clone()
    found[f"{prefix}shared_head.head.weight"] = found["lm_head.weight"].clone()
    return found


def counts(model: V3) -> dict[str, int]:
    """Parameters in all, copies in the extra layer included, and of that layer."""
    sizes = {name: t.numel() for name, t in published(model).items()}
    extra = sum(n for name, n in sizes.items() if name.startswith(f"model.layers.{model.depth}."))
    return {"all": sum(sizes.values()), "mtp": extra}


def _apart(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """One expert a tensor, where they are one tensor in memory."""
    base, _, last = name.rpartition(".")
    if last == "gate_up_proj":
        halves = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{base}.{e}.{half}.weight": rows.chunk(2)[which].clone()
            for e, rows in enumerate(tensor)
            for half, which in halves.items()
        }
    if last == "down_proj" and base.endswith("experts"):
        return {f"{base}.{e}.down_proj.weight": rows.clone() for e, rows in enumerate(tensor)}
    return {name: tensor}


def _stacked(files: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    """The inverse of `_apart` for one layer."""
    kept = {name: t for name, t in files.items() if ".experts." not in name}

    def each(part: str) -> list[Tensor]:
        return [files[f"mlp.experts.{e}.{part}.weight"] for e in range(count)]

    both = [torch.cat(pair) for pair in zip(each("gate_proj"), each("up_proj"))]
    return kept | {
        "mlp.experts.gate_up_proj": torch.stack(both),
        "mlp.experts.down_proj": torch.stack(each("down_proj")),
    }
