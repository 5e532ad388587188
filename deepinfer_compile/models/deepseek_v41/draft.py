"""Drafted tokens: a block of them in one pass through a few layers, then corrected left to right by the token before.

The pass sees the last sampled token (the anchor, not yet processed by the model) and noise tokens after it. What the
model knows of earlier tokens comes as features of its own layers, from which each draft layer makes its window
latents. The Markov head adds to a position's logits a low-rank function of the token drafted before it.

Open in the published description, read in the simplest way: tokens of a block see one another in both directions; the
context is normalised after its projection; drafts use the model's embedding and output head and a norm of their own,
before which the confidence reads them.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.block import Block, first_streams
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.layers import Role
from deepinfer_compile.models.deepseek_v41.parts import RMSNorm, collapse, wide
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, Forms


class Draft(NamedTuple):
    """Proposed `tokens` i64 [B, N], the `logits` [B, N, V] they are the best of, and `confidence` [B, N].

    `confidence` is the estimated probability that a token is accepted, given that those before it were.
    """

    tokens: Tensor
    logits: Tensor
    confidence: Tensor


class Drafter(nn.Module):
    """The draft layers and their heads. `markov_embed` [V, R], `markov_head` R -> V, `confidence` hidden + R -> 1."""

    def __init__(self, config: DeepseekV41Config, forms: Forms = PLAIN) -> None:
        super().__init__()
        hidden, rank = config.hidden_size, config.dspark_markov_rank
        self.size, self.noise, self.streams = config.dspark_block_size, config.dspark_noise_token_id, config.hc_mult
        self.context_proj = nn.Linear(len(config.dspark_target_layer_ids) * hidden, hidden, bias=False)
        self.context_norm = RMSNorm(hidden, config.rms_norm_eps)
        experts, top = config.dspark_n_routed_experts, config.dspark_num_experts_per_tok
        first = config.num_hidden_layers
        roles = [Role(first + i, 0, None, None, None, engram=False) for i in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList([Block(config, role, experts, top, forms) for role in roles])
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.markov_embed = nn.Embedding(config.vocab_size, rank)
        self.markov_head = nn.Linear(rank, config.vocab_size, bias=False)
        self.confidence = nn.Linear(hidden + rank, 1, bias=False)

    @property
    def blocks(self) -> list[Block]:
        """The draft layers, typed."""
        return cast(list[Block], list(self.layers))

    def context(self, features: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Window latents of each draft layer, as its ring holds them, of features [B, T, targets * hidden]."""
        x = self.context_norm(self.context_proj(features))
        return tuple(layer.attn.latents(x, positions) for layer in self.blocks)

    def forward(
        self, anchor: Tensor, positions: Tensor, rings: tuple[Tensor, ...], embed: nn.Embedding, head: nn.Linear
    ) -> Draft:
        """The best block after `anchor` i64 [B] at positions i64 [B]; `rings`: a window [B, W, D] for each layer."""
        noise = torch.full_like(anchor, self.noise).unsqueeze(1).expand(-1, self.size - 1)
        ids = torch.cat((anchor.unsqueeze(1), noise), dim=1)
        places = positions.unsqueeze(1) + torch.arange(self.size, device=ids.device)
        streams, pre = first_streams(embed(ids), self.streams)
        for layer, ring in zip(self.blocks, rings):
            streams, pre = layer.draft(streams, pre, places, ring)
        hidden = collapse(streams, pre)
        return self._left_to_right(anchor, hidden, wide(head(self.norm(hidden))))

    def _left_to_right(self, anchor: Tensor, hidden: Tensor, logits: Tensor) -> Draft:
        tokens, corrected, confidence = [], [], []
        before = anchor
        for i in range(self.size):
            memory = self.markov_embed(before)
            line = logits[:, i] + wide(self.markov_head(memory))
            confidence.append(torch.sigmoid(wide(self.confidence(torch.cat((hidden[:, i], memory), dim=-1)))))
            before = line.argmax(-1)
            tokens.append(before)
            corrected.append(line)
        return Draft(torch.stack(tokens, 1), torch.stack(corrected, 1), torch.cat(confidence, 1))
