"""Generation with caches as explicit values: every function takes a `State` and returns a new one.

All buffers have fixed sizes, so that one traced step serves every position: windows are rings by position, global
rows have a capacity, and a token that does not complete a row writes none. Batch entries may be at different positions.

Several tokens at once are run in two halves: `verify` reads the caches and writes none, `accept` writes what the tokens
that are kept add. So a rejected token has nothing to be rolled back from: no ring needs spare slots, and the caches
are those of a prompt of the kept tokens. A prompt is the same thing after an empty state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from deepinfer_compile.errors import BadModelConfig, BadRequest, ContextTooLong
from deepinfer_compile.models.deepseek_v41.attention import Made, Past, Shared, held, put
from deepinfer_compile.models.deepseek_v41.block import first_streams
from deepinfer_compile.models.deepseek_v41.draft import Draft
from deepinfer_compile.models.deepseek_v41.engram import look_back
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41, joined
from deepinfer_compile.models.deepseek_v41.parts import collapse


class State(NamedTuple):
    """All that later tokens need of those before them.

    `length` i64 [B] tokens so far, `recent` i64 [B, n - 1] the last normalised ids, `layers` the caches of each layer,
    `drafts` a ring [B, W, D] for each draft layer. Rings and rows are as the model's `storage.Forms` store them.
    """

    length: Tensor
    recent: Tensor
    layers: tuple[Past, ...]
    drafts: tuple[Tensor, ...]


Drafting = Callable[[DeepseekV41, Tensor, State], Draft]
"""Proposes a block after anchors i64 [B], as `propose` does."""


class Pending(NamedTuple):
    """N tokens after those of `state`, run but not yet in it.

    `counts` i64 [B] how many of an entry's tokens are real, `mapped` i64 [B, N] normalised ids, `made` what each layer
    made of the tokens, `contexts` [B, N, D] the window latents of each draft layer.
    """

    state: State
    counts: Tensor
    mapped: Tensor
    made: tuple[Made, ...]
    contexts: tuple[Tensor, ...]


def prefill(
    model: DeepseekV41, input_ids: Tensor, capacity: int, lengths: Tensor | None = None
) -> tuple[Tensor, State]:
    """Logits [B, V] after ids i64 [B, T], T > 0, and the state with room for `capacity` tokens in all.

    Prompts of other lengths, i64 [B], are padded on the right with any ids; None: all have T tokens. Raises
    ContextTooLong if the ids do not fit, BadRequest for a length that is not in 1 to T.
    """
    batch, length = input_ids.shape
    _fits(length, capacity, model)
    run = model.run(input_ids)
    if lengths is None:
        counts, ends = input_ids.new_full((batch,), length), run.hidden[:, -1]
    else:
        _inside(lengths, length)
        counts, ends = lengths, run.hidden[torch.arange(batch, device=lengths.device), lengths - 1]
    positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    contexts = () if model.mtp is None else model.mtp.context(run.features, positions)
    state = _empty(model, input_ids, run.made, contexts, capacity)
    pending = Pending(state, counts, model.token_map[input_ids], run.made, contexts)
    return model.logits(ends), accept(pending, counts)


def verify(model: DeepseekV41, tokens: Tensor, state: State, counts: Tensor | None = None) -> tuple[Tensor, Pending]:
    """Logits [B, N, V], at each of tokens i64 [B, N] those of the token after it, and what `accept` takes.

    An entry with fewer tokens, counts i64 [B], is padded on the right with any ids; logits at padding are NaN. `state`
    is not changed. The caller keeps what will be accepted below the capacity; padding may lie above it.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    positions = state.length.unsqueeze(1) + steps
    run = model.run(tokens, positions, state.recent, state.layers)
    contexts = () if model.mtp is None else model.mtp.context(run.features, positions)
    real = torch.full_like(state.length, tokens.shape[1]) if counts is None else counts
    padding = (steps >= real.unsqueeze(1)).unsqueeze(2)
    logits = model.logits(run.hidden).masked_fill(padding, float("nan"))
    return logits, Pending(state, real, model.token_map[tokens], run.made, contexts)


