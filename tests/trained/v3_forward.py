"""The whole-sequence forward of Transformers' DeepseekV3 model and of its extra layer, in a form that trains fast.

The same function of the same parameters: attention is one fused causal call on expanded keys and values, experts are
dense (`fast`). Rotated channels stay in adjacent pairs, where Transformers reorders queries and keys alike.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    DeepseekV3MLP,
    DeepseekV3MoE,
    DeepseekV3RMSNorm,
    DeepseekV3TopkRouter,
)

from tests.trained.fast import Angles, experts, load_of, normed, spread, turn
from tests.trained.v3_model import V3

Loads = dict[str, Tensor]


def angles_of(model: V3, length: int, device: torch.device) -> Angles:
    """The rotary table of a sequence length."""
    return Angles.of(model.main.model.rotary_emb.inv_freq.tolist(), length, device)


def run(model: V3, ids: Tensor, angles: Angles) -> tuple[Tensor, Loads]:
    """Hidden states [B, T, D] of ids i64 [B, T] after the final norm, and tokens per expert by layer."""
    loads: Loads = {}
    x = model.main.model.embed_tokens(ids)
    for i, layer in enumerate(model.main.model.layers):
        x = block(layer, x, angles, f"main.model.layers.{i}", loads)
    return rms(model.main.model.norm, x), loads


def ahead(model: V3, hidden: Tensor, following: Tensor, angles: Angles, loads: Loads) -> Tensor:
    """The extra layer's hidden states [B, T, D], after its norm: hidden at p and token p + 1 give token p + 2.

    following i64 [B, T]: the token after each position.
    """
    mtp = model.mtp
    known = rms(mtp.enorm, model.main.model.embed_tokens(following)), rms(mtp.hnorm, hidden)
    x = mtp.eh_proj(torch.cat(known, dim=-1))
    return rms(mtp.norm, block(mtp, x, angles, "mtp", loads))


def rms(norm: DeepseekV3RMSNorm, x: Tensor) -> Tensor:
    """The norm of x."""
    return normed(x, norm.weight, norm.variance_epsilon)


def block(layer: DeepseekV3DecoderLayer, x: Tensor, angles: Angles, name: str, loads: Loads) -> Tensor:
    """One decoder layer."""
    x = x + attention(layer.self_attn, rms(layer.input_layernorm, x), angles)
    y = rms(layer.post_attention_layernorm, x)
    return x + (moe(layer.mlp, y, name, loads) if isinstance(layer.mlp, DeepseekV3MoE) else mlp(layer.mlp, y))


def attention(attn: DeepseekV3Attention, x: Tensor, angles: Angles) -> Tensor:
    """Causal latent attention, keys and values expanded."""
    assert attn.q_a_proj is not None
    assert attn.q_b_proj is not None
    assert attn.q_a_layernorm is not None
    assert attn.v_head_dim is not None
    nope, rope, value = attn.qk_nope_head_dim, attn.qk_rope_head_dim, attn.v_head_dim
    queries = attn.q_b_proj(rms(attn.q_a_layernorm, attn.q_a_proj(x)))
    queries = turn(queries.unflatten(-1, (attn.num_heads, nope + rope)).transpose(1, 2), angles)
    latent, rotated = attn.kv_a_proj_with_mqa(x).split((attn.kv_lora_rank, rope), dim=-1)
    both = attn.kv_b_proj(rms(attn.kv_a_layernorm, latent)).unflatten(-1, (attn.num_heads, nope + value))
    keys, values = both.transpose(1, 2).split((nope, value), dim=-1)
    rotated = turn(rotated.unsqueeze(1), angles).expand(-1, attn.num_heads, -1, -1).type_as(keys)
    keys = torch.cat((keys, rotated), dim=-1)
    out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=attn.scaling)
    y: Tensor = attn.o_proj(out.transpose(1, 2).flatten(2))
    return y


def mlp(layer: DeepseekV3MLP, x: Tensor) -> Tensor:
    """A dense or shared expert."""
    y: Tensor = layer.down_proj(F.silu(layer.gate_proj(x)) * layer.up_proj(x))
    return y


def moe(layer: DeepseekV3MoE, x: Tensor, name: str, loads: Loads) -> Tensor:
    """The experts of x [B, T, D]."""
    flat = x.flatten(0, 1)
    ids, weights = route(layer.gate, flat)
    count = layer.gate.num_experts
    loads[name] = load_of(ids, count)
    own = layer.experts
    y = experts(flat, own.gate_up_proj, own.down_proj, spread(ids, weights, count), None)
    return (y + mlp(layer.shared_experts, flat)).view_as(x)


def route(gate: DeepseekV3TopkRouter, x: Tensor) -> tuple[Tensor, Tensor]:
    """Chosen ids i64 [N, k], inside the best groups, and their weights; in fp32."""
    with torch.autocast(x.device.type, enabled=False):
        scores = F.linear(x.float(), gate.weight).sigmoid()
    with torch.no_grad():
        ranked = (scores + gate.e_score_correction_bias).unflatten(-1, (gate.num_group, -1))
        groups = ranked.topk(2, dim=-1).values.sum(-1).topk(gate.topk_group, dim=-1).indices
        kept = torch.zeros_like(ranked[..., 0]).scatter(1, groups, 1.0).unsqueeze(-1) > 0
        ids = ranked.masked_fill(~kept, float("-inf")).flatten(1).topk(gate.top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * gate.routed_scaling_factor
