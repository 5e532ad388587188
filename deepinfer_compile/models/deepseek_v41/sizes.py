"""Parameter counts, derived from the modules on the meta device, so that they cannot drift from the definition.

A parameter is activated by a token if it multiplies one of that token's values: of routed experts the chosen share, of
the two vocabulary matrices only the head (the embedding is a lookup, as are the memory tables), and none of the drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import plain_map
from deepinfer_compile.models.deepseek_v41.layers import boundary
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters. `prefill`: activated by a prompt token that only fills caches; `decode`: by a new one."""

    backbone: int
    engram: int
    draft: int
    prefill: int
    decode: int


def sizes(config: DeepseekV41Config) -> Sizes:
    """The counts of a configuration; allocates nothing."""
    with torch.device("meta"):
        model = DeepseekV41(config, plain_map(config))
    counts = {name: p.numel() for name, p in model.named_parameters()}
    draft = sum(n for name, n in counts.items() if name.startswith("mtp."))
    tables = sum(n for name, n in counts.items() if name.endswith("engram.embed.weight"))
    active = {name: activated(config, name, n) for name, n in counts.items()}
    return Sizes(
        backbone=sum(counts.values()) - draft - tables,
        engram=tables,
        draft=draft,
        prefill=sum(n for name, n in active.items() if in_prefill(config, name)),
        decode=sum(active.values()),
    )


def activated(config: DeepseekV41Config, name: str, count: int) -> int:
    """How many of a tensor's parameters one token activates."""
    if name.startswith(("mtp.", "embed.")) or name.endswith("engram.embed.weight"):
        return 0
    if ".ffn.experts." in name:
        return count // config.n_routed_experts * config.num_experts_per_tok
    return count


def in_prefill(config: DeepseekV41Config, name: str) -> bool:
    """True for what every prompt token passes: layers before the boundary, and its global rows and keys."""
    if not name.startswith("layers."):
        return False
    layer, part = name.removeprefix("layers.").split(".", 1)
    edge = boundary(config)
    made = ("attn.compressor.", "attn.indexer.wk.", "attn.indexer.k_norm.", "attn_norm.", "hc_attn_")
    return int(layer) < edge or (int(layer) == edge and part.startswith(made))
