"""Random decoders whose upper layers share global keys and values, in plain PyTorch, and ways to break them.

`draw` picks a form; `Decoder` is the model of it. Layers below the boundary attend with keys of their own; above it a
layer attends to a window of its own, to keys made of the one value at the boundary, or to both, one after the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program

VOCAB, WIDTH, HEADS = 61, 24, 4
BREAKS = (
    *("decoder only", "windows only", "own keys above", "n-grams above", "shift above", "convolution above"),
    *("features on both sides", "sees later tokens", "running total"),
)
KINDS = {
    "decoder only": "decoder only",
    "windows only": "decoder only",
    "own keys above": "source above",
    "n-grams above": "mixing above",
    "shift above": "mixing above",
    "convolution above": "mixing above",
    "features on both sides": "drafts straddle",
    "sees later tokens": "not causal",
    "running total": "unknown mixing",
}
"""How `find_boundary` names what is wrong with a break."""


@dataclass(frozen=True)
class Form:
    """What a decoder looks like. own: a layer's window, 0 for all tokens, None for no keys of its own. shares: layers
    that read the boundary's keys. at: the layer that `broken` is in."""

    own: tuple[int | None, ...]
    shares: tuple[bool, ...]
    boundary: int
    streams: int = 1
    stacked: bool = False
    shifted: bool = False
    norm: str = "rms"
    keys: str = "grouped"
    each: bool = False
    spelled: bool = False
    rotary: bool = True
    grams: bool = False
    broken: str = ""
    at: int = 0

    @property
    def windows(self) -> tuple[int, ...]:
        """Windows above the boundary, in order."""
        return tuple(w for w in self.own[self.boundary :] if w)

    @property
    def halo(self) -> int:
        """Rows that give the last one exactly."""
        return 1 + sum(w - 1 for w in self.windows)


def draw(seed: int, deepest: int = 8) -> Form:
    """A random form of at most `deepest` layers that has a boundary."""
    r = random.Random(seed)
    depth = r.randint(2, deepest)
    boundary = r.randint(1, depth - 1)
    own: list[int | None] = [r.choice((0, 0, 3, 5, 17)) for _ in range(boundary)]
    shares = [False] * boundary
    for _ in range(boundary, depth):
        kind = r.choice(("share", "share", "window", "both"))
        own.append(None if kind == "share" else r.choice((2, 4, 9)))
        shares.append(kind != "window")
    if shares.count(True) < 2:  # one reader must stand behind a window, or it is a layer with keys of its own
        own[boundary], own[-1], shares[-1] = own[boundary] or 4, own[-1] or 3, True
    streams = r.randint(1, 3)
    form = Form(tuple(own), tuple(shares), boundary, streams, streams > 1 and r.random() < 0.5)
    return replace(
        form,
        shifted=form.stacked and r.random() < 0.5,
        norm=r.choice(("rms", "layer", "plain")),
        keys=r.choice(("heads", "grouped", "latent")),
        each=r.random() < 0.4,
        spelled=r.random() < 0.25,
        rotary=r.random() < 0.6,
        grams=r.random() < 0.4,
    )


def draw_broken(seed: int, deepest: int = 8) -> Form:
    """A random form without a boundary, or with something that stands against a split; kinds take turns."""
    form = draw(1000 + seed, deepest)
    r = random.Random(seed)
    kind, depth = BREAKS[seed % len(BREAKS)], len(form.own)
    if kind in ("decoder only", "windows only"):
        own = (*(r.choice((0, 5)) for _ in form.own[:-1]), 0)
        own = own if kind == "decoder only" else tuple(r.choice((2, 4, 9)) for _ in own)
        return replace(form, own=own, shares=(False,) * depth, broken=kind)
    if kind == "own keys above":
        while sum(form.shares[:-1]) < 2:  # sharing must be there without the last layer
            form = draw(r.randrange(10**6), max(4, deepest))
        return replace(
            form, own=(*form.own[:-1], 0), shares=(*form.shares[:-1], False), broken=kind, at=len(form.own) - 1
        )
    anywhere = kind in ("sees later tokens", "running total")
    at = r.randrange(depth) if anywhere else r.randrange(form.boundary, depth)
    if kind == "sees later tokens" and form.own[at] is None:
        return replace(form, broken=kind, at=0)
    return replace(form, broken=kind, at=at)


