"""The whole-sequence forward of `deepinfer_compile.models.deepseek_v41`, in a form that trains fast.

The same function of the same parameters. What differs: global rows are compact (one slot a row, not one a token), a
choice is one top-k instead of two sorts, hashes of n-grams come in as ids, and positions start at 0 in every sequence.

The indexer learns from its own loss alone: the distribution its scores give over all visible rows is pulled towards
the one its layer's attention gives them, the mean over heads (a Kullback-Leibler divergence), and nothing of it flows
into the rest of the model. While `dense` is set, attention sees all visible rows, so that rows are worth choosing
before they are chosen. Only the first `taught` sequences of a batch are compared: it costs a second attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.models.deepseek_v41.attention import Attention, Compressor, Indexer
from deepinfer_compile.models.deepseek_v41.block import Block, first_streams
from deepinfer_compile.models.deepseek_v41.engram import Engram, look_back
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.moe import MoE
from deepinfer_compile.models.deepseek_v41.parts import Rotary, StreamMixer, collapse
from tests.trained.fast import Angles, attend, experts, load_of, normed, spread, turn


class Rows(NamedTuple):
    """What later layers read: `rows` [B, S, D], `keys` [B, S, Dk], `chosen`, `candidates` bool [B, T, S]."""

    rows: Tensor
    keys: Tensor
    chosen: Tensor | None = None
    candidates: Tensor | None = None


@dataclass
class Notes:
    """What a pass leaves beside its result: the indexers' losses, and tokens per expert by layer name."""

    index: list[Tensor]
    loads: dict[str, Tensor]


