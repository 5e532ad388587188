"""How caches hold their rows: as the model computes them, or in the bytes of the published formats.

The released model was trained with its caches rounded, so the grids are part of what it computes: window latents as
e4m3 with a power of two for 32 channels, rows of the global cache as e2m1 with an e4m3 scale for 16, index keys as
e2m1 with a power of two for 32. Index queries are rounded like keys. Attention always reads back what was stored, in
a whole sequence too, so that prompts and steps see the same values. Rounding twice is not rounding once where scales
are tiny, which is why caches hold the bytes themselves and not rounded numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of the 4-bit format by code; the sign is the fourth bit."""

E4M3_MAX = 448.0


class Form(Protocol):
    """A storage format of rows [..., D]."""

    def store(self, x: Tensor) -> Tensor:
        """What the cache holds, [..., bytes or values]."""
        ...

    def load(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [..., D] again."""
        ...


class Plain:
    """Rows as they are."""

    def store(self, x: Tensor) -> Tensor:
        return x

    def load(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        return stored


@dataclass(frozen=True)
class Grid:
    """Numbers in `bits` (4: e2m1, two a byte, low half first; 8: e4m3), then one scale byte for `group` of them.

    A scale brings its group's largest magnitude, taken as `least` or more, to `largest`: rounded to e4m3, or, if
    `powers`, up to a power of two (e8m0). Numbers are rounded to nearest, ties to even. The largest e4m3 scale is
    448; a group whose maximum is not finite becomes NaN.
    """

    bits: int
    group: int
    powers: bool
    largest: float
    least: float

    def nbytes(self, width: int) -> int:
        """Bytes of a row of `width` channels."""
        return width * self.bits // 8 + width // self.group

    def store(self, x: Tensor) -> Tensor:
        """Bytes u8 [..., nbytes] of x [..., D], D a multiple of the group."""
        groups = x.float().unflatten(-1, (-1, self.group))
        scale = groups.abs().amax(-1).clamp(min=self.least) / self.largest
        scale = scale.masked_fill(~scale.isfinite(), float("nan"))
        kept = _up_to_power(scale) if self.powers else scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
        numbers = (groups / kept.float().unsqueeze(-1)).clamp(-self.largest, self.largest).flatten(-2)
        return torch.cat((self._bytes(numbers), kept.view(torch.uint8)), dim=-1)

    def load(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows [..., D] of bytes; exact in every dtype from bf16 up."""
        per_group = self.group * self.bits // 8
        groups = stored.shape[-1] // (per_group + 1)
        data, scale = stored.split((groups * per_group, groups), dim=-1)
        kind = torch.float8_e8m0fnu if self.powers else torch.float8_e4m3fn
        factors = scale.contiguous().view(kind).float()
        rows: Tensor = (self._numbers(data).unflatten(-1, (groups, self.group)) * factors.unsqueeze(-1)).flatten(-2)
        return rows.to(dtype)

    def _bytes(self, numbers: Tensor) -> Tensor:
        if self.bits == 8:
            return numbers.to(torch.float8_e4m3fn).view(torch.uint8)
        size = numbers.abs()
        step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
        levels = torch.tensor(E2M1, device=numbers.device)
        codes = torch.searchsorted(levels, (size / step).round() * step) + 8 * numbers.signbit()
        low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
        packed: Tensor = low | high << 4
        return packed

    def _numbers(self, data: Tensor) -> Tensor:
        if self.bits == 8:
            return data.contiguous().view(torch.float8_e4m3fn).float()
        table = torch.tensor((*E2M1, *(-level for level in E2M1)), device=data.device)
        return table[torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).long()]


class Forms(NamedTuple):
    """The formats of a model's caches."""

    window: Form
    rows: Form
    keys: Form


PLAIN = Forms(Plain(), Plain(), Plain())
WINDOW = Grid(bits=8, group=32, powers=True, largest=E4M3_MAX, least=1e-4)
ROWS = Grid(bits=4, group=16, powers=False, largest=6.0, least=6 * 2.0**-9)
KEYS = Grid(bits=4, group=32, powers=True, largest=6.0, least=6 * 2.0**-126)
PUBLISHED = Forms(WINDOW, ROWS, KEYS)


def check_widths(config: DeepseekV41Config, forms: Forms) -> None:
    """Raises BadModelConfig if a cache's rows are not whole groups of its format."""
    widths = (("head_dim", forms.window), ("head_dim", forms.rows), ("index_head_dim", forms.keys))
    for key, form in widths:
        if isinstance(form, Grid) and getattr(config, key) % form.group:
            reason = f"its cache has one scale for {form.group} channels"
            raise BadModelConfig(key=key, value=getattr(config, key), reason=reason)


def _up_to_power(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x > 0, fp32, as e8m0; NaN for NaN."""
    part, exponent = torch.frexp(x)
    power = torch.ldexp(torch.ones_like(x), torch.where(part > 0.5, exponent, exponent - 1))
    return torch.where(x.isnan(), x, power).to(torch.float8_e8m0fnu)
