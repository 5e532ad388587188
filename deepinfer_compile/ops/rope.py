"""Rotary position embedding (Su et al., arXiv 2104.09864): its tables, and their use on queries or keys.

Styles differ in which channels form a pair: `half` pairs channel i with i + D/2, `pair` pairs 2i with 2i + 1,
`pair_to_half` reads adjacent pairs and writes halves (the first elements of all pairs, then the second ones). Tables
have the angle of a frequency `once`, or twice: as `halves` (all frequencies, and again), or as `pairs` beside each
other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes, wide

STYLES = ("half", "pair", "pair_to_half")
FORMS = ("once", "halves", "pairs")


def _rope(x: Tensor, cos: Tensor, sin: Tensor, style: str) -> Tensor:
    if style not in STYLES:
        raise ValueError(f"rotary styles are {STYLES}, not {style!r}")
    half = x.shape[-1] // 2
    first, second = (x[..., :half], x[..., half:]) if style == "half" else (x[..., 0::2], x[..., 1::2])
    doubled = cos.shape[-1] == x.shape[-1]
    c1, s1 = (cos[..., :half], sin[..., :half]) if doubled else (cos, sin)
    c2, s2 = (cos[..., half:], sin[..., half:]) if doubled else (cos, sin)
    a = first * c1 - second * s1
    b = second * c2 + first * s2
    if style == "pair":
        return torch.stack([a, b], -1).flatten(-2).to(x.dtype)
    return torch.cat([a, b], -1).to(x.dtype)


ROPE = define(
    "rope(Tensor x, Tensor cos, Tensor sin, str style) -> Tensor",
    reference=_rope,
    fake=lambda x, cos, sin, style: torch.empty_like(x, memory_format=torch.contiguous_format),
    work=lambda x, cos, sin, style: Work(3 * x.numel(), 2 * size_bytes(x) + size_bytes(cos, sin)),
)
"""x [..., T, D], cos and sin broadcastable to [..., T, D] (both halves given) or [..., T, D / 2] -> x's shape and
dtype; the products are formed in the wider dtype of x and the tables."""


def _partial_rope(x: Tensor, cos: Tensor, sin: Tensor, style: str, start: int, width: int, inverse: bool) -> Tensor:
    turned = _rope(x[..., start : start + width], cos, -sin if inverse else sin, style)
    return torch.cat((x[..., :start], turned, x[..., start + width :]), -1)


PARTIAL_ROPE = define(
    "partial_rope(Tensor x, Tensor cos, Tensor sin, str style, int start, int width, bool inverse) -> Tensor",
    reference=_partial_rope,
    fake=lambda x, *rest: torch.empty_like(x, memory_format=torch.contiguous_format),
    work=lambda x, cos, sin, style, start, width, inverse: Work(
        3 * x.numel() * width // x.shape[-1], 2 * size_bytes(x) + size_bytes(cos, sin)
    ),
)
"""x [..., T, D] -> the same with `width` channels from `start` turned as by `rope`, the others as they are. inverse:
turned back."""


def _complex_rope_table(table: Tensor) -> tuple[Tensor, Tensor]:
    parts = torch.view_as_real(table)
    return parts[..., 0].contiguous(), parts[..., 1].contiguous()


COMPLEX_ROPE_TABLE = define(
    "complex_rope_table(Tensor table) -> (Tensor, Tensor)",
    reference=_complex_rope_table,
    fake=lambda table: (
        torch.empty(table.shape, dtype=table.real.dtype, device=table.device),
        torch.empty(table.shape, dtype=table.real.dtype, device=table.device),
    ),
    work=lambda table: Work(0, 2 * size_bytes(table)),
)
"""A complex table e^(i t) [..., D / 2] -> (cos, sin), real, in the table's precision."""


def _rotary_table(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, form: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    if form not in FORMS:
        raise ValueError(f"forms of a rotary table are {FORMS}, not {form!r}")
    frequencies = wide(inv_freq)
    angles = position_ids.to(frequencies.dtype).unsqueeze(-1) * frequencies
    if form == "halves":
        angles = torch.cat([angles, angles], -1)
    elif form == "pairs":
        angles = angles.repeat_interleave(2, -1)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def _fake_table(
    position_ids: Tensor, inv_freq: Tensor, scaling: float, form: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    shape = (*position_ids.shape, inv_freq.shape[0] * (1 if form == "once" else 2))
    return position_ids.new_empty(shape, dtype=dtype), position_ids.new_empty(shape, dtype=dtype)


def _table_work(position_ids: Tensor, inv_freq: Tensor, scaling: float, form: str, dtype: torch.dtype) -> Work:
    elements = 2 * int(position_ids.numel()) * inv_freq.shape[0] * (1 if form == "once" else 2)
    return Work(elements, size_bytes(position_ids, inv_freq) + elements * dtype.itemsize)


ROTARY_TABLE = define(
    "rotary_table(Tensor position_ids, Tensor inv_freq, float scaling, str form, ScalarType dtype) -> (Tensor, Tensor)",
    reference=_rotary_table,
    fake=_fake_table,
    work=_table_work,
)
"""position_ids integers [..., T], inv_freq [F] -> (cos, sin) [..., T, F or 2 F] of positions times frequencies, times
`scaling`, in `dtype`. Angles, their functions and the scaling are in fp32 (fp64 for fp64 inv_freq)."""
