"""Generation with caches as explicit values: every function takes a `State` and returns a new one.

All buffers have fixed sizes, so that one traced step serves every position: windows are rings by position, global
rows have a capacity, and a token that does not complete a row writes none. Batch entries may be at different positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.errors import BadModelConfig, ContextTooLong
from deepinfer_compile.models.deepseek_v41.attention import Made, Past, Shared, put
from deepinfer_compile.models.deepseek_v41.block import first_streams
from deepinfer_compile.models.deepseek_v41.draft import Draft
from deepinfer_compile.models.deepseek_v41.engram import look_back
from deepinfer_compile.models.deepseek_v41.layers import Role
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41, joined
from deepinfer_compile.models.deepseek_v41.parts import collapse


class State(NamedTuple):
    """All that later tokens need of those before them.

    `length` i64 [B] tokens so far, `recent` i64 [B, n - 1] the last normalised ids, `layers` the caches of each layer,
    `drafts` a ring [B, W, D] for each draft layer.
    """

    length: Tensor
    recent: Tensor
    layers: tuple[Past, ...]
    drafts: tuple[Tensor, ...]


def prefill(model: DeepseekV41, input_ids: Tensor, capacity: int) -> tuple[Tensor, State]:
    """Logits [B, V] after ids i64 [B, T], T > 0, and the state with room for `capacity` tokens in all.

    Raises ContextTooLong if the ids do not fit.
    """
    batch, length = input_ids.shape
    _fits(length, capacity, model)
    positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
    run = model.run(input_ids, positions)
    window = model.config.sliding_window
    layers = tuple(_filled(made, layer.attn.role, window, capacity) for made, layer in zip(run.made, model.blocks))
    contexts = () if model.mtp is None else model.mtp.context(run.features, positions)
    drafts = tuple(_ring(context, window) for context in contexts)
    recent = torch.cat((model.no_history(input_ids), model.token_map[input_ids]), dim=1)
    recent = recent[:, length:]
    return model.logits(run.hidden[:, -1]), State(positions.new_full((batch,), length), recent, layers, drafts)


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


def _filled(made: Made, role: Role, window: int, capacity: int) -> Past:
    """A layer's caches of a whole sequence, with room for rows of `capacity` tokens."""
    past = Past(_ring(made.window, window))
    if made.rows is None or made.keys is None:
        return past
    last = slice(role.ratio - 1, None, role.ratio)
    rows, keys = made.rows[:, last], made.keys[:, last]
    spare = (0, 0, 0, capacity // role.ratio - rows.shape[1])
    past = past._replace(rows=F.pad(rows, spare), keys=F.pad(keys, spare))
    if made.values is None or made.gates is None:
        return past
    return past._replace(values=_ring(made.values, role.ratio), gates=_ring(made.gates, role.ratio))


def _ring(line: Tensor, size: int) -> Tensor:
    """The last tokens of line [B, T, D] at slot p % size of [B, size, D]; zeros where there is none."""
    length = line.shape[1]
    first = max(length - size, 0)
    slots = torch.arange(first, length, device=line.device) % size
    return line.new_zeros(line.shape[0], size, line.shape[2]).index_copy(1, slots, line[:, first:])


def _fits(needed: int, limit: int, model: DeepseekV41) -> None:
    if needed > limit:
        built = model.config.max_position_embeddings
        raise ContextTooLong(request="at hand", needed=needed, limit=limit, built=built)