class Tables:
    """Constants of one sequence length: angles by ratio, the window, the rows visible to each token."""

    def __init__(self, model: DeepseekV41, length: int, device: torch.device) -> None:
        config = model.config
        ratios = {0, *config.compress_ratios}
        self.angles = {r: Angles.of(Rotary.of(config, r).frequencies, length, device) for r in ratios}
        places = torch.arange(length, device=device)
        age = places.unsqueeze(1) - places
        self.window = (age >= 0) & (age < config.sliding_window)
        self.visible = {
            r: torch.arange(length // r, device=device) < ((places + 1) // r).unsqueeze(1) for r in ratios if r
        }
        block = config.candidate_block_size
        self.newest = {r: (seen.sum(1) - 1).div(block, rounding_mode="floor") for r, seen in self.visible.items()}
        self.length = length


class Out(NamedTuple):
    """`hidden` [B, T, D] before the final norm, `features` [B, T, F] for the drafter."""

    hidden: Tensor
    features: Tensor


@torch.no_grad()
def gram_rows(model: DeepseekV41, ids: Tensor) -> dict[int, Tensor]:
    """Table rows i64 [B, T, tables] for each Engram layer: a function of ids i64 [B, T] alone."""
    grams = look_back(model.token_map[ids], model.no_history(ids))
    return {i: layer.engram.rows(grams) for i, layer in enumerate(model.blocks) if layer.engram is not None}


def run(
    model: DeepseekV41, ids: Tensor, grams: dict[int, Tensor], tables: Tables, dense: Tensor, taught: int = 0
) -> tuple[Out, Notes]:
    """ids i64 [B, T], T a multiple of every ratio. `dense`: bool scalar on the device, see above."""
    streams, pre = first_streams(model.embed(ids), model.config.hc_mult)
    shared: Rows | None = None
    features, notes = [], Notes([], {})
    for i, layer in enumerate(model.blocks):
        if i in model.config.dspark_target_layer_ids:
            features.append(streams.mean(2))
        if layer.engram is not None:
            streams = remember(layer.engram, streams, grams[i])
        after, post, comb = mix(layer.mixer, streams, layer.hc_attn_fn, layer.hc_attn_base, layer.hc_attn_scale)
        x = normed(collapse(streams, pre), layer.attn_norm.weight, layer.attn_norm.eps)
        y, shared = attention(layer.attn, x, tables, shared, dense, taught, notes)
        streams, pre = feed(layer, expand(streams, y, post, comb), after, f"layers.{i}", notes)
    return Out(collapse(streams, pre), torch.cat(features, dim=-1)), notes


def feed(layer: Block, streams: Tensor, pre: Tensor, name: str, notes: Notes) -> tuple[Tensor, Tensor]:
    """The expert sublayer: new streams and pre."""
    after, post, comb = mix(layer.mixer, streams, layer.hc_ffn_fn, layer.hc_ffn_base, layer.hc_ffn_scale)
    x = normed(collapse(streams, pre), layer.ffn_norm.weight, layer.ffn_norm.eps)
    return expand(streams, moe(layer.ffn, x, name, notes), post, comb), after


def mix(mixer: StreamMixer, streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`StreamMixer`: the norm is applied after the product, and sums run over leading axes, which is faster."""
    k = mixer.streams
    flat = streams.flatten(2)
    size = torch.linalg.vector_norm(flat, dim=-1, keepdim=True, dtype=torch.float32)
    mixes = F.linear(flat, fn).float() * torch.rsqrt(size.square() / flat.shape[-1] + mixer.norm_eps)
    pre, post, comb = mixes.split((k, k, k * k), dim=-1)
    base_pre, base_post, base_comb = base.split((k, k, k * k))
    pre = torch.sigmoid(pre * scale[0] + base_pre) + mixer.eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    square = (comb * scale[2] + base_comb).permute(2, 0, 1).unflatten(0, (k, k))
    square = square.softmax(1) + mixer.eps
    square = square / (square.sum(0, keepdim=True) + mixer.eps)
    for _ in range(mixer.rounds - 1):
        square = square / (square.sum(1, keepdim=True) + mixer.eps)
        square = square / (square.sum(0, keepdim=True) + mixer.eps)
    return pre, post, square.permute(2, 3, 0, 1)


def expand(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`parts.expand`, in fp32 whatever the products around it use."""
    with torch.autocast(streams.device.type, enabled=False):
        old = comb.transpose(2, 3) @ streams.float()
    new: Tensor = post.unsqueeze(-1) * y.float().unsqueeze(2) + old
    return new.type_as(streams)


def remember(engram: Engram, streams: Tensor, rows: Tensor) -> Tensor:
    """The streams with looked-up memory added."""
    count, width = streams.shape[2:]
    looked = F.embedding(rows, engram.embed.weight).flatten(2)
    made = F.linear(looked, engram.wkv.weight).float().unflatten(-1, (count + 1, width))
    keys, value = made[:, :, :count], made[:, :, count:]
    high = streams.float()
    match = (high * (engram.q_weight * engram.k_weight) * keys).sum(-1, keepdim=True)
    for side in (high, keys):
        match = match * torch.rsqrt(side.square().mean(-1, keepdim=True) + engram.eps)
    match = match / width**0.5
    gate = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    new: Tensor = high + gate * value
    return new.type_as(streams)


def moe(ffn: MoE, x: Tensor, name: str, notes: Notes) -> Tensor:
    """The experts of x [B, T, D]; the router runs in fp32."""
    flat, gate = x.flatten(0, 1), ffn.gate
    with torch.autocast(x.device.type, enabled=False):
        scores = F.softplus(F.linear(flat.float(), gate.weight) / gate.temperature).sqrt()
    ids = torch.topk(scores.detach() + gate.bias, gate.top, dim=-1).indices
    notes.loads[name] = load_of(ids, len(gate.bias))
    weights = scores.gather(-1, ids)
    weights = weights / (weights.sum(-1, keepdim=True) + 1e-20) * gate.scaling
    shared, limit = ffn.shared_experts, ffn.shared_experts.limit
    y = experts(flat, ffn.experts.w13, ffn.experts.w2, spread(ids, weights, len(gate.bias)), limit)
    inner = F.silu(shared.w1(flat).clamp(max=limit)) * shared.w3(flat).clamp(-limit, limit)
    both: Tensor = y + shared.w2(inner)
    return both.type_as(x).view_as(x)


def heads(attn: Attention, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """The low-rank form [B, T, R] and rotated heads [B, H, T, D] of the queries."""
    low = normed(attn.wq_a(x), attn.q_norm.weight, attn.q_norm.eps)
    return low, turn(attn.wq_b(low).unflatten(-1, (attn.heads, attn.width)).transpose(1, 2), angles)


def latents(attn: Attention, x: Tensor, angles: Angles) -> Tensor:
    """Rotated window latents [B, T, D]."""
    return turn(normed(attn.wkv(x), attn.kv_norm.weight, attn.kv_norm.eps), angles)


def project(attn: Attention, out: Tensor, angles: Angles) -> Tensor:
    """The sublayer's output of heads [B, H, T, D]: turned back, group by group, joined."""
    grouped = turn(out, angles, back=True).transpose(1, 2).flatten(2).unflatten(-1, (attn.groups, -1))
    weight = attn.wo_a.weight.unflatten(0, (attn.groups, -1))
    low = torch.einsum("btgi,goi->btgo", grouped, weight)
    y: Tensor = attn.wo_b(low.flatten(2))
    return y


def attention(
    attn: Attention, x: Tensor, tables: Tables, shared: Rows | None, dense: Tensor, taught: int, notes: Notes
) -> tuple[Tensor, Rows | None]:
    """One layer's attention over its window and the chosen rows."""
    ratio = attn.role.ratio
    angles = tables.angles[ratio]
    low, queries = heads(attn, x, angles)
    line, seen = latents(attn, x, angles), tables.window
    if attn.compressor is not None and attn.indexer is not None:
        shared = make(attn.compressor, attn.indexer, x, angles)
    if attn.indexer is not None and shared is not None:
        visible = tables.visible[ratio]
        scores = index_scores(attn.indexer, x.detach(), low.detach(), shared.keys, angles)
        with torch.no_grad():
            shared = choose(attn.indexer, scores, visible, tables.newest[ratio], shared)
        if taught:
            whole = torch.cat((line, shared.rows), dim=1)[:taught].detach()
            sight = torch.cat((seen, visible), dim=1)
            notes.index.append(teach(scores[:taught], queries[:taught].detach(), whole, sight, attn.attn_sink))
    if shared is not None and shared.chosen is not None and ratio:
        line = torch.cat((line, shared.rows), dim=1)
        chosen = shared.chosen | (dense & tables.visible[ratio])
        seen = torch.cat((seen.expand(len(x), -1, -1), chosen), dim=2)
    out, _ = attend(queries, line, seen, attn.attn_sink)
    return project(attn, out, angles), shared


def make(compressor: Compressor, indexer: Indexer, x: Tensor, angles: Angles) -> Rows:
    """New rows and their index keys; keys are made of what the indexer may not change."""
    ratio = compressor.ratio
    plain = compressor.wkv(x)
    values = plain.float()
    if compressor.wgate is not None:
        gates = compressor.wgate(x).float().unflatten(1, (-1, ratio))
        values = (gates.softmax(2) * values.unflatten(1, (-1, ratio))).sum(2)
    latent = normed(values.type_as(plain), compressor.norm.weight, compressor.norm.eps)
    assert indexer.wk is not None
    assert indexer.k_norm is not None
    starts = angles.at(slice(None, None, ratio))
    keys = normed(indexer.wk(latent.detach()), indexer.k_norm.weight, indexer.k_norm.eps)
    return Rows(turn(latent, starts), turn(keys, starts))


def index_scores(indexer: Indexer, x: Tensor, low: Tensor, keys: Tensor, angles: Angles) -> Tensor:
    """[B, T, S] fp32."""
    queries = turn(indexer.wq_b(low).unflatten(-1, (indexer.heads, indexer.width)).transpose(1, 2), angles)
    match = (queries.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, (indexer.heads, -1)).relu()
    weights = indexer.weights_proj(x).float() * (indexer.heads * indexer.width) ** -0.5
    scores: Tensor = (match * weights.transpose(1, 2).unsqueeze(-1).type_as(match)).sum(1, dtype=torch.float32)
    return scores


def choose(indexer: Indexer, scores: Tensor, visible: Tensor, newest: Tensor, shared: Rows) -> Rows:
    """Chosen rows, and candidates where the layer publishes them."""
    if not indexer.makes_candidates:
        allowed = visible if shared.candidates is None else visible & shared.candidates
        return shared._replace(chosen=best(scores, allowed, indexer.top))
    slots, block = scores.shape[-1], indexer.block
    lowest = F.pad(scores.masked_fill(~visible, float("-inf")), (0, -slots % block), value=float("-inf"))
    peaks = lowest.unflatten(-1, (-1, block)).amax(-1)
    pinned = torch.arange(peaks.shape[-1], device=peaks.device) == newest.unsqueeze(-1)
    kept = best(peaks.masked_fill(pinned, float("inf")), peaks > float("-inf"), indexer.blocks)
    candidates = kept.unsqueeze(-1).expand(*kept.shape, block).flatten(-2)[..., :slots] & visible
    return shared._replace(chosen=best(scores, visible, indexer.top), candidates=candidates)


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The `count` highest allowed entries of the last axis as a mask, of equal ones the earlier.

    Scores become whole numbers in the same order with the slot in their lower half, so that no two are equal.
    """
    slots = scores.shape[-1]
    if count >= slots:
        return allowed.expand_as(scores)
    bits = (scores.masked_fill(~allowed, float("-inf")) + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    ranked = (ordered << 16) - torch.arange(slots, device=scores.device)
    floor = ranked.topk(count, dim=-1).values[..., -1:]
    return (ranked >= floor) & allowed


def teach(scores: Tensor, queries: Tensor, keys: Tensor, sight: Tensor, sink: Tensor) -> Tensor:
    """The divergence of scores [B, T, S] from the attention's shares of the last S keys, mean over tokens with rows."""
    slots = scores.shape[-1]
    seen = sight[:, -slots:]
    with torch.no_grad():
        _, shares = attend(queries, keys, sight, sink)
        target = shares[..., -slots:].float().mean(1)
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    logs = scores.masked_fill(~seen, -1e9).log_softmax(-1).masked_fill(~seen, 0.0)
    some = seen.any(-1)
    gap = (target * (target.clamp(min=1e-9).log() - logs)).sum(-1)
    return gap.masked_fill(~some, 0.0).sum() / (some.sum() * len(scores))
