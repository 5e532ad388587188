"""A decoder whose upper layers share keys and values made once, as in YOCO, in plain PyTorch.

Odd on purpose: 6 query heads over 2 key heads, width 36, vocabulary 211, a window in one lower layer. The lower layers
keep keys of their own; `wk` and `wv` make the keys that all upper layers read, of the state between the halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, HEADS, KV_HEADS, HEAD = 211, 36, 6, 2, 12


@dataclass(frozen=True)
class Form:
    """lower: windows of the lower layers, 0 for none. upper: layers that read the shared keys, each with a window of
    its own before that (0: it has no keys of its own). lists: whether both halves are in one list of layers."""

    lower: tuple[int, ...] = (0, 7)
    upper: tuple[int, ...] = (0, 0, 0)
    one_list: bool = True


class Norm(nn.Module):
    """x / rms(x) * weight over the last axis."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Places:
    """Rotary tables and masks of T positions."""

    def __init__(self, length: int) -> None:
        at = torch.arange(length)
        angle = at[:, None] * 100.0 ** (-torch.arange(0, HEAD, 2) / HEAD)
        self.cos, self.sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        self.age = at[:, None] - at[None, :]

    def turned(self, x: Tensor) -> Tensor:
        """x [B, H, T, D] rotated."""
        a, b = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin

    def visible(self, window: int) -> Tensor:
        """Which keys a query sees, bool [T, T]."""
        seen = self.age >= 0
        return seen & (self.age < window) if window else seen


class Keys(nn.Module):
    """Keys and values [B, KV_HEADS, T, HEAD] of x [B, T, WIDTH]."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.wk, self.wv = (nn.Linear(WIDTH, KV_HEADS * HEAD, bias=False) for _ in range(2))

    def forward(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        x = self.norm(x)
        k, v = (w(x).unflatten(-1, (KV_HEADS, HEAD)).transpose(1, 2) for w in (self.wk, self.wv))
        return places.turned(k), v


class Attention(nn.Module):
    """Queries of x over given keys."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window, self.norm = window, Norm()
        self.wq, self.wo = (nn.Linear(a, b, bias=False) for a, b in ((WIDTH, HEADS * HEAD), (HEADS * HEAD, WIDTH)))

    def forward(self, x: Tensor, keys: tuple[Tensor, Tensor], places: Places) -> Tensor:
        q = places.turned(self.wq(self.norm(x)).unflatten(-1, (HEADS, HEAD)).transpose(1, 2))
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in keys)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=places.visible(self.window))
        return self.wo(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention to its own keys, if window is not None, then to shared ones, if it has any, then a feed-forward."""

    def __init__(self, window: int | None, shares: bool) -> None:
        super().__init__()
        self.keys = None if window is None else Keys()
        self.own = None if window is None else Attention(window)
        self.cross = Attention(0) if shares else None
        self.norm = Norm()
        self.up, self.gate = (nn.Linear(WIDTH, 52, bias=False) for _ in range(2))
        self.down = nn.Linear(52, WIDTH, bias=False)

    def forward(self, x: Tensor, shared: tuple[Tensor, Tensor] | None, places: Places) -> Tensor:
        if self.own is not None and self.keys is not None:
            x = x + self.own(x, self.keys(x, places), places)
        if self.cross is not None and shared is not None:
            x = x + self.cross(x, shared, places)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Yoco(nn.Module):
    """input_ids [B, T] -> logits [B, T, VOCAB]."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.embed = nn.Embedding(VOCAB, WIDTH)
        lower = [Layer(window, False) for window in form.lower]
        upper = [Layer(window or None, True) for window in form.upper]
        self.layers = nn.ModuleList([*lower, *upper] if form.one_list else lower)
        self.cross = nn.ModuleList([] if form.one_list else upper)
        self.shared = Keys()
        self.norm, self.head = Norm(), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x, places = self.embed(input_ids), Places(input_ids.shape[1])
        keys: tuple[Tensor, Tensor] | None = None
        for i, layer in enumerate((*self.layers, *self.cross)):
            if i == len(self.form.lower):
                keys = self.shared(x, places)
            x = layer(x, keys, places)
        return self.head(self.norm(x))


def make_yoco(form: Form = Form(), seed: int = 0) -> Yoco:
    """A random model in eval mode."""
    torch.manual_seed(seed)
    return Yoco(form).eval()


def eager_tokens(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole sequence read anew for each."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
