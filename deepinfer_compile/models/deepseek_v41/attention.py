"""Attention over a window of latents and over rows of a shared global cache; keys and values are the same vector.

A layer makes its own window latents. Rows of the global cache, the keys they are chosen by and the choice itself come
from source layers and pass from layer to layer as the explicit value `Shared`, never through a mutable store. Rows of
a source and window latents stay apart: a token inside the window that also has a row is attended to through both.
Masks are dense and a choice is a mask, made by rank so that no size depends on data. Caches hold what `storage` makes
of a row, by default the row itself.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.layers import Role
from deepinfer_compile.models.deepseek_v41.parts import RMSNorm, Rotary, wide
from deepinfer_compile.models.deepseek_v41.storage import PLAIN, Form, Forms


class Shared(NamedTuple):
    """What later layers read of the sources before them, in S slots.

    `rows` [B, S, D] rotated, `keys` [B, S, Dk] rotated, `numbers` i64 [B, S] which row of the sequence a slot holds, -1
    for none, `chosen` bool [B, T, S] the rows each token attends to, `candidates` bool [B, T, S] those that later
    choices are limited to, None where no layer before published any.
    """

    rows: Tensor
    keys: Tensor
    numbers: Tensor
    chosen: Tensor
    candidates: Tensor | None


class Past(NamedTuple):
    """One layer's caches; all but `window` only in layers that make rows, `values` and `gates` only if these pool.

    `window` [B, W, D]: slot p % W. `rows` [B, S, D], `keys` [B, S, Dk]: slot p // ratio. `values`, `gates` [B, ratio,
    D], wide: slot p % ratio, the tokens of the row that is still open. Slots never written hold zeros. The first three
    are stored forms: another width and dtype where the model's `Forms` pack them.
    """

    window: Tensor
    rows: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    gates: Tensor | None = None


class Made(NamedTuple):
    """What a layer made of a whole sequence, from which `Past` is filled: one entry a token where Past has slots.

    `rows` and `keys` hold something else than a row at tokens that do not complete one.
    """

    window: Tensor
    rows: Tensor | None = None
    keys: Tensor | None = None
    values: Tensor | None = None
    gates: Tensor | None = None


class Queries(NamedTuple):
    """Of x [B, T, hidden]: the low-rank form [B, T, R] and the rotated heads [B, T, H, D]."""

    low: Tensor
    heads: Tensor


class Compressor(nn.Module):
    """Latents of the global cache: one a token at ratio 1, else `ratio` tokens pooled by a softmax per channel."""

    def __init__(self, config: DeepseekV41Config, ratio: int) -> None:
        super().__init__()
        self.ratio = ratio
        self.wkv = nn.Linear(config.hidden_size, config.head_dim, bias=False)
        self.wgate = nn.Linear(config.hidden_size, config.head_dim, bias=False) if ratio > 1 else None
        self.norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Values and gates [B, T, D] of x [B, T, hidden], wide, where there are gates also their products; no gates at
        ratio 1."""
        if self.wgate is None:
            return wide(self.wkv(x)), None
        values, gates = (nn.functional.linear(wide(x), wide(w.weight)) for w in (self.wkv, self.wgate))
        return values, gates

    def pooled(self, values: Tensor, gates: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Rows [B, S, D] in `dtype`, before rotation, of their tokens [B, S, ratio, D], or [B, S, D] at ratio 1."""
        pooled = values if gates is None else (gates.softmax(2) * values).sum(2)
        rows: Tensor = self.norm(pooled.to(dtype))
        return rows

    def whole(
        self, values: Tensor, gates: Tensor | None, dtype: torch.dtype, before: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """[B, T, D]: at each token the row that would end there, of values and gates [B, T, D].

        `before`: those of the ratio - 1 tokens before the first, [B, ratio - 1, D] each; None at a sequence's start.
        """
        if gates is None:
            return self.pooled(values, None, dtype)
        early = (None, None) if before is None else before
        return self.pooled(self.ending(values, early[0]), self.ending(gates, early[1]), dtype)

    def ending(self, line: Tensor, before: Tensor | None = None) -> Tensor:
        """[B, T, ratio, D]: each token of line [B, T, D] with those before it, zeros where `before` is not given."""
        length = line.shape[1]
        early = nn.functional.pad(line, (0, 0, self.ratio - 1, 0)) if before is None else torch.cat((before, line), 1)
        return torch.stack([early[:, i : i + length] for i in range(self.ratio)], dim=2)


class Indexer(nn.Module):
    """Scores rows for each token by small keys and chooses the best; `wk` only where the rows are made."""

    def __init__(self, config: DeepseekV41Config, role: Role, form: Form) -> None:
        super().__init__()
        heads, width, self.form = config.index_n_heads, config.index_head_dim, form
        self.heads, self.width, self.top = heads, width, config.index_topk
        self.block, self.blocks = config.candidate_block_size, config.candidate_topk_blocks
        self.makes_candidates = role.makes_candidates
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.wk = nn.Linear(config.head_dim, width, bias=False) if role.makes_rows else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if role.makes_rows else None

    def keys(self, latent: Tensor, starts: Tensor, rotary: Rotary) -> Tensor:
        """Stored keys of latents [B, S, D] before rotation; `starts` [B, S]: position of a row's first token."""
        assert self.wk is not None
        assert self.k_norm is not None
        return self.form.store(rotary.row(self.k_norm(self.wk(latent)), starts))

    def scores(self, x: Tensor, low: Tensor, positions: Tensor, keys: Tensor, rotary: Rotary) -> Tensor:
        """[B, T, S], wide: over heads, relu(query . key) weighted by the token; queries are rounded like keys."""
        queries = rotary(self.wq_b(low).unflatten(-1, (self.heads, self.width)), positions)
        queries = self.form.load(self.form.store(queries), queries.dtype)
        weights = wide(self.weights_proj(x)) * self.heads**-0.5
        match = torch.einsum("bthd,bsd->bths", wide(queries), wide(keys)).relu() * self.width**-0.5
        scores: Tensor = (match * weights.unsqueeze(-1)).sum(2)
        return scores

    def choose(
        self, scores: Tensor, numbers: Tensor, seen: Tensor, candidates: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Chosen rows and candidates, bool [B, T, S]; of equal scores the earlier row wins.

        A token sees the rows whose number is below seen i64 [B, T]; numbers i64 [B, S] as in `Shared`.

        The publishing layer itself chooses among all visible rows; when it keeps more blocks than rows are chosen
        (released: 2048 and 512) this equals a choice inside its own candidates.
        """
        visible = ((numbers >= 0).unsqueeze(1)) & (numbers.unsqueeze(1) < seen.unsqueeze(2))
        if self.makes_candidates:
            return best(scores, visible, self.top), self._candidates(scores, visible, numbers, seen)
        allowed = visible if candidates is None else visible & candidates
        return best(scores, allowed, self.top), candidates

    def _candidates(self, scores: Tensor, visible: Tensor, numbers: Tensor, seen: Tensor) -> Tensor:
        """Rows of the best blocks by their best visible row; the block of the newest visible row is always in.

        Blocks have S slots too, most of them empty, so that no size is computed from another.
        """
        lowest = scores.masked_fill(~visible, float("-inf"))
        block = numbers.clamp(min=0).div(self.block, rounding_mode="floor").unsqueeze(1).expand(scores.shape)
        peaks = torch.full_like(lowest, float("-inf")).scatter_reduce(-1, block, lowest, "amax")
        newest = (seen.unsqueeze(2) - 1).div(self.block, rounding_mode="floor")
        pinned = torch.arange(scores.shape[-1], device=scores.device) == newest
        kept = best(peaks.masked_fill(pinned, float("inf")), peaks > float("-inf"), self.blocks)
        return kept.gather(-1, block) & visible


def best(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The `count` highest allowed entries of the last axis as a mask; fewer where fewer are allowed."""
    order = scores.masked_fill(~allowed, float("-inf")).argsort(dim=-1, descending=True, stable=True)
    return (order.argsort(dim=-1) < count) & allowed


class Attention(nn.Module):
    """One layer's attention: x [B, T, hidden] to the same, reading and handing on `Shared`.

    `forward` sees the whole sequence, or some tokens and the caches of those before them, `step` one token and these.
    """

    def __init__(self, config: DeepseekV41Config, role: Role, forms: Forms = PLAIN) -> None:
        super().__init__()
        hidden, heads, width = config.hidden_size, config.num_attention_heads, config.head_dim
        self.role, self.rotary, self.forms = role, Rotary.of(config, role.ratio), forms
        self.heads, self.width, self.groups, self.window = heads, width, config.o_groups, config.sliding_window
        self.wq_a = nn.Linear(hidden, config.q_lora_rank, bias=False)
        self.q_norm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.wq_b = nn.Linear(config.q_lora_rank, heads * width, bias=False)
        self.wkv = nn.Linear(hidden, width, bias=False)
        self.kv_norm = RMSNorm(width, config.rms_norm_eps)
        self.wo_a = nn.Linear(heads * width // config.o_groups, config.o_groups * config.o_lora_rank, bias=False)
        self.wo_b = nn.Linear(config.o_groups * config.o_lora_rank, hidden, bias=False)
        self.attn_sink = nn.Parameter(torch.zeros(heads))
        self.compressor = Compressor(config, role.ratio) if role.makes_rows else None
        self.indexer = Indexer(config, role, forms.keys) if role.chooses else None

    def forward(
        self, x: Tensor, positions: Tensor, shared: Shared | None, past: Past | None = None
    ) -> tuple[Tensor, Shared | None, Made]:
        """Tokens at consecutive positions i64 [B, T]: a whole sequence from 0, or what follows the tokens of `past`.

        `past` is not changed and the tokens are not in it: `Made` has what they add.
        """
        queries, latents = self.queries(x, positions), self.latents(x, positions)
        made = Made(latents)
        if self.compressor is not None and self.indexer is not None:
            made, shared = self._make_rows(x, positions, latents, past)
        shared = self._choose(x, queries.low, positions, shared)
        if past is None:
            age = positions.unsqueeze(2) - positions.unsqueeze(1)
            visible = (age >= 0) & (age < self.window)
            return self.attend(queries.heads, positions, self._window(latents, x), visible, shared), shared, made
        places = torch.cat((held(positions[:, :1], self.window), positions), dim=1)
        age = positions.unsqueeze(2) - places.unsqueeze(1)
        visible = (age >= 0) & (age < self.window) & (places >= 0).unsqueeze(1)
        both = self._window(torch.cat((past.window, latents), dim=1), x)
        return self.attend(queries.heads, positions, both, visible, shared), shared, made

    def step(
        self, x: Tensor, positions: Tensor, shared: Shared | None, past: Past
    ) -> tuple[Tensor, Shared | None, Past]:
        """One token x [B, 1, hidden] at positions i64 [B, 1] and the caches with it added; `past` is not changed."""
        queries, latents = self.queries(x, positions), self.latents(x, positions)
        past = past._replace(window=put(past.window, latents, positions % self.window))
        if self.compressor is not None and self.indexer is not None:
            past, rows, keys = self._step_rows(x, positions, past)
            numbers = torch.arange(rows.shape[1], device=x.device).expand(rows.shape[:2])
            shared = self._publish(rows, keys, numbers, x.dtype)
        shared = self._choose(x, queries.low, positions, shared)
        age = (positions - torch.arange(self.window, device=x.device)) % self.window
        visible = (age <= positions).unsqueeze(1)
        return self.attend(queries.heads, positions, self._window(past.window, x), visible, shared), shared, past

    def draft(self, x: Tensor, positions: Tensor, context: Tensor) -> Tensor:
        """A block x [B, N, hidden] at consecutive positions, over itself and the ring of tokens before its first."""
        queries, latents = self.queries(x, positions), self.latents(x, positions)
        places = held(positions[:, :1], self.window)
        age = positions.unsqueeze(2) - places.unsqueeze(1)
        visible = (places >= 0).unsqueeze(1) & (age < self.window)
        within = visible.new_ones(x.shape[0], x.shape[1], x.shape[1])
        both = self._window(torch.cat((context, latents), dim=1), x)
        return self.attend(queries.heads, positions, both, torch.cat((visible, within), dim=2), None)

    def _make_rows(self, x: Tensor, positions: Tensor, latents: Tensor, past: Past | None) -> tuple[Made, Shared]:
        """What the tokens add to this layer's caches, and all rows that they or later tokens can see."""
        assert self.compressor is not None
        assert self.indexer is not None
        ratio = self.role.ratio
        values, gates = self.compressor.parts(x)
        before = None if past is None else self._open_row(positions[:, :1], past)
        latent = self.compressor.whole(values, gates, x.dtype, before)
        starts = positions // ratio * ratio
        keys = self.indexer.keys(latent, starts, self.rotary)
        rows = self.forms.rows.store(self.rotary.row(latent, starts))
        made = Made(latents, rows, keys, None if gates is None else values, gates)
        numbers = torch.where((positions + 1) % ratio == 0, positions // ratio, -1)
        if past is None:
            return made, self._publish(rows, keys, numbers, x.dtype)
        assert past.rows is not None
        assert past.keys is not None
        slots = torch.arange(past.rows.shape[1], device=x.device)
        old = torch.where(slots < positions[:, :1] // ratio, slots, -1)
        rows, keys = torch.cat((past.rows, rows), dim=1), torch.cat((past.keys, keys), dim=1)
        return made, self._publish(rows, keys, torch.cat((old, numbers), dim=1), x.dtype)

    def _open_row(self, first: Tensor, past: Past) -> tuple[Tensor, Tensor] | None:
        """Values and gates of the ratio - 1 tokens before position first i64 [B, 1], in their order."""
        if past.values is None or past.gates is None:
            return None
        ratio, width = past.values.shape[1:]
        slots = (first + torch.arange(1, ratio, device=first.device)) % ratio
        at = slots.unsqueeze(-1).expand(-1, -1, width)
        return past.values.gather(1, at), past.gates.gather(1, at)

    def _step_rows(self, x: Tensor, positions: Tensor, past: Past) -> tuple[Past, Tensor, Tensor]:
        """The caches with this token in its open row, and rows and keys, to which a row's last token adds one."""
        assert self.compressor is not None
        assert self.indexer is not None
        old_rows, old_keys = past.rows, past.keys
        assert old_rows is not None
        assert old_keys is not None
        ratio = self.role.ratio
        values, gates = self.compressor.parts(x)
        if gates is not None:
            assert past.values is not None
            assert past.gates is not None
            open_values = put(past.values, values, positions % ratio)
            open_gates = put(past.gates, gates, positions % ratio)
            past = past._replace(values=open_values, gates=open_gates)
            values, gates = open_values.unsqueeze(1), open_gates.unsqueeze(1)
        latent = self.compressor.pooled(values, gates, x.dtype)
        number = positions // ratio
        slot = torch.where((positions + 1) % ratio == 0, number, -1)
        rows = put(old_rows, self.forms.rows.store(self.rotary.row(latent, number * ratio)), slot)
        keys = put(old_keys, self.indexer.keys(latent, number * ratio, self.rotary), slot)
        return past._replace(rows=rows, keys=keys), rows, keys

    def _publish(self, rows: Tensor, keys: Tensor, numbers: Tensor, dtype: torch.dtype) -> Shared:
        """Stored rows replace those of the source before; what was chosen of those does not apply."""
        none = torch.zeros_like(numbers, dtype=torch.bool).unsqueeze(1)
        return Shared(self.forms.rows.load(rows, dtype), self.forms.keys.load(keys, dtype), numbers, none, None)

    def _window(self, stored: Tensor, x: Tensor) -> Tensor:
        """Stored latents [B, N, ...] as attention reads them, in x's dtype."""
        return self.forms.window.load(stored, x.dtype)

    def _choose(self, x: Tensor, low: Tensor, positions: Tensor, shared: Shared | None) -> Shared | None:
        if self.indexer is None or shared is None:
            return shared
        scores = self.indexer.scores(x, low, positions, shared.keys, self.rotary)
        seen = (positions + 1) // self.role.ratio
        chosen, candidates = self.indexer.choose(scores, shared.numbers, seen, shared.candidates)
        return shared._replace(chosen=chosen, candidates=candidates)

    def queries(self, x: Tensor, positions: Tensor) -> Queries:
        """The low-rank and the rotated queries of x."""
        low = self.q_norm(self.wq_a(x))
        return Queries(low, self.rotary(self.wq_b(low).unflatten(-1, (self.heads, self.width)), positions))

    def latents(self, x: Tensor, positions: Tensor) -> Tensor:
        """The rotated window latents of x [B, T, hidden], as the cache holds them."""
        return self.forms.window.store(self.rotary.row(self.kv_norm(self.wkv(x)), positions))

    def attend(
        self, queries: Tensor, positions: Tensor, latents: Tensor, visible: Tensor, shared: Shared | None
    ) -> Tensor:
        """The sublayer's output [B, T, hidden]: queries [B, T, H, D] at positions [B, T] over latents [B, N, D] where
        visible [B, T, N], and over the chosen rows. What comes out is turned back by the query's position.
        """
        if shared is not None and self.role.ratio > 0:
            latents = torch.cat((latents, shared.rows), dim=1)
            visible = torch.cat((visible, shared.chosen), dim=2)
        scores = torch.einsum("bthd,bnd->bthn", wide(queries), wide(latents)) * self.width**-0.5
        scores = scores.masked_fill(~visible.unsqueeze(2), float("-inf"))
        sink = wide(self.attn_sink).view(1, 1, -1, 1).expand(*scores.shape[:3], 1)
        shares = torch.cat((scores, sink), dim=-1).softmax(-1)[..., :-1]
        out = torch.einsum("bthn,bnd->bthd", shares, wide(latents)).type_as(queries)
        grouped = self.rotary(out, positions, inverse=True).flatten(2).unflatten(-1, (self.groups, -1))
        low = torch.einsum("btgi,goi->btgo", grouped, self.wo_a.weight.unflatten(0, (self.groups, -1)))
        y: Tensor = self.wo_b(low.flatten(2))
        return y


def held(first: Tensor, size: int) -> Tensor:
    """The positions [B, size] that the slots of a ring hold before first i64 [B, 1]; negative where there is none."""
    last = first - 1
    return last - (last - torch.arange(size, device=first.device)) % size


def put(buffer: Tensor, new: Tensor, slot: Tensor) -> Tensor:
    """buffer [B, S, D] with new [B, 1, D] in slot i64 [B, 1] of each batch entry; no slot matches -1."""
    here = torch.arange(buffer.shape[1], device=buffer.device) == slot
    return torch.where(here.unsqueeze(-1), new, buffer)
