"""What a plan of many ranks must know of this architecture, from module, checkpoint and layer map.

Weights take the bytes of the published checkpoint, caches those of the published forms. Attention over chosen rows is
counted by the operations' own work functions, of which only the number of keys is decided here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from deepinfer_compile.models.deepseek_v41.checkpoint import Part, Stored, parts, published_names
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.layers import Role, boundary, kv_bytes_per_token, layer_map
from deepinfer_compile.models.deepseek_v41.sizes import activated, in_prefill
from deepinfer_compile.models.deepseek_v41.storage import KEYS, ROWS, WINDOW
from deepinfer_compile.ops import CACHED_SELECT_ROWS, CACHED_SELECTED_ATTENTION
from deepinfer_compile.ops.registry import Work
from deepinfer_compile.plan.shape import DRAFTS, REST, TABLES, Shape, Weight, role_of

FORMATS = {"int8": "fp4", "float8_e4m3fn": "fp8", "bfloat16": "bf16", "float32": "fp32"}


def shape(config: DeepseekV41Config, name: str) -> Shape:
    """The text model of a configuration; allocates nothing. Raises BadModelConfig."""
    roles = layer_map(config)
    edge = boundary(config)
    backtrack = config.dspark_block_size + 1 if config.num_nextn_predict_layers else 0
    split = edge < config.num_hidden_layers
    windows = len(roles) + config.num_nextn_predict_layers

    def step(rows: int, context: int) -> tuple[Work, ...]:
        return tuple(attention(config, role, rows, context) for role in roles)

    def prompt(start: int, end: int) -> tuple[Work, ...]:
        kept = min(config.sliding_window + backtrack, end - start)
        rows = [end - start if role.index < edge else kept for role in roles]
        return tuple(attention(config, role, n, end - (n - 1) // 2) for role, n in zip(roles, rows))

    return Shape(
        name=name,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        experts=config.n_routed_experts,
        top=config.num_experts_per_tok,
        context=config.max_position_embeddings,
        weights=tuple(weights(config)),
        cache_bytes=kv_bytes_per_token(config),
        request_bytes=WINDOW.nbytes(config.head_dim) * (config.sliding_window + backtrack) * windows,
        step=step,
        prompt=prompt,
        keep=config.sliding_window + backtrack if split else None,
        edge=edge,
    )


def weights(config: DeepseekV41Config) -> list[Weight]:
    """Every parameter, with the bytes that it has in the published checkpoint."""
    stored, held = published_names(config), dict[str, list[Part]]()
    for part in parts(config):
        held.setdefault(part.parameter, []).append(part)
    return [_weight(config, name, found, stored) for name, found in held.items()]


def _weight(config: DeepseekV41Config, name: str, held: list[Part], stored: dict[str, Stored]) -> Weight:
    count = sum(math.prod(part.shape) for part in held)
    files = [stored[n] for part in held for n in (part.name, part.scale) if n in stored]
    inside = name.startswith("layers.")
    role = REST if ".hc_" in name else role_of(name)
    role = DRAFTS if name.startswith("mtp.") else TABLES if name.endswith("engram.embed.weight") else role
    return Weight(
        name=name,
        role=role,
        layer=int(name.split(".")[1]) if inside else None,
        count=count,
        nbytes=sum(entry.nbytes for entry in files),
        form=FORMATS[stored[held[0].name].dtype],
        active=activated(config, name, count),
        fills=in_prefill(config, name),
    )


def attention(config: DeepseekV41Config, role: Role, rows: int, context: int) -> Work:
    """One layer's attention of a request for `rows` tokens that see `context` tokens each on average."""
    heads, width = config.num_attention_heads, config.head_dim
    window = min(config.sliding_window, context)
    visible = context // role.ratio if role.ratio else 0
    chosen = min(config.index_topk, visible)
    q, latents, cache = _meta(rows, heads, width), _meta(rows, width), _meta(1, 64, width)
    few = _meta(rows, chosen) if chosen else None
    rest = (None, None, None, None, None, None, None, few, None, 1.0, window)
    flops = CACHED_SELECTED_ATTENTION.work(q, latents, cache, *rest).flops
    # tokens of a step lie beside each other: what one of them reads of its window, the others read too
    most = min(rows * chosen, visible)
    moved = (window + rows - 1) * WINDOW.nbytes(width) + most * ROWS.nbytes(width)
    if role.index_source != role.index:
        return Work(flops, moved)
    seen = _candidates(config, role, visible)
    queries = _meta(rows, config.index_n_heads, config.index_head_dim)
    keys = _meta(1, 64, config.index_head_dim)
    lengths = torch.tensor([seen])
    found = CACHED_SELECT_ROWS.work(queries, queries, keys, None, None, lengths, None, None, 1.0, 1, 0, 0, 0)
    return Work(flops + found.flops, moved + seen * KEYS.nbytes(config.index_head_dim))


def _candidates(config: DeepseekV41Config, role: Role, visible: int) -> int:
    """Rows whose keys a layer that chooses looks at: all that are visible, or those in the published blocks."""
    if role.candidates is None or role.makes_candidates:
        return visible
    return min(visible, config.candidate_topk_blocks * config.candidate_block_size)


def _meta(*sizes: int) -> Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device="meta")


__all__ = ["attention", "shape", "weights"]
