"""Packed rows: the operations give the bytes and the numbers of the model's own formats, on every edge of these."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_compile import ops
from deepinfer_compile.match_packed import probes
from deepinfer_compile.models.deepseek_v41.storage import KEYS, ROWS, WINDOW, Grid
from deepinfer_compile.ops.packed import FORMS, row_bytes, row_width

GRIDS = {"window": WINDOW, "rows": ROWS, "keys": KEYS, "fine": Grid(8, 16, False, 448.0, 448 * 2.0**-9)}


def form_of(grid: Grid) -> list[int]:
    return [grid.bits, grid.group, int(grid.powers)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", list(GRIDS))
def test_bytes_and_numbers_are_those_of_the_format(kind: str, dtype: torch.dtype) -> None:
    grid = GRIDS[kind]
    rows = probes((70, 3, 96), dtype, grid.largest)
    got = torch.ops.deepinfer.pack_rows(rows, form_of(grid), grid.largest, grid.least)
    want = grid.store(rows)
    finite = rows.float().isfinite().all(-1)
    assert not finite.all()
    assert torch.equal(got[finite], want[finite])
    for read in (torch.float32, torch.bfloat16, torch.float64):
        numbers = torch.ops.deepinfer.unpack_rows(got, form_of(grid), read)
        assert numbers.dtype == read
        torch.testing.assert_close(numbers, grid.load(want, read), rtol=0, atol=0, equal_nan=True)
    groups = numbers.isnan().unflatten(-1, (-1, grid.group))
    broken = ~rows.float().isfinite().unflatten(-1, (-1, grid.group)).all(-1)
    assert torch.equal(groups.all(-1), broken)
    assert torch.equal(groups.any(-1), broken)


@given(st.sampled_from(FORMS), st.integers(1, 9))
def test_a_width_follows_from_its_bytes(form: tuple[int, int, int], groups: int) -> None:
    width = groups * form[1]
    assert row_width(row_bytes(width, form), form) == width


@given(st.sampled_from(FORMS), st.integers(0, 2**31 - 1), st.floats(1e-3, 1e3))
def test_rounding_again_changes_nothing(form: tuple[int, int, int], seed: int, size: float) -> None:
    """Numbers of a format are their own nearest, where the largest of a group keeps its scale."""
    largest = 6.0 if form[0] == 4 else 448.0
    rows = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)) * size
    rows[:, :: form[1]] = largest * 2.0**-3
    rows = rows.clamp(-largest * 2.0**-3, largest * 2.0**-3)
    once = ops.UNPACK_ROWS.reference(ops.PACK_ROWS.reference(rows, form, largest, 1e-2), form, torch.float32)
    again = ops.UNPACK_ROWS.reference(ops.PACK_ROWS.reference(once, form, largest, 1e-2), form, torch.float32)
    assert torch.equal(once, again)
    step = 1.0 if form[0] == 4 else 16.0
    assert float((once - rows).abs().max()) <= step * 2.0**-3
    assert torch.equal(once[:, :: form[1]], rows[:, :: form[1]])


def test_published_rows_have_their_bytes() -> None:
    assert [row_bytes(512, form_of(WINDOW)), row_bytes(512, form_of(ROWS)), row_bytes(128, form_of(KEYS))] == [
        528,
        288,
        68,
    ]