def accept(pending: Pending, kept: Tensor) -> State:
    """The state with the first kept i64 [B] tokens, 0 to N, of each entry added, and nothing of the others.

    Padding is never kept. An entry that keeps none has the state it had, bit for bit.
    """
    state, count = pending.state, torch.minimum(kept, pending.counts).unsqueeze(1)
    first = state.length.unsqueeze(1)
    layers = tuple(_added(past, made, first, count) for past, made in zip(state.layers, pending.made))
    drafts = tuple(_wound(ring, new, first, count) for ring, new in zip(state.drafts, pending.contexts))
    line = torch.cat((state.recent, pending.mapped), dim=1)
    recent = line.gather(1, count + torch.arange(state.recent.shape[1], device=line.device))
    return State(state.length + count.squeeze(1), recent, layers, drafts)


def step(model: DeepseekV41, token: Tensor, state: State) -> tuple[Tensor, State]:
    """Logits [B, V] after one more token i64 [B], and the new state. The caller keeps `length` below the capacity."""
    ids, positions = token.unsqueeze(1), state.length.unsqueeze(1)
    mapped = model.token_map[ids]
    grams = look_back(mapped, state.recent)
    streams, pre = first_streams(model.embed(ids), model.config.hc_mult)
    shared: Shared | None = None
    layers, features = [], []
    for i, layer in enumerate(model.blocks):
        if i in model.config.dspark_target_layer_ids:
            features.append(streams.mean(2))
        streams, pre, shared, past = layer.step(streams, pre, positions, grams, shared, state.layers[i])
        layers.append(past)
    drafts = state.drafts
    if model.mtp is not None:
        contexts = model.mtp.context(joined(features, streams), positions)
        slot = positions % model.config.sliding_window
        drafts = tuple(put(ring, context, slot) for ring, context in zip(drafts, contexts))
    recent = torch.cat((state.recent, mapped), dim=1)[:, 1:]
    logits = model.logits(collapse(streams, pre).squeeze(1))
    return logits, State(state.length + 1, recent, tuple(layers), drafts)


def propose(model: DeepseekV41, anchor: Tensor, state: State) -> Draft:
    """The drafter's best block after `anchor` i64 [B], the next token, which `state` does not hold yet.

    Raises BadModelConfig if the model has no draft layers.
    """
    if model.mtp is None:
        raise BadModelConfig(key="num_nextn_predict_layers", value=0, reason="there are no draft layers to ask")
    draft: Draft = model.mtp(anchor, state.length, state.drafts, model.embed, model.head)
    return draft


def generate(model: DeepseekV41, input_ids: Tensor, count: int) -> Tensor:
    """The `count` most likely next tokens, one after another, i64 [B, count], of ids i64 [B, T].

    Raises ContextTooLong if they exceed the configured number of positions.
    """
    capacity = input_ids.shape[1] + count
    _fits(capacity, model.config.max_position_embeddings, model)
    logits, state = prefill(model, input_ids, capacity)
    tokens = [logits.argmax(-1)]
    for _ in range(count - 1):
        logits, state = step(model, tokens[-1], state)
        tokens.append(logits.argmax(-1))
    return torch.stack(tokens, dim=1)


