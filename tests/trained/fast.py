"""What both training forwards are made of.

Everything has a fixed shape and stays on the device, so that a whole training step can be recorded as one CUDA graph.
Experts are dense: each sees every token and unchosen ones get weight 0, which at these widths (16 experts of width 64)
costs two matrix products a layer and needs no sorting, padding or counting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STRAY = 0.5
"""How far an expert's load may be from the mean, in parts of it, before its bias moves: some skew is wanted."""


class Angles(NamedTuple):
    """cos and sin, fp32 [T, w / 2], of one rotary table."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(frequencies: list[float], count: int, device: torch.device) -> Angles:
        """For positions 0 .. count - 1."""
        turns = torch.arange(count, dtype=torch.float32).unsqueeze(1) * torch.tensor(frequencies)
        return Angles(turns.cos().to(device), turns.sin().to(device))

    def at(self, places: Tensor | slice) -> Angles:
        """The rows of some positions."""
        return Angles(self.cos[places], self.sin[places])


def turn(x: Tensor, angles: Angles, back: bool = False) -> Tensor:
    """The last channels of x [..., T, D] turned in adjacent pairs; `back` turns the other way."""
    width = 2 * angles.cos.shape[-1]
    still, turned = x[..., :-width], x[..., -width:].float()
    cos, sin = angles.cos, -angles.sin if back else angles.sin
    even, odd = turned[..., 0::2], turned[..., 1::2]
    pairs = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return torch.cat((still, pairs.flatten(-2).type_as(x)), dim=-1)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm, computed in fp32."""
    high = x.float()
    return (high * torch.rsqrt(high.square().mean(-1, keepdim=True) + eps) * weight).type_as(x)


def attend(queries: Tensor, keys: Tensor, visible: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Heads [B, H, T, D] over keys [B, N, D], which are the values too; `sink` [H] joins the softmax alone.

    visible: bool [T, N] or [B, T, N]. Returns the result [B, H, T, D] and the shares [B, H, T, N].

    The sink is one more key that only an extra channel of the queries meets, so that one product makes all scores. Rows
    and channels are padded to multiples of 8, which matrix units want.
    """
    (batch, count, width), (heads, length) = keys.shape, queries.shape[1:3]
    more = 8 + -count % 8
    keys = F.pad(keys, (0, 0, 0, more))
    mark = (torch.arange(count + more, device=keys.device) == count).type_as(keys)
    extra = sink.type_as(queries).view(1, heads, 1, 1).expand(batch, -1, length, 1)
    left = torch.cat((queries * width**-0.5, F.pad(extra, (0, 7))), dim=-1).flatten(1, 2)
    right = torch.cat((keys, F.pad(mark.unsqueeze(1), (0, 7)).expand(batch, -1, -1)), dim=-1)
    seen = F.pad(F.pad(visible, (0, 1), value=True), (0, more - 1), value=False)
    with torch.autocast(queries.device.type, enabled=False):
        scores = (left @ right.transpose(1, 2)).unflatten(1, (heads, length))
        shares = scores.masked_fill(~(seen if seen.ndim == 2 else seen.unsqueeze(1)), float("-inf")).softmax(-1)
        out = shares.flatten(1, 2) @ keys
    return out.unflatten(1, (heads, length)), shares[..., :count]


def experts(x: Tensor, up: Tensor, down: Tensor, share: Tensor, limit: float | None) -> Tensor:
    """Sum over experts of x [N, D] by share [N, E]: up [E, 2I, D] gate rows first, down [E, D, I]; fp32 or as `x`."""
    count, width = down.shape[0], down.shape[2]
    both = F.linear(x, up.flatten(0, 1)).unflatten(-1, (count, 2, width))
    gate, value = both[..., 0, :], both[..., 1, :]
    if limit is not None:
        gate, value = gate.clamp(max=limit), value.clamp(-limit, limit)
    inner = F.silu(gate) * value * share.type_as(both).unsqueeze(-1)
    return F.linear(inner.flatten(1), down.transpose(0, 1).flatten(1))


def spread(ids: Tensor, weights: Tensor, count: int) -> Tensor:
    """Shares [N, count] of chosen ids i64 [N, k] with their weights; 0 elsewhere."""
    return torch.zeros(ids.shape[0], count, device=ids.device, dtype=weights.dtype).scatter(1, ids, weights)


def load_of(ids: Tensor, count: int) -> Tensor:
    """Tokens each expert got, fp32 [count], of ids [N, k]."""
    return torch.zeros(count, device=ids.device).scatter_add(0, ids.flatten(), torch.ones_like(ids.flatten()).float())


@torch.no_grad()
def move_bias(bias: Tensor, load: Tensor, step: float) -> None:
    """Loss-free balancing with a dead band: `bias` rises where `load` is more than STRAY below the mean, else falls."""
    off = load / load.mean() - 1
    bias -= step * off.sign() * (off.abs() > STRAY)


def cross_entropy(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean nats a token of hidden [B, T, D] through the head."""
    return F.cross_entropy(head(hidden).flatten(0, -2).float(), targets.flatten())
