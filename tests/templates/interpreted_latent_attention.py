"""latent_attention in Triton's interpreter: masks with holes, keys nobody sees, pieces, blocks read without a mask."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Case, specs
from tests.triton_interpreter import run

WHOLE = next(s for s in specs() if s.op is ops.LATENT_ATTENTION)
PAGED = next(s for s in specs() if s.op is ops.CACHED_LATENT_ATTENTION)
CONFIGS = [(16, 1), (16, 4), (32, 8), (64, 1), (64, 2)]


def params_of(spec: Any, name: str) -> Any:
    return next(c.params for c in spec.cases if c.name == name)


def config(spec: Any, block_n: int, pieces: int) -> Any:
    return spec.config(16, block_n, pieces, 4, 1, 16, 32, 32, 32, 4)


def inputs(spec: Any, params: Any, new: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    return dict(spec.inputs(Case("", params, new, lengths), torch.Generator().manual_seed(3)))


def check(spec: Any, params: Any, cfg: Any, given: dict[str, Any], folder: Path) -> Tensor:
    want = spec.op.reference(*(t.clone() if isinstance(t, Tensor) else t for t in given.values()))
    (got,) = run(spec, params, cfg, given, folder)
    got = got.view(want.shape)
    torch.testing.assert_close(got, want, rtol=0, atol=5e-6 * float(want.abs().max()))
    return got


@pytest.mark.parametrize(("block_n", "pieces"), CONFIGS)
def test_a_mask_with_a_hole_hides_what_is_in_it(block_n: int, pieces: int, tmp_path: Path) -> None:
    params = replace(params_of(WHOLE, "unseen"), queries=1, value_rows=True)
    given = inputs(WHOLE, params, (1, 1), (100, 100))
    given["mask"] = given["mask"].clone()
    given["mask"][0, :, :, 20:90] = False
    given["mask"][1, :, :, 64] = False
    got = check(WHOLE, params, config(WHOLE, block_n, pieces), given, tmp_path)
    given["mask"][1, :, :, 64] = True
    again = WHOLE.op.reference(*given.values())
    assert (again[1] - got[1]).abs().max() > 1e-3 * again.abs().max()


@pytest.mark.parametrize(("block_n", "pieces"), CONFIGS)
def test_rows_outside_the_visible_span_are_not_read(block_n: int, pieces: int, tmp_path: Path) -> None:
    params = replace(params_of(WHOLE, "unseen"), queries=1, value_rows=True)
    given = inputs(WHOLE, params, (1, 1), (150, 150))
    mask = torch.zeros_like(given["mask"])
    mask[:, :, :, 37:101] = True
    given["mask"] = mask
    want = WHOLE.op.reference(*given.values())
    for name in ("c", "k_rope"):
        given[name] = given[name].clone()
        given[name][:, :37] = math.nan
        given[name][:, 101:] = math.nan
    (got,) = run(WHOLE, params, config(WHOLE, block_n, pieces), given, tmp_path)
    torch.testing.assert_close(got.view(want.shape), want, rtol=0, atol=5e-6 * float(want.abs().max()))


@pytest.mark.parametrize(("block_n", "pieces"), CONFIGS)
def test_a_row_that_sees_nothing_is_zero(block_n: int, pieces: int, tmp_path: Path) -> None:
    params = replace(params_of(WHOLE, "unseen"), queries=2, value_rows=True)
    given = inputs(WHOLE, params, (2, 2), (80, 80))
    given["mask"] = given["mask"].clone()
    given["mask"][0, :, 1] = False
    given["mask"][1] = False
    got = check(WHOLE, params, config(WHOLE, block_n, pieces), given, tmp_path)
    assert not got[1].any()
    assert not got[0, 1].any()
    assert got[0, 0].abs().min() > 0


@pytest.mark.parametrize(("block_n", "pieces"), CONFIGS)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_mla_lengths_around_a_page(block_n: int, pieces: int, length: int, tmp_path: Path) -> None:
    params = params_of(PAGED, "block")
    given = inputs(PAGED, params, (1, 1), (length, 3))
    check(PAGED, params, config(PAGED, block_n, pieces), given, tmp_path)


def test_a_large_score_takes_all_the_weight(tmp_path: Path) -> None:
    """Scores far apart: the softmax must not overflow, whichever block holds the largest."""
    params = replace(params_of(PAGED, "block"), scale=50.0)
    for length in (5, 70, 129):
        given = inputs(PAGED, params, (1,), (length,))
        check(PAGED, params, config(PAGED, 16, 4), given, tmp_path)


def test_another_scale_changes_the_result(tmp_path: Path) -> None:
    params = params_of(PAGED, "block")
    given = inputs(PAGED, params, (1,), (70,))
    (one,) = run(PAGED, params, config(PAGED, 16, 1), {**given, "latent": given["latent"].clone()}, tmp_path)
    other = replace(params, scale=params.scale * 1.01)
    (two,) = run(PAGED, other, config(PAGED, 16, 1), {**given, "latent": given["latent"].clone()}, tmp_path)
    assert (one - two).abs().max() > 1e-4 * one.abs().max()
