"""A decoder written in plain PyTorch, as people write them: no model class of a library, nothing made for capture.

Odd on purpose: 6 heads over 2 key heads, 5 experts, width 44, vocabulary 307, a complex rotary table sliced to the
length, a mask built in the attention, tied embeddings. Two ways to write the experts: a loop over modules in which
every expert sees every token, and an einsum over stacked weights with a one-hot combination.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 307


class Norm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """x [B, T, H, D] turned by the complex table [T, D / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pairs * table.view(1, table.shape[0], 1, table.shape[1]))
    return turned.flatten(-2).type_as(x)


class Attention(nn.Module):
    """Grouped causal attention, spelled out."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.wq = nn.Linear(width, heads * head_dim, bias=False)
        self.wk = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(heads * head_dim, width, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = rotate(self.wq(x).view(batch, length, self.heads, self.head_dim), table)
        k = rotate(self.wk(x).view(batch, length, self.kv_heads, self.head_dim), table)
        v = self.wv(x).view(batch, length, self.kv_heads, self.head_dim)
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=2).transpose(1, 2)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=2).transpose(1, 2)
        scores = q.transpose(1, 2) @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        visible = torch.tril(torch.ones(length, length, dtype=torch.bool, device=x.device))
        scores = scores.masked_fill(~visible, float("-inf"))
        out = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class Expert(nn.Module):
    """silu(w1 x) * w3 x, then w2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, inner, bias=False)
        self.w2 = nn.Linear(inner, width, bias=False)
        self.w3 = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LoopExperts(nn.Module):
    """Every expert sees every token; the weight of an expert that was not chosen is 0."""

    def __init__(self, width: int, inner: int, count: int, chosen: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(count))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, ids = F.softmax(self.gate(flat), dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            share = (weights * (ids == i)).sum(-1, keepdim=True)
            out = out + share * expert(flat)
        return out.view_as(x)


class EinsumExperts(nn.Module):
    """The experts as stacked weights, combined with a one-hot matrix."""

    def __init__(self, width: int, inner: int, count: int, chosen: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count, bias=False)
        self.w1 = nn.Parameter(torch.randn(count, inner, width) / math.sqrt(width))
        self.w3 = nn.Parameter(torch.randn(count, inner, width) / math.sqrt(width))
        self.w2 = nn.Parameter(torch.randn(count, width, inner) / math.sqrt(inner))
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.gate(x).softmax(-1).topk(self.chosen, dim=-1)
        combine = torch.einsum("btk,btke->bte", weights, F.one_hot(ids, self.w1.shape[0]).to(x.dtype))
        gate = torch.einsum("bth,eih->btei", x, self.w1)
        up = torch.einsum("bth,eih->btei", x, self.w3)
        out = torch.einsum("btei,ehi->bteh", F.silu(gate) * up, self.w2)
        return torch.einsum("bteh,bte->bth", out, combine)


class Layer(nn.Module):
    """Pre-norm attention and experts with residuals."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, experts: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(width), Norm(width)
        self.attention = Attention(width, heads, kv_heads, head_dim)
        self.ffn = experts

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.ffn(self.ffn_norm(x))


class PlainDecoder(nn.Module):
    """input_ids [B, T] -> logits [B, T, VOCAB]."""

    freqs_cis: Tensor

    def __init__(self, experts: str = "loop", layers: int = 3, width: int = 44, context: int = 256) -> None:
        super().__init__()
        form = {"loop": LoopExperts, "einsum": EinsumExperts}[experts]
        heads, kv_heads, head_dim = 6, 2, 12
        self.embedding = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, kv_heads, head_dim, form(width, 28, 5, 2)) for _ in range(layers)
        )
        self.norm = Norm(width)
        self.output = nn.Linear(width, VOCAB, bias=False)
        self.output.weight = self.embedding.weight
        angle = torch.outer(torch.arange(context).float(), 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim))
        self.register_buffer("freqs_cis", torch.polar(torch.ones_like(angle), angle), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        table = self.freqs_cis[: input_ids.shape[1]]
        for layer in self.layers:
            x = layer(x, table)
        return self.output(self.norm(x))


def make_plain(experts: str = "loop", seed: int = 0, **sizes: int) -> PlainDecoder:
    """A random plain decoder in eval mode. experts: "loop" or "einsum"."""
    torch.manual_seed(seed)
    return PlainDecoder(experts, **sizes).eval()
