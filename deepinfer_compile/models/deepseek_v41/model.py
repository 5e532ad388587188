"""The whole sequence at once: ids to logits, and what caches and drafts are filled from.

Layers hand on two values, the residual streams and the weights by which the next sublayer reads them: a sublayer is
fed through the weights that the one before it computed, the first through stream 0 alone, the final collapse through
those of the last. Streams start as copies of the embedding. Tensor names are the published checkpoint's, except that a
layer's experts are two tensors (`moe.Experts`) and drafts lie in one module (`draft.Drafter`); `checkpoint` maps them.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41.attention import Made, Past, Shared
from deepinfer_compile.models.deepseek_v41.block import Block, first_streams
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.draft import Drafter
from deepinfer_compile.models.deepseek_v41.engram import look_back
from deepinfer_compile.models.deepseek_v41.layers import layer_map
from deepinfer_compile.models.deepseek_v41.parts import RMSNorm, collapse, wide
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, Forms, check_widths


class Run(NamedTuple):
    """Of a whole sequence: `hidden` [B, T, D] before the head, what each layer made, and the drafter's `features`."""

    hidden: Tensor
    made: tuple[Made, ...]
    features: Tensor


class DeepseekV41(nn.Module):
    """The text model. `token_map` i64 [vocab]: ids of the normalised vocabulary, see `engram.normalised_map`.

    `forms`: how caches hold their rows; `storage.PUBLISHED` rounds as the released model does. Raises BadModelConfig if
    the map has another length than the vocabulary, layers contradict each other, or rows do not fit their form.
    """

    token_map: Tensor

    def __init__(self, config: DeepseekV41Config, token_map: Tensor, forms: Forms = PLAIN) -> None:
        super().__init__()
        if token_map.shape != (config.vocab_size,):
            reason = f"the token map has {tuple(token_map.shape)} entries"
            raise BadModelConfig(key="vocab_size", value=config.vocab_size, reason=reason)
        check_widths(config, forms)
        self.config = config
        self.register_buffer("token_map", token_map, persistent=False)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        experts, top = config.n_routed_experts, config.num_experts_per_tok
        self.layers = nn.ModuleList([Block(config, role, experts, top, forms) for role in layer_map(config)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp = Drafter(config, forms) if config.num_nextn_predict_layers else None

    @property
    def blocks(self) -> list[Block]:
        """The layers, typed."""
        return cast(list[Block], list(self.layers))

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Logits [B, T, V], wide, of ids i64 [B, T] at positions i64 [B, T], consecutive from 0 (the default)."""
        return self.logits(self._through(input_ids, position_ids)[0])

    def run(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        recent: Tensor | None = None,
        pasts: tuple[Past, ...] | None = None,
    ) -> Run:
        """The layers over a whole sequence.

        Or over tokens that follow others: `recent` i64 [B, n - 1] normalised ids and each layer's caches of these.
        """
        hidden, made, entering = self._through(input_ids, position_ids, recent, pasts)
        features = [s.mean(2) for i, s in enumerate(entering) if i in self.config.dspark_target_layer_ids]
        return Run(hidden, made, joined(features, entering[-1]))

    def _through(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None,
        recent: Tensor | None = None,
        pasts: tuple[Past, ...] | None = None,
    ) -> tuple[Tensor, tuple[Made, ...], list[Tensor]]:
        """The collapsed streams [B, T, D], what each layer made, and the streams that enter each."""
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        before = self.no_history(input_ids) if recent is None else recent
        grams = look_back(self.token_map[input_ids], before)
        streams, pre = first_streams(self.embed(input_ids), self.config.hc_mult)
        shared: Shared | None = None
        made, entering = [], []
        for i, layer in enumerate(self.blocks):
            entering.append(streams)
            past = None if pasts is None else pasts[i]
            streams, pre, shared, kept = layer(streams, pre, position_ids, grams, shared, past)
            made.append(kept)
        return collapse(streams, pre), tuple(made), entering

    def logits(self, hidden: Tensor) -> Tensor:
        """Of the collapsed streams [..., D], wide."""
        return wide(self.head(self.norm(hidden)))

    def no_history(self, ids: Tensor) -> Tensor:
        """Normalised ids [B, n - 1] that stand before the start of a sequence: padding."""
        pad = self.token_map[self.config.engram_pad_id]
        return pad.expand(ids.shape[0], self.config.engram_max_ngram_size - 1)


def joined(features: list[Tensor], streams: Tensor) -> Tensor:
    """Features side by side; of width 0 where no layer gives any."""
    return torch.cat(features, dim=-1) if features else streams.new_empty(*streams.shape[:2], 0)
