"""Rows in a few bits with scales: what caches of block-scaled formats hold.

A form is three whole numbers: bits of a number (4: e2m1, two a byte, the low half first; 8: e4m3), numbers that share a
scale, and whether scales are powers of two (e8m0) or e4m3. A row is its numbers' bytes and then one byte for each scale
(OCP Microscaling Formats v1.0, section 5; e4m3 scales of 16 as NVFP4 has them, without a global scale).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from deepinfer_compile.ops.registry import Work, define, size_bytes

FORMS = tuple((bits, group, powers) for bits in (4, 8) for group in (16, 32, 64, 128) for powers in (0, 1))
"""What operations and kernels know."""
E4M3_MAX = 448.0
QUIET_NAN, TINY = 0x7FC00000, 0x00400000
"""The bits of NaN and of 2 ** -127 in fp32."""


def stored_type(dtype: torch.dtype, form: Sequence[int] | None) -> torch.dtype:
    """Of what a cache holds of rows that are computed in a dtype."""
    return torch.uint8 if form else dtype


def row_bytes(width: int, form: Sequence[int]) -> int:
    """Bytes of a row of `width` numbers, a multiple of the group."""
    bits, group, _ = form
    return width * bits // 8 + width // group


def row_width(nbytes: int, form: Sequence[int]) -> int:
    """Numbers of a row of so many bytes."""
    bits, group, _ = form
    return nbytes // (group * bits // 8 + 1) * group


def _power_code(scale: Tensor) -> Tensor:
    """The e8m0 code of the smallest power of two that is not below scale, fp32 from 2 ** -126; 255 for NaN."""
    bits = scale.view(torch.int32)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return torch.where(scale.isnan(), 255, code).to(torch.uint8)


def _factor(code: Tensor, powers: int) -> Tensor:
    """The scale of a code, fp32."""
    if not powers:
        return code.view(torch.float8_e4m3fn).float()
    exponent = code.to(torch.int32)
    bits = torch.where(exponent == 0, TINY, exponent << 23)
    return torch.where(exponent == 255, QUIET_NAN, bits).view(torch.float32)


def _code4(numbers: Tensor) -> Tensor:
    """e2m1 codes of numbers from -6 to 6, to nearest, ties to even."""
    size = numbers.abs()
    code = (size > 0.25).to(torch.uint8)
    for edge, even in ((0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True), (5.0, False)):
        code = code + ((size >= edge) if even else (size > edge)).to(torch.uint8)
    return code + 8 * numbers.signbit().to(torch.uint8)


def _number4(code: Tensor) -> Tensor:
    """The e2m1 number of a code, fp32."""
    size = (code & 7).float()
    value = torch.where(size < 4, size * 0.5, torch.where(size < 6, size - 2.0, size * 2.0 - 8.0))
    return torch.where(code >= 8, -value, value)


def _pack_rows(x: Tensor, form: Sequence[int], largest: float, least: float) -> Tensor:
    bits, group, powers = form
    groups = x.float().unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1).clamp(min=least) / largest
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    code = _power_code(scale) if powers else scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)
    numbers = (groups / _factor(code, powers).unsqueeze(-1)).clamp(-largest, largest).flatten(-2)
    if bits == 8:
        return torch.cat((numbers.to(torch.float8_e4m3fn).view(torch.uint8), code), dim=-1)
    low, high = _code4(numbers).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat((low | (high << 4), code), dim=-1)


PACK_ROWS = define(
    "pack_rows(Tensor x, int[] form, float largest, float least) -> Tensor",
    reference=_pack_rows,
    fake=lambda x, form, largest, least: x.new_empty(
        (*x.shape[:-1], row_bytes(int(x.shape[-1]), form)), dtype=torch.uint8
    ),
    work=lambda x, form, largest, least: Work(
        3 * x.numel(), size_bytes(x) + x.numel() // x.shape[-1] * row_bytes(x.shape[-1], form)
    ),
)
"""x [..., D] -> u8 [..., bytes]: numbers to nearest, ties to even, in fp32. A scale brings its group's largest
magnitude, taken as `least` or more, to `largest`; e4m3 scales are rounded and at most 448, powers of two are rounded
up. A group whose largest is not finite has a scale of NaN."""


def _unpack_rows(stored: Tensor, form: Sequence[int], dtype: torch.dtype) -> Tensor:
    bits, group, powers = form
    width = row_width(stored.shape[-1], form)
    data, code = stored.split((width * bits // 8, width // group), dim=-1)
    if bits == 8:
        numbers = data.contiguous().view(torch.float8_e4m3fn).float()
    else:
        numbers = _number4(torch.stack((data & 15, data >> 4), dim=-1).flatten(-2))
    factor = _factor(code.contiguous(), powers)
    rows: Tensor = (numbers.unflatten(-1, (-1, group)) * factor.unsqueeze(-1)).flatten(-2)
    return rows.to(dtype)


def _unpack_work(stored: Tensor, form: Sequence[int], dtype: torch.dtype) -> Work:
    numbers = stored.numel() // stored.shape[-1] * row_width(stored.shape[-1], form)
    return Work(numbers, size_bytes(stored) + numbers * dtype.itemsize)


UNPACK_ROWS = define(
    "unpack_rows(Tensor stored, int[] form, ScalarType dtype) -> Tensor",
    reference=_unpack_rows,
    fake=lambda stored, form, dtype: stored.new_empty(
        (*stored.shape[:-1], row_width(int(stored.shape[-1]), form)), dtype=dtype
    ),
    work=_unpack_work,
)
"""u8 [..., bytes] -> [..., D] in dtype, a product in fp32, which bf16 and wider hold exactly for scales from 2 ** -126
on."""


def read_rows(stored: Tensor, form: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Rows of a cache as numbers: unpacked, or for form () as they are, both in dtype."""
    return _unpack_rows(stored, form, dtype) if form else stored.to(dtype)