class Norm(nn.Module):
    """Layer norm, or the rms norm with or without a weight."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(0.5 + torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "layer":
            return F.layer_norm(x, (WIDTH,), self.weight)
        return F.rms_norm(x, (WIDTH,), self.weight if self.kind == "rms" else None, 1e-5)


class Places:
    """What depends on positions [B, T] alone, made once: rotary tables and what a window sees."""

    def __init__(self, positions: Tensor) -> None:
        angles = positions[:, None, :, None] * torch.tensor([0.3 / (i % 3 + 1) for i in range(WIDTH // HEADS)])
        self.cos, self.sin = angles.cos(), angles.sin()
        self.age = positions[:, None, :, None] - positions[:, None, None, :]
        self.known: dict[int, Tensor] = {}

    def turned(self, x: Tensor) -> Tensor:
        """Rotary over halves, x [B, H, T, D]."""
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def visible(self, window: int) -> Tensor:
        """bool [B, 1, T, T]: keys up to the query, the newest `window` of them, all for 0."""
        if window not in self.known:
            seen = self.age >= 0
            self.known[window] = seen & (self.age < window) if window else seen
        return self.known[window]


class Keys(nn.Module):
    """Keys and values [B, H, T, D] of x [B, T, WIDTH], repeated to all heads; latent: the same for both."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form, self.norm = form, Norm(form.norm)
        self.count = {"heads": HEADS, "grouped": 2, "latent": 1}[form.keys]
        self.k = nn.Linear(WIDTH, self.count * WIDTH // HEADS)
        self.v = nn.Linear(WIDTH, self.count * WIDTH // HEADS)

    def forward(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        k = self.k(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        k = places.turned(k) if self.form.rotary else k
        v = k if self.form.keys == "latent" else self.v(x).unflatten(-1, (self.count, -1)).transpose(1, 2)
        return tuple(t.repeat_interleave(HEADS // self.count, dim=1) for t in (k, v))  # type: ignore[return-value]


class Attention(nn.Module):
    """Queries of x over given keys and values, the newest `window` of them, all for 0; `later`: those behind, too."""

    def __init__(self, form: Form, window: int, later: bool) -> None:
        super().__init__()
        self.form, self.window, self.later, self.norm = form, window, later, Norm(form.norm)
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, keys: tuple[Tensor, Tensor], places: Places) -> Tensor:
        q = self.q(self.norm(x)).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        q = places.turned(q) if self.form.rotary else q
        visible = places.visible(self.window)
        if self.form.spelled and not self.later:
            scores = (q @ keys[0].transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(~visible, float("-inf"))
            out = scores.softmax(-1) @ keys[1]
        else:
            out = F.scaled_dot_product_attention(q, *keys, attn_mask=None if self.later else visible)
        return self.o(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """One layer: its attentions and its feed-forward, each read from and added to the streams."""

    def __init__(self, form: Form, index: int) -> None:
        super().__init__()
        self.form, self.index = form, index
        window = form.own[index]
        broken = form.broken if form.at == index else ""
        self.broken = broken
        self.own = None if window is None else Attention(form, window, broken == "sees later tokens")
        self.keys = None if window is None else Keys(form)
        self.cross = Attention(form, 0, False) if form.shares[index] else None
        self.shared = Keys(form) if form.shares[index] and form.each else None
        self.norm = Norm(form.norm)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.read = nn.Parameter(torch.rand(3, form.streams))
        self.write = nn.Parameter(0.3 + torch.rand(3, form.streams))
        self.pre = nn.Linear(WIDTH, form.streams) if form.shifted else None
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3) if broken == "convolution above" else None

    def forward(self, state: State, places: Places, kv: Shared | None, grams: Tensor) -> State:
        if self.own is not None and self.keys is not None:
            x = state.read(self.read[0])
            state = state.add(self.own(x, self.keys(x, places), places), self.write[0], self.pre)
        if self.cross is not None and kv is not None:
            x = state.read(self.read[1])
            keys = kv.keys if self.shared is None else self.shared(kv.value, places)
            assert keys is not None
            state = state.add(self.cross(x, keys, places), self.write[1], self.pre)
        x = self.spoil(state.read(self.read[2]), grams)
        return state.add(self.down(F.silu(self.up(self.norm(x)))), self.write[2], self.pre)

    def spoil(self, x: Tensor, grams: Tensor) -> Tensor:
        """x, or what breaks the split made of it."""
        if self.broken == "n-grams above":
            return x + F.one_hot((grams[..., 0] * 5 + grams[..., 1]) % WIDTH, WIDTH)
        if self.broken == "shift above":
            return x + F.pad(x, (0, 0, 1, 0))[:, :-1]
        if self.conv is not None:
            return x + self.conv(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)
        return x + 0.1 * x.cumsum(1) if self.broken == "running total" else x


@dataclass(frozen=True)
class Shared:
    """The boundary's value and the keys made of it once for all, if they are."""

    value: Tensor
    keys: tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class State:
    """Residual streams, as one tensor [B, T, S, WIDTH] or as S of [B, T, WIDTH]; the weights of the next read."""

    streams: tuple[Tensor, ...]
    stacked: bool
    next: Tensor | None = None

    def read(self, weights: Tensor) -> Tensor:
        """One tensor of all streams."""
        if self.stacked:
            used = weights if self.next is None else self.next
            return (self.streams[0] * used.unsqueeze(-1)).sum(2)
        return sum((s * w for s, w in zip(self.streams, weights.unbind())), torch.zeros(()))

    def add(self, y: Tensor, weights: Tensor, pre: nn.Module | None) -> State:
        """The state with a sublayer's result in every stream."""
        if not self.stacked:
            return replace(self, streams=tuple(s + y * w for s, w in zip(self.streams, weights.unbind())))
        streams = self.streams[0] + y.unsqueeze(2) * weights.unsqueeze(-1)
        return State((streams,), True, None if pre is None else pre(streams.mean(2)).sigmoid())


class Decoder(nn.Module):
    """Ids and positions [B, T] to logits [B, T, VOCAB], or (logits, features) where features lie on both sides."""

    def __init__(self, form: Form, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.form = form
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.memory = nn.Embedding(97, WIDTH) if form.grams else None
        self.layers = nn.ModuleList([Layer(form, i) for i in range(len(form.own))])
        self.shared = None if form.each or not any(form.shares) else Keys(form)
        self.enter = nn.Parameter(0.5 + torch.rand(form.streams))
        self.leave, self.at = nn.Parameter(torch.rand(form.streams)), nn.Parameter(torch.rand(form.streams))
        self.norm, self.head = Norm(form.norm), nn.Linear(WIDTH, VOCAB)
        self.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x, places = self.embed(input_ids), Places(position_ids)
        grams = input_ids
        if self.memory is not None or self.form.broken == "n-grams above":
            padded = F.pad(input_ids, (2, 0))
            grams = torch.stack([padded[:, 2 - i : 2 - i + input_ids.shape[1]] for i in range(3)], -1)
        if self.memory is not None:
            x = x + self.memory((grams * torch.tensor([1, 7, 31])).sum(-1) % 97)
        state = State(tuple(x * w for w in self.enter.unbind()), False)
        if self.form.stacked:
            state = State((torch.stack(state.streams, 2),), True)
        kv: Shared | None = None
        features = []
        for i, layer in enumerate(self.layers):
            if i == self.form.boundary:
                value = state.read(self.at)
                kv = Shared(value, None if self.shared is None else self.shared(value, places))
            if i in (self.form.boundary - 1, len(self.form.own) - 1):
                features.append(state.streams[0])
            state = layer(state, places, kv, grams)
        logits = self.head(self.norm(state.read(self.leave)))
        if self.form.broken == "features on both sides":
            return logits, torch.cat([f.flatten(2) for f in features], -1)
        return logits


def raised(form: Form, seed: int = 0) -> Program:
    """The captured decoder with its attention raised, which is all that the analysis needs."""
    return Pipeline((Canonicalize(), RaiseAttention())).run(capture(Decoder(form, seed)))[0]
