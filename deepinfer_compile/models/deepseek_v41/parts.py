"""What every layer is made of: the norm, the rotation of the last channels, the mixing of residual streams.

Arithmetic that the published model keeps in fp32 runs through `wide`, so that a model in fp64 is fp64 throughout and
can be the oracle of one in fp32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config, Yarn


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is in fp64."""
    return x if x.dtype == torch.float64 else x.float()


def rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares over the last axis + eps), that axis kept."""
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, computed wide, returned in x's dtype."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        high = wide(x)
        return (high * rms(high, self.eps) * self.weight).type_as(x)


class Rotary:
    """Angles for the rotated channels of one layer kind: `base` alone, or stretched when `yarn` is given.

    Layers that read global rows rotate everything (queries, window keys, rows, index keys) with the stretched table;
    layers with a window alone use the short one. The stretching does not scale the attention scores.
    """

    def __init__(self, width: int, base: float, yarn: Yarn | None) -> None:
        self.width = width
        plain = [base ** (-2 * i / width) for i in range(width // 2)]
        self.frequencies = plain if yarn is None else _stretched(plain, base, yarn)

    @staticmethod
    def of(config: DeepseekV41Config, ratio: int) -> Rotary:
        """The table of a layer of this compression ratio."""
        if ratio == 0:
            return Rotary(config.qk_rope_head_dim, config.rope_theta, None)
        return Rotary(config.qk_rope_head_dim, config.compress_rope_theta, config.yarn)

    def __call__(self, x: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
        """The last channels of x [B, T, H, D] turned in adjacent pairs by positions [B, T]; `inverse` turns back."""
        dtype = wide(x).dtype
        frequencies = torch.tensor(self.frequencies, dtype=dtype, device=x.device)
        angles = (positions.to(dtype).unsqueeze(-1) * frequencies).unsqueeze(2)
        cos, sin = angles.cos(), -angles.sin() if inverse else angles.sin()
        still, turned = x[..., : -self.width], wide(x[..., -self.width :])
        even, odd = turned[..., 0::2], turned[..., 1::2]
        pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        return torch.cat((still, pairs.flatten(-2).type_as(x)), dim=-1)

    def row(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same for rows without a head axis, x [B, T, D]."""
        return self(x.unsqueeze(2), positions).squeeze(2)


def _stretched(plain: list[float], base: float, yarn: Yarn) -> list[float]:
    width = 2 * len(plain)

    def channel(turns: float) -> float:
        return width * math.log(yarn.original / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(channel(yarn.fast)), 0)
    high = min(math.ceil(channel(yarn.slow)), width - 1)
    slow = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(len(plain))]
    return [f * (1 - s) + f / yarn.factor * s for f, s in zip(plain, slow)]


class StreamMixer:
    """How a sublayer enters and leaves the K residual streams [B, T, K, D].

    `fn` [2K + KK, K * D], `base` [2K + KK] and `scale` [3] give, per token, from the streams normalised together: `pre`
    [K], `post` [K] and a doubly stochastic `comb` [K, K]. The three groups of outputs lie in that order, `comb` by
    rows; each is scaled by its entry of `scale` before `base` is added. The three are parameters of the layer.
    """

    def __init__(self, config: DeepseekV41Config) -> None:
        self.streams = config.hc_mult
        self.rounds = config.hc_sinkhorn_iters
        self.eps, self.norm_eps = config.hc_eps, config.rms_norm_eps

    def __call__(self, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre, post [B, T, K] and comb [B, T, K, K], wide."""
        k = self.streams
        flat = wide(streams.flatten(2))
        mixes = (flat * rms(flat, self.norm_eps)) @ wide(fn).t()
        pre, post, comb = mixes.split((k, k, k * k), dim=-1)
        base_pre, base_post, base_comb = base.split((k, k, k * k))
        pre = torch.sigmoid(pre * scale[0] + base_pre) + self.eps
        post = 2 * torch.sigmoid(post * scale[1] + base_post)
        comb = (comb * scale[2] + base_comb).unflatten(-1, (k, k))
        return pre, post, self._balanced(comb.softmax(-1) + self.eps)

    def _balanced(self, comb: Tensor) -> Tensor:
        comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.rounds - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + self.eps)
            comb = comb / (comb.sum(-2, keepdim=True) + self.eps)
        return comb


def collapse(streams: Tensor, pre: Tensor) -> Tensor:
    """The input of a sublayer: streams [B, T, K, D] weighted by pre [B, T, K]."""
    return (wide(streams) * pre.unsqueeze(-1)).sum(2).type_as(streams)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The streams after a sublayer returned y [B, T, D]: new[k] = post[k] * y + sum over j of comb[j, k] * old[j]."""
    old = torch.einsum("btjk,btjd->btkd", comb, wide(streams))
    return (post.unsqueeze(-1) * wide(y).unsqueeze(2) + old).type_as(streams)
