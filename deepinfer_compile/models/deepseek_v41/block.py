"""One layer: memory, attention and experts, each entering and leaving the residual streams by its own mix.

The weights `pre` that a sublayer is read through come from the sublayer before it, so a layer is a function of
(streams, pre) and returns both; what it reads of source layers and its caches are further explicit values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.attention import Attention, Made, Past, Shared
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import Engram
from deepinfer_compile.models.deepseek_v41.layers import Role
from deepinfer_compile.models.deepseek_v41.moe import MoE
from deepinfer_compile.models.deepseek_v41.parts import RMSNorm, StreamMixer, collapse, expand
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, Forms


def first_streams(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Streams [B, T, K, D], copies of x [B, T, D], and the weights [B, T, K] that read stream 0 alone."""
    streams = x.unsqueeze(2).expand(-1, -1, count, -1)
    one = torch.arange(count, device=x.device) == 0
    return streams, one.to(x.dtype).expand(streams.shape[:3])


class Block(nn.Module):
    """A layer of the role given, with `experts` routed experts of which `top` are used."""

    def __init__(self, config: DeepseekV41Config, role: Role, experts: int, top: int, forms: Forms = PLAIN) -> None:
        super().__init__()
        self.mixer = StreamMixer(config)
        outputs, inputs = config.hc_mult * (2 + config.hc_mult), config.hc_mult * config.hidden_size
        self.engram = Engram(config, role.index) if role.engram else None
        self.attn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn = Attention(config, role, forms)
        self.ffn_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.ffn = MoE(config, experts, top)
        self.hc_attn_fn = nn.Parameter(torch.empty(outputs, inputs))
        self.hc_attn_base = nn.Parameter(torch.zeros(outputs))
        self.hc_attn_scale = nn.Parameter(torch.ones(3))
        self.hc_ffn_fn = nn.Parameter(torch.empty(outputs, inputs))
        self.hc_ffn_base = nn.Parameter(torch.zeros(outputs))
        self.hc_ffn_scale = nn.Parameter(torch.ones(3))

    def forward(
        self,
        streams: Tensor,
        pre: Tensor,
        positions: Tensor,
        grams: Tensor,
        shared: Shared | None,
        past: Past | None = None,
    ) -> tuple[Tensor, Tensor, Shared | None, Made]:
        """The whole sequence: new streams and pre, what later layers read, what caches are filled from.

        With `past`, tokens that follow those in this layer's caches.
        """
        streams = self._remember(streams, grams)
        after, post, comb = self._attention_mix(streams)
        y, shared, made = self.attn(self.attn_norm(collapse(streams, pre)), positions, shared, past)
        streams, pre = self._feed(expand(streams, y, post, comb), after)
        return streams, pre, shared, made

    def step(
        self, streams: Tensor, pre: Tensor, positions: Tensor, grams: Tensor, shared: Shared | None, past: Past
    ) -> tuple[Tensor, Tensor, Shared | None, Past]:
        """One token: the same with this layer's caches in place of the tokens before."""
        streams = self._remember(streams, grams)
        after, post, comb = self._attention_mix(streams)
        y, shared, past = self.attn.step(self.attn_norm(collapse(streams, pre)), positions, shared, past)
        streams, pre = self._feed(expand(streams, y, post, comb), after)
        return streams, pre, shared, past

    def draft(self, streams: Tensor, pre: Tensor, positions: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """A block of drafted tokens, which see one another and the ring `context` [B, W, D] of tokens before them."""
        after, post, comb = self._attention_mix(streams)
        y = self.attn.draft(self.attn_norm(collapse(streams, pre)), positions, context)
        return self._feed(expand(streams, y, post, comb), after)

    def _remember(self, streams: Tensor, grams: Tensor) -> Tensor:
        return streams if self.engram is None else self.engram(streams, grams)

    def _attention_mix(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.mixer(streams, self.hc_attn_fn, self.hc_attn_base, self.hc_attn_scale)

    def _feed(self, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        after, post, comb = self.mixer(streams, self.hc_ffn_fn, self.hc_ffn_base, self.hc_ffn_scale)
        y = self.ffn(self.ffn_norm(collapse(streams, pre)))
        return expand(streams, y, post, comb), after
