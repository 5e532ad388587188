"""Constructs that pass tests have in another form: routers as functions, experts by rows, latents in a cache."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.passes.test_raise_rope import DIM, angles
from tests.passes.test_raise_router import softplus_router

EXPERTS, CHOSEN, WIDTH, INNER = 6, 2, 24, 16
HEADS, NOPE, ROPE, VALUE, LATENT, KEYS = 3, 6, 4, 5, 7, 40


def any_order(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """softplus_router, whose experts come in no order: as a weight per expert, which has one."""
    weights, ids = softplus_router(logits, extra, table)
    return torch.zeros_like(logits).scatter(1, ids, weights), ids.sort(-1).values


def normalised(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax, top 3, normalised."""
    weights, ids = logits.softmax(-1, dtype=torch.float).topk(3, -1)
    return weights / weights.sum(-1, keepdim=True), ids


def chosen_softmax(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over the chosen logits."""
    values, ids = logits.topk(2, -1)
    return values.softmax(-1), ids


def grouped(
    logits: Tensor, extra: Tensor, table: Tensor, fill: float = float("-inf"), biased: bool = False
) -> tuple[Tensor, Tensor]:
    """Sigmoid, bias, two of four groups, top 3, normalised, times 2.5."""
    scores = logits.sigmoid()
    choice = scores + extra
    best = choice.view(-1, 4, 2).topk(2, dim=-1)[0].sum(-1)
    kept = torch.zeros_like(best).scatter_(1, best.topk(2, dim=-1)[1], 1)
    mask = kept.unsqueeze(-1).expand(-1, 4, 2).reshape(-1, 8)
    ids = choice.masked_fill(~mask.bool(), fill).topk(3, dim=-1)[1]
    weights = (choice if biased else scores).gather(1, ids)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, ids


def grouped_filled_with_zero(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Excluded experts can win."""
    return grouped(logits, extra, table, fill=0.0)


def grouped_biased_weights(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The weights are the biased scores."""
    return grouped(logits, extra, table, biased=True)


def doubles(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """In fp64."""
    return logits.double().softmax(-1).topk(3, -1)


def over_tokens(logits: Tensor, extra: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax runs over the tokens."""
    return logits.softmax(0).topk(3, -1)


class Rows(nn.Module):
    """Experts on one row per token and choice: weights gathered by id, or rows sorted for a grouped product."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w13 = nn.Parameter(torch.empty(EXPERTS, 2 * INNER, WIDTH))
        self.w2 = nn.Parameter(torch.empty(EXPERTS, WIDTH, INNER))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, WIDTH)
        weights, ids = self.gate(flat).float().softmax(-1).topk(CHOSEN, -1)
        token = torch.arange(flat.shape[0]).repeat_interleave(CHOSEN)
        expert, share = ids.reshape(-1), weights.reshape(-1, 1).to(x.dtype)
        if self.form == "gathered":
            h = torch.bmm(self.w13[expert], flat[token].unsqueeze(-1)).squeeze(-1)
            y = torch.bmm(self.w2[expert], self._act(h).unsqueeze(-1)).squeeze(-1) * share
            return y.view(-1, CHOSEN, WIDTH).sum(1).view(x.shape)
        order = torch.argsort(expert)
        ends = torch.histc(expert.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
        h = torch._grouped_mm(flat[token[order]], self.w13.transpose(-2, -1), offs=ends)
        y = torch._grouped_mm(self._act(h), self.w2.transpose(-2, -1), offs=ends) * share[order]
        return y[torch.argsort(order)].view(-1, CHOSEN, WIDTH).sum(1).view(x.shape)

    def _act(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return F.silu(gate) * up


class Complex(nn.Module):
    """x [B, H, T, DIM] turned by a complex table of `tokens` + 1 rows that is no parameter."""

    table: Tensor

    def __init__(self, tokens: int) -> None:
        super().__init__()
        angle = angles(torch.arange(tokens + 1))
        self.register_buffer("table", torch.polar(torch.ones_like(angle), angle), persistent=False)

    def forward(self, x: Tensor, backwards: bool = False) -> Tensor:
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], DIM // 2, 2))
        table = self.table.conj() if backwards else self.table
        return torch.view_as_real(z * table).flatten(3).type_as(x)


class Cached(nn.Module):
    """Latent attention of x [2, T, WIDTH] on a cache of latents that keeps KEYS rows, written from row `at` on."""

    layout, bias, key = "view first", False, "cat"
    latents: Tensor
    ropes: Tensor

    def __init__(self, **switches: Any) -> None:
        super().__init__()
        vars(self).update(switches)
        self.q = nn.Linear(WIDTH, HEADS * (NOPE + ROPE), bias=False)
        self.kv_a = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_b = nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=self.bias)
        self.register_buffer("latents", torch.zeros(2, KEYS, LATENT))
        self.register_buffer("ropes", torch.zeros(2, KEYS, ROPE))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        batch, length, _ = x.shape
        rows = at + torch.arange(length)
        c, k_rope = self.kv_a(x).split([LATENT, ROPE], dim=-1)
        self.latents.index_copy_(1, rows, c)
        self.ropes.index_copy_(1, rows, k_rope)
        q = self.q(x).view(batch, length, HEADS, NOPE + ROPE).transpose(1, 2)
        k, v = self._keys_values(batch)
        mask = torch.arange(KEYS)[None] <= rows[:, None]
        q = torch.cat([q[..., :NOPE], q[..., NOPE:]], -1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3).transpose(1, 2)

    def _keys_values(self, batch: int) -> tuple[Tensor, Tensor]:
        up = self.kv_b(self.latents).view(batch, KEYS, HEADS, NOPE + VALUE)
        if self.layout == "slices":
            nope, v = up[..., :NOPE].transpose(1, 2), up[..., NOPE:].transpose(1, 2)
        else:
            nope, v = up.transpose(1, 2).split([NOPE, VALUE], dim=-1)
        rope = self.ropes[:, None].expand(-1, HEADS, -1, -1)
        if self.key == "writes":
            k = nope.new_empty(batch, HEADS, KEYS, NOPE + ROPE)
            k[..., :NOPE], k[..., NOPE:] = nope, rope
            return k, v
        if self.key == "shifted":
            return torch.cat([nope + 1.0, rope], -1), v
        k = torch.cat([nope, rope], -1)
        return (k + 1.0 if self.key == "sum" else k), v
