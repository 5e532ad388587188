"""The drafter on top of a frozen model: many drafts of one sequence at once, and what it learns from them.

Every STRIDE tokens of a sequence start a draft. Its block sees the window before it, made of the model's features, and
itself. A drafted token is right if it is the model's most likely one, as far as the sequence itself followed the
model's most likely tokens up to there: this is what a greedy verification accepts, so text serves as well as the
model's own greedy continuations (`rollouts`).

The confidence head learns from continuations of texts that neither the model nor the drafter saw (`data`: tune),
and changes nothing but itself: its inputs are cut from the graph. Probability that a token is accepted, given that
those before it were: a slot counts if all before it were accepted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.models.deepseek_v41.block import Block, first_streams
from deepinfer_compile.models.deepseek_v41.draft import Drafter
from deepinfer_compile.models.deepseek_v41.generate import prefill, step
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.parts import collapse
from tests.trained.ced_forward import Notes, expand, feed, heads, latents, mix, project
from tests.trained.fast import Angles, attend, normed

STRIDE = 8
DECAY = 5.0
"""Slot i (from 0) weighs exp(-i / DECAY) in the drafter's loss."""


class Drafts(NamedTuple):
    """Of A drafts of N tokens a sequence: `logits` [B, A, N, V], confidence before the sigmoid `sure` [B, A, N]."""

    logits: Tensor
    sure: Tensor


class DraftTables:
    """Constants of one sequence length: angles of all positions, offsets of anchors and slots."""

    def __init__(self, drafter: Drafter, length: int, device: torch.device) -> None:
        self.length, self.size = length, drafter.size
        self.window = drafter.blocks[0].attn.window
        self.angles = Angles.of(drafter.blocks[0].attn.rotary.frequencies, length, device)
        count = (length - drafter.size - STRIDE) // STRIDE
        self.anchors = 1 + STRIDE * torch.arange(count, device=device)
        self.slots = torch.arange(drafter.size, device=device)
        self.places = torch.arange(length, device=device)

    def sight(self, at: Tensor) -> Tensor:
        """What each slot sees, bool [A * N, T + A * N]: its window before the anchor, then its own draft's slots."""
        here = (at.unsqueeze(1) + self.slots).flatten().unsqueeze(1)
        anchor = at.unsqueeze(1).expand(-1, self.size).flatten().unsqueeze(1)
        before = (self.places < anchor) & (here - self.places < self.window)
        own = torch.arange(len(here), device=at.device).div(self.size, rounding_mode="floor")
        return torch.cat((before, own.unsqueeze(1) == own), dim=1)


def drafts(model: DeepseekV41, ids: Tensor, features: Tensor, at: Tensor, tables: DraftTables) -> tuple[Drafts, Notes]:
    """Drafts after the anchors ids[:, at] of ids i64 [B, T] with features [B, T, F]; at i64 [A], at + N < T.

    Slot i's Markov head sees the sequence's own token before it, which is the drafted one as long as drafts are right.
    """
    drafter = model.mtp
    assert drafter is not None
    flat = (at.unsqueeze(1) + tables.slots).flatten()
    here, sight = tables.angles.at(flat), tables.sight(at)
    context = normed(drafter.context_proj(features), drafter.context_norm.weight, drafter.context_norm.eps)
    first = ids[:, flat].masked_fill(tables.slots.repeat(len(at)) > 0, drafter.noise)
    streams, pre = first_streams(model.embed(first), drafter.streams)
    notes = Notes([], {})
    for i, layer in enumerate(drafter.blocks):
        past = latents(layer.attn, context, tables.angles)
        streams, pre = _block(layer, streams, pre, here, past, sight, f"mtp.layers.{i}", notes)
    hidden = collapse(streams, pre)
    memory = drafter.markov_embed(ids[:, flat])
    logits = (
        model.head(normed(hidden, drafter.norm.weight, drafter.norm.eps)).float() + drafter.markov_head(memory).float()
    )
    sure = drafter.confidence(torch.cat((hidden, memory.type_as(hidden)), dim=-1).detach()).squeeze(-1).float()
    return Drafts(logits.unflatten(1, (-1, tables.size)), sure.unflatten(1, (-1, tables.size))), notes


def _block(
    layer: Block, streams: Tensor, pre: Tensor, here: Angles, past: Tensor, sight: Tensor, name: str, notes: Notes
) -> tuple[Tensor, Tensor]:
    after, post, comb = mix(layer.mixer, streams, layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale)
    x = normed(collapse(streams, pre), layer.attn_norm.weight, layer.attn_norm.eps)
    _, queries = heads(layer.attn, x, here)
    line = torch.cat((past, latents(layer.attn, x, here)), dim=1)
    out, _ = attend(queries, line, sight, layer.attn.attn_sink)
    return feed(layer, expand(streams, project(layer.attn, out, here), post, comb), after, name, notes)


def losses(
    made: Drafts, ids: Tensor, likely: Tensor, at: Tensor, tables: DraftTables, judged: int, prompt: int
) -> Tensor:
    """[4]: the drafter's loss, the confidence's, tokens accepted a draft of the first sequences and of the others.

    `likely` i64 [B, T]: the model's most likely next tokens. The last `judged` sequences, after their `prompt` tokens,
    teach the confidence alone, the others the rest.
    """
    flat = (at.unsqueeze(1) + tables.slots).flatten()
    want = likely[:, flat].unflatten(1, (-1, tables.size))
    true = (want == ids[:, flat + 1].unflatten(1, (-1, tables.size))).float()
    follows = F.pad(true, (1, 0), value=1.0)[..., :-1].cumprod(-1)
    right = (made.logits.argmax(-1) == want).float()
    reached = F.pad(true * right, (1, 0), value=1.0)[..., :-1].cumprod(-1)
    nats = F.cross_entropy(made.logits.flatten(0, 2), want.flatten(), reduction="none").view_as(follows)
    weight = follows * torch.exp(-tables.slots / DECAY)
    doubt = F.binary_cross_entropy_with_logits(made.sure, right, reduction="none")
    learn, judge = slice(0, len(ids) - judged), slice(len(ids) - judged, None)
    accepted = (reached * right).sum(-1)
    counted = reached * (at >= prompt).unsqueeze(1)
    return torch.stack(
        (
            (nats * weight)[learn].sum() / weight[learn].sum(),
            (doubt * counted)[judge].sum() / counted[judge].sum().clamp(min=1.0),
            accepted[learn].mean(),
            accepted[judge].mean(),
        )
    )


@torch.no_grad()
def rollouts(model: DeepseekV41, prompts: Tensor, length: int) -> Tensor:
    """Prompts i64 [B, P] continued greedily to `length` tokens, in fp32, by the model's own cached steps."""
    logits, state = prefill(model, prompts, length)
    tokens = [logits.argmax(-1)]
    while prompts.shape[1] + len(tokens) < length:
        logits, state = step(model, tokens[-1], state)
        tokens.append(logits.argmax(-1))
    return torch.cat((prompts, torch.stack(tokens, dim=1)), dim=1)
