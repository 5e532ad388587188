"""DeepSeek-V4.1's attention and mixing written again, token by token and head by head, with Python lists and sets.

Shares no code with the model: rotation by complex numbers, rows by explicit groups, choices by sorting index lists.
"""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_compile.models.deepseek_v41.attention import Attention
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config


@dataclass
class Global:
    """Rows and keys of one sequence's source layer, and what every token chose."""

    rows: list[Tensor]
    keys: list[Tensor]
    chosen: list[set[int]]
    candidates: list[set[int]] | None


def norm(x: Tensor, weight: Tensor, eps: float = 1e-20) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def turned(x: Tensor, position: int, frequencies: list[float], sign: int = 1) -> Tensor:
    """One vector with its last channels rotated as complex numbers."""
    width = 2 * len(frequencies)
    out = x.clone()
    first = x.shape[0] - width
    for i, frequency in enumerate(frequencies):
        at = first + 2 * i
        z = complex(float(x[at]), float(x[at + 1])) * cmath.exp(1j * sign * position * frequency)
        out[at], out[at + 1] = z.real, z.imag
    return out


def row(attn: Attention, x: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Row `number` of x [T, hidden] and its key, rotated."""
    comp, indexer, ratio = attn.compressor, attn.indexer, attn.role.ratio
    assert comp is not None
    assert indexer is not None
    group = x[number * ratio : (number + 1) * ratio]
    values = [comp.wkv.weight @ t for t in group]
    if comp.wgate is None:
        latent = values[0]
    else:
        powers = [torch.exp(comp.wgate.weight @ t) for t in group]
        latent = sum(p * v for p, v in zip(powers, values)) / sum(powers)  # type: ignore[assignment]
    latent = norm(latent, comp.norm.weight)
    assert indexer.wk is not None
    assert indexer.k_norm is not None
    key = norm(indexer.wk.weight @ latent, indexer.k_norm.weight)
    frequencies = attn.rotary.frequencies
    return turned(latent, number * ratio, frequencies), turned(key, number * ratio, frequencies)


def index_score(attn: Attention, config: DeepseekV41Config, x: Tensor, position: int, key: Tensor) -> float:
    indexer = attn.indexer
    assert indexer is not None
    low = norm(attn.wq_a.weight @ x, attn.q_norm.weight)
    queries = (indexer.wq_b.weight @ low).view(config.index_n_heads, config.index_head_dim)
    weights = indexer.weights_proj.weight @ x / math.sqrt(config.index_n_heads)
    total = 0.0
    for q, w in zip(queries, weights):
        match = float(turned(q, position, attn.rotary.frequencies) @ key)
        total += max(match, 0.0) / math.sqrt(config.index_head_dim) * float(w)
    return total


def choice(
    attn: Attention, config: DeepseekV41Config, x: Tensor, position: int, keys: list[Tensor], within: set[int] | None
) -> tuple[set[int], set[int] | None]:
    """Rows that one token chooses, and the candidates after it."""
    seen = range((position + 1) // attn.role.ratio)
    scores = {j: index_score(attn, config, x, position, keys[j]) for j in seen}
    allowed = [j for j in seen if within is None or j in within]
    chosen = set(sorted(allowed, key=lambda j: (-scores[j], j))[: config.index_topk])
    if not attn.role.makes_candidates or not scores:
        return chosen, set() if attn.role.makes_candidates else within
    size = config.candidate_block_size
    peaks: dict[int, float] = {}
    for j in seen:
        peaks[j // size] = max(peaks.get(j // size, -math.inf), scores[j])
    peaks[(len(seen) - 1) // size] = math.inf
    kept = sorted(peaks, key=lambda b: (-peaks[b], b))[: config.candidate_topk_blocks]
    return chosen, {j for j in seen if j // size in kept}


def attention(
    attn: Attention, config: DeepseekV41Config, x: Tensor, shared: Global | None
) -> tuple[Tensor, Global | None]:
    """The sublayer's output [T, hidden] of one sequence x [T, hidden] and what later layers read."""
    length = x.shape[0]
    if attn.compressor is not None:
        made = [row(attn, x, n) for n in range(length // attn.role.ratio)]
        shared = Global([r for r, _ in made], [k for _, k in made], [], None)
    if attn.indexer is not None:
        assert shared is not None
        within = shared.candidates
        picks = [
            choice(attn, config, x[p], p, shared.keys, None if within is None else within[p]) for p in range(length)
        ]
        candidates = [c for _, c in picks if c is not None]
        shared = Global(shared.rows, shared.keys, [c for c, _ in picks], candidates or None)
    window = [
        turned(norm(attn.wkv.weight @ t, attn.kv_norm.weight), p, attn.rotary.frequencies) for p, t in enumerate(x)
    ]
    lines = []
    for p in range(length):
        latents = window[max(0, p - config.sliding_window + 1) : p + 1]
        if shared is not None and attn.role.ratio > 0:
            latents = latents + [shared.rows[j] for j in sorted(shared.chosen[p])]
        lines.append(_one(attn, config, x[p], p, latents))
    return torch.stack(lines), shared


def _one(attn: Attention, config: DeepseekV41Config, x: Tensor, position: int, latents: list[Tensor]) -> Tensor:
    low = norm(attn.wq_a.weight @ x, attn.q_norm.weight)
    heads = (attn.wq_b.weight @ low).view(config.num_attention_heads, config.head_dim)
    outs = []
    for head, sink in zip(heads, attn.attn_sink):
        q = turned(head, position, attn.rotary.frequencies)
        powers = [math.exp(float(q @ k) / math.sqrt(config.head_dim)) for k in latents]
        whole = sum(powers) + math.exp(float(sink))
        out = sum(w / whole * k for w, k in zip(powers, latents))
        outs.append(turned(out, position, attn.rotary.frequencies, sign=-1))  # type: ignore[arg-type]
    share = config.num_attention_heads // config.o_groups
    parts = []
    for g in range(config.o_groups):
        group = torch.cat(outs[g * share : (g + 1) * share])
        parts.append(attn.wo_a.weight[g * config.o_lora_rank : (g + 1) * config.o_lora_rank] @ group)
    return attn.wo_b.weight @ torch.cat(parts)
