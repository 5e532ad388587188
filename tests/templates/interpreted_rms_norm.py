"""rms_norm in Triton's interpreter: what lies past the end of a row, and beside it, changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, specs
from tests.triton_interpreter import run

SPEC = next(s for s in specs() if s.op is ops.RMS_NORM)
ADD = next(s for s in specs() if s.op is ops.ADD_RMS_NORM)


def call(x: torch.Tensor, weight: torch.Tensor | None, folder: Path, rows: int = 1, **options: Any) -> torch.Tensor:
    given = {"x": x, "weight": weight, "eps": 1e-6, "offset": 0.0, "cast_first": True, **options}
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    (made,) = run(SPEC, params, SPEC.config(rows, 1), given, folder)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 5, 127, 128, 129])
def test_gen_1_neighbours_do_not_count(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(size)
    inner = torch.randn(3, size, generator=generator).to(dtype)
    weight = torch.randn(size, generator=generator).to(dtype)
    made = []
    for poison in (0.0, math.nan, 1e30, -math.inf):
        wide = torch.full((3, size + 7), poison, dtype=dtype)
        wide[:, 3 : 3 + size] = inner
        wide_weight = torch.full((size + 9,), poison, dtype=dtype)
        wide_weight[:size] = weight
        made += [call(wide[:, 3 : 3 + size], wide_weight[:size], tmp_path, rows) for rows in (1, 4)]
    assert all(torch.equal(made[0], other) for other in made)
    wanted = ops.RMS_NORM.reference(inner, weight, 1e-6, 0.0, True)
    assert torch.allclose(made[0].double(), wanted.double(), rtol=1e-6 if dtype == torch.float32 else 0, atol=1e-6)


def test_bf16_rounds_where_the_reference_does(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 300, generator=generator).bfloat16()
    weight = torch.randn(300, generator=generator).bfloat16()
    for options in ({}, {"offset": 1.0}, {"cast_first": False}, {"cast_first": False, "offset": 1.0}):
        usual = {"eps": 1e-6, "offset": 0.0, "cast_first": True, **options}
        wanted = ops.RMS_NORM.reference(x, weight, *usual.values())
        same = (call(x, weight, tmp_path, **options) == wanted).float().mean()
        assert same > 0.999, f"{options}: {float(same)}"


def test_the_sum_is_rounded_before_it_is_normalised(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(4)
    x, residual = (torch.randn(9, 200, generator=generator).bfloat16() for _ in range(2))
    given = {"x": x, "residual": residual, "weight": x[0].clone(), "eps": 1e-6, "offset": 0.0, "cast_first": True}
    params = ADD.bind(Call(ADD.op, given, "decode"))
    norm, total = run(ADD, params, ADD.config(2, 1), given, tmp_path)
    wanted_norm, wanted_total = ADD.op.reference(*given.values())
    assert torch.equal(total, wanted_total)
    assert (norm == wanted_norm).float().mean() > 0.999


def test_extreme_rows(tmp_path: Path) -> None:
    rows = torch.stack([torch.zeros(6), torch.full((6,), 1e-30), torch.full((6,), -3.0), torch.full((6,), 1e18)])
    made = call(rows, None, tmp_path)
    wanted = ops.RMS_NORM.reference(rows, None, 1e-6, 0.0, True)
    assert torch.allclose(made, wanted, rtol=1e-6, atol=0)
    assert not made[0].any()


def test_a_nan_row_stays_alone(tmp_path: Path) -> None:
    rows = torch.ones(3, 10)
    rows[1, 4] = math.nan
    made = call(rows, None, tmp_path, rows=4)
    assert made[1].isnan().all()
    assert torch.allclose(made[[0, 2]], torch.ones(2, 10))


def test_no_rows(tmp_path: Path) -> None:
    assert call(torch.ones(0, 8), None, tmp_path).shape == (0, 8)