def speculate(model: DeepseekV41, input_ids: Tensor, count: int, drafter: Drafting = propose) -> tuple[Tensor, int]:
    """What `generate` gives, by drafting blocks and verifying them, and the number of blocks it took.

    Of a block, the drafted tokens that are the most likely ones are kept, up to the first that is not; the most likely
    token in its place starts the next block. Entries of a batch advance by different numbers of tokens.
    """
    capacity = input_ids.shape[1] + count
    _fits(capacity, model.config.max_position_embeddings, model)
    logits, state = prefill(model, input_ids, capacity)
    anchor, rounds = logits.argmax(-1), 0
    found: list[list[int]] = [[] for _ in input_ids]
    while any(len(line) < count for line in found):
        drafted = drafter(model, anchor, state).tokens
        block = torch.cat((anchor.unsqueeze(1), drafted), dim=1)
        logits, pending = verify(model, block, state)
        likely = logits.argmax(-1)
        agreed = (drafted == likely[:, :-1]).long().cumprod(1).sum(1)
        room = torch.tensor([count - len(line) for line in found], device=anchor.device)
        kept = torch.minimum(agreed + 1, room)
        state = accept(pending, kept)
        for line, tokens, number in zip(found, block.tolist(), kept.tolist()):
            line += tokens[:number]
        last = likely.gather(1, (kept - 1).clamp(min=0).unsqueeze(1)).squeeze(1)
        anchor = torch.where(kept > 0, last, anchor)
        rounds += 1
    return torch.tensor(found, device=input_ids.device), rounds


def _empty(
    model: DeepseekV41, ids: Tensor, made: tuple[Made, ...], contexts: tuple[Tensor, ...], capacity: int
) -> State:
    """The state before any token, of the dtypes and widths of what was made."""
    window = model.config.sliding_window

    def zeros(like: Tensor, slots: int) -> Tensor:
        return like.new_zeros(like.shape[0], slots, like.shape[2])

    layers = []
    for layer, new in zip(model.blocks, made):
        past, ratio = Past(zeros(new.window, window)), layer.attn.role.ratio
        if new.rows is not None and new.keys is not None:
            past = past._replace(rows=zeros(new.rows, capacity // ratio), keys=zeros(new.keys, capacity // ratio))
        if new.values is not None and new.gates is not None:
            past = past._replace(values=zeros(new.values, ratio), gates=zeros(new.gates, ratio))
        layers.append(past)
    drafts = tuple(zeros(context, window) for context in contexts)
    return State(ids.new_zeros(ids.shape[0]), model.no_history(ids), tuple(layers), drafts)


def _added(past: Past, made: Made, first: Tensor, count: Tensor) -> Past:
    """A layer's caches with count i64 [B, 1] of the tokens that start at position first i64 [B, 1]."""
    added = Past(_wound(past.window, made.window, first, count))
    if past.rows is None or past.keys is None or made.rows is None or made.keys is None:
        return added
    ratio = 1 if past.values is None else past.values.shape[1]
    ends = (torch.arange(past.rows.shape[1], device=first.device) + 1) * ratio - 1
    rows = _taken(past.rows, made.rows, ends - first, count)
    added = added._replace(rows=rows, keys=_taken(past.keys, made.keys, ends - first, count))
    if past.values is None or past.gates is None or made.values is None or made.gates is None:
        return added
    values = _wound(past.values, made.values, first, count)
    return added._replace(values=values, gates=_wound(past.gates, made.gates, first, count))


def _wound(ring: Tensor, new: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """ring [B, S, D], slot p % S, with the first `count` of new [B, N, D], which start at position `first`."""
    return _taken(ring, new, held(first + count, ring.shape[1]) - first, count)


def _taken(old: Tensor, new: Tensor, index: Tensor, count: Tensor) -> Tensor:
    """old [B, S, D], but new[:, index] where index i64 [B, S] is in 0 to count i64 [B, 1] - 1."""
    inside = (index >= 0) & (index < count)
    at = index.clamp(0, new.shape[1] - 1).unsqueeze(-1).expand(-1, -1, new.shape[2])
    return torch.where(inside.unsqueeze(-1), new.gather(1, at), old)


def _inside(lengths: Tensor, longest: int) -> None:
    for number, length in enumerate(lengths.tolist()):
        if not 1 <= length <= longest:
            reason = f"its length is given as {length}, in a batch of prompts of up to {longest} tokens"
            raise BadRequest(request=number, reason=reason, fix="give the number of tokens before the padding")


def _fits(needed: int, limit: int, model: DeepseekV41) -> None:
    if needed > limit:
        built = model.config.max_position_embeddings
        raise ContextTooLong(request="at hand", needed=needed, limit=limit, built=built)
