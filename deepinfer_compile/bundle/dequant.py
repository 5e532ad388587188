"""The arithmetic of block-scaled checkpoints: FP8 with a grid of scales, and MXFP4.

Each value is the float32 product of its number and its scale, cast to the destination: exact for power-of-two scales,
and the order in which the checkpoints' own loaders round. Work goes in strips of rows, so that memory stays near the
size of the destination. Scales carry a declared storage order, because for a square grid no shape check can tell a
transposed one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer_compile.errors import WeightMismatch

LAYOUTS = ("row", "column")
"""Order of a scale grid [N / bn, K / bk] in memory: "row" = [N / bn, K / bk], "column" = its transpose."""
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
"""uint8 scales are E8M0 exponents: 2 ** (byte - 127), 255 is NaN."""

_STRIP = 1 << 20
"""Elements dequantised at once."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
MX_GROUP = 32
"""Values that share one MXFP4 scale."""


def grid_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The scale grid [..., ceil(N / bn), ceil(K / bk)] of a weight [..., N, K]."""
    rows, columns = shape[-2:]
    return (*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))


def stored_grid_shape(shape: tuple[int, ...], block: tuple[int, int], layout: str) -> tuple[int, ...]:
    """The shape under which the grid of `grid_shape` is stored in a file."""
    grid = grid_shape(shape, block)
    return grid if layout == "row" else (*grid[:-2], grid[-1], grid[-2])


def fp8_block_into(out: Tensor, weight: Tensor, scale: Tensor, block: tuple[int, int], layout: str, name: str) -> None:
    """out[..., i, j] = weight[..., i, j] * grid[..., i // bn, j // bk], rounded to out's dtype.

    weight: float8 [..., N, K]; scale: as `stored_grid_shape`, or one value where the grid is one value. Raises
    WeightMismatch naming `name` when a shape or the order in memory is not the declared one.
    """
    grid = scale_grid(weight, scale, block, layout, name)
    column_of = torch.arange(weight.shape[-1], device=grid.device) // block[1]
    for to, numbers, factors in zip(_matrices(out), _matrices(weight), _matrices(grid), strict=True):
        for lo, hi in _strips(*numbers.shape):
            row_of = torch.arange(lo, hi, device=grid.device) // block[0]
            to[lo:hi].copy_(numbers[lo:hi].to(torch.float32).mul_(factors[row_of][:, column_of]))


def scale_grid(weight: Tensor, scale: Tensor, block: tuple[int, int], layout: str, name: str) -> Tensor:
    """The scales as float32 [..., N / bn, K / bk]. Raises WeightMismatch when their order in memory is not `layout`."""
    if not weight.is_contiguous():
        raise WeightMismatch(tensor=name, expected="row-major blocks", found=f"strides {tuple(weight.stride())}")
    shape = tuple(weight.shape)
    grid, stored = grid_shape(shape, block), stored_grid_shape(shape, block, layout)
    if scale.numel() == 1 and all(size == 1 for size in grid):
        return _scale_values(scale).reshape(grid)
    if tuple(scale.shape) == stored and scale.is_contiguous():
        return _scale_values(scale) if layout == "row" else _scale_values(scale).transpose(-1, -2)
    if layout == "column" and tuple(scale.shape) == grid and scale.transpose(-1, -2).is_contiguous():
        return _scale_values(scale)
    found = f"{list(scale.shape)} with strides {tuple(scale.stride())}"
    raise WeightMismatch(tensor=name, expected=f"scales {list(stored)} in {layout} order", found=found)


def _scale_values(scale: Tensor) -> Tensor:
    scale = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
    return scale.to(torch.float32)


def mxfp4_into(out: Tensor, blocks: Tensor, scales: Tensor, name: str) -> None:
    """Unpack two E2M1 values a byte, low nibble first, times 2 ** (scale - 127) for each group of 32.

    blocks: u8 or i8 [..., G, 16] or [..., G * 16]; scales: u8 or float8_e8m0fnu [..., G]; out: [..., G * 32], any
    floating dtype. Raises WeightMismatch naming `name`.
    """
    groups = scales.shape[-1]
    if out.shape != (*scales.shape[:-1], groups * MX_GROUP) or blocks.numel() * 2 != out.numel():
        found = f"blocks {list(blocks.shape)}, scales {list(scales.shape)}"
        raise WeightMismatch(tensor=name, expected=f"MXFP4 blocks and scales for {list(out.shape)}", found=found)
    table = torch.tensor(_E2M1, dtype=torch.float32, device=blocks.device)
    packed = blocks.contiguous().view(torch.uint8).reshape(*scales.shape[:-1], groups * MX_GROUP // 2)
    for to, numbers, factors in zip(_matrices(out), _matrices(packed), _matrices(_scale_values(scales)), strict=True):
        for lo, hi in _strips(*to.shape):
            strip = numbers[lo:hi].to(torch.int32)
            pairs = torch.stack((table[strip & 15], table[strip >> 4]), dim=-1).reshape(hi - lo, groups, MX_GROUP)
            to[lo:hi].copy_((pairs * factors[lo:hi, :, None]).reshape(hi - lo, groups * MX_GROUP))


def _matrices(tensor: Tensor) -> Iterator[Tensor]:
    """Views [N, K] of a tensor [..., N, K], or [1, K] of a vector."""
    whole = tensor if tensor.dim() > 1 else tensor.unsqueeze(0)
    for index in itertools.product(*(range(size) for size in whole.shape[:-2])):
        yield whole[index]


def _strips(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """(first row, end row) in pieces of about `_STRIP` elements."""
    step = max(1, _STRIP // max(1, columns))
    for lo in range(0, rows, step):
        yield lo, min(rows, lo + step)
