"""sample in Triton's interpreter: any parameters, odd rows, and that the neighbours of a row change nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, specs
from tests import sampled
from tests.triton_interpreter import run

SPEC = next(s for s in specs() if s.op is ops.SAMPLE)
FEW = SPEC.config(256, 64, 1)
"""Blocks and register tiles so small that every search has to pass over the row."""
WIDE = SPEC.config(1024, 2048, 4)
LAST = 1 - 2.0**-53
Kinds = list[tuple[float, float, int, float]]


def call(given: dict[str, Any], folder: Path, config: Any = FEW) -> Tensor:
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    (made,) = run(SPEC, params, config, given, folder)
    return made


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(
    ("scale", "dtype", "config"),
    [(0.05, torch.float32, FEW), (1.0, torch.bfloat16, FEW), (6.0, torch.float32, FEW), (6.0, torch.bfloat16, WIDE)],
)
def test_any_parameters(scale: float, dtype: torch.dtype, config: Any, tmp_path: Path) -> None:
    """Equal tokens wherever rounding does not decide."""
    kinds: Kinds = []
    for temperature in (0.0, 0.5, 3.0):
        kinds += [(temperature, 0.0, 0, 1.0), (temperature, 0.3, 0, 1.0), (temperature, 1.0, 0, 1.0)]
        kinds += [(temperature, 0.0, k, 1.0) for k in (1, 3, 300, 999, 1000, -1)]
        kinds += [(temperature, 0.0, 0, p) for p in (1e-6, 0.3, 0.9, 0.999)]
        kinds += [(temperature, 0.05, 20, 0.7), (temperature, 1e-4, 700, 0.95)]
    logits = (randn(len(kinds), 1000) * scale).to(dtype)
    noise = torch.rand(len(kinds), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    given = sampled.rows(logits, kinds, noise)
    wanted, certain = sampled.certain(given)
    made = call(given, tmp_path, config)
    assert float(certain.float().mean()) > 0.8
    assert torch.equal(made[certain], wanted[certain])


ROWS = {
    "one token": torch.zeros(1),
    "equal": torch.full((700,), -7.25),
    "one finite": torch.full((700,), -math.inf).index_fill(0, torch.tensor([511]), -3e38),
    "few finite": torch.where(torch.arange(700) % 97 == 5, randn(700), -math.inf),
    "few allowed": torch.where(torch.arange(700) % 97 == 5, randn(700), -1e9),
    "two values": (torch.arange(700) % 3 == 1).float(),
    "both zeros": torch.where(torch.arange(700) % 2 == 0, -0.0, 0.0),
    "neighbouring floats": torch.nextafter(torch.ones(700), torch.tensor(2.0)).where(torch.arange(700) % 5 == 0, 1.0),
    "consecutive floats": (torch.arange(700, dtype=torch.int32) + 0x3F800000).view(torch.float32).flip(0),
    "all magnitudes": torch.logspace(-44, 38, 700) * (1 - 2 * (torch.arange(700) % 2)),
    "rising": torch.arange(700) / 64,
    "steep": torch.arange(700) * -10.0,
}


@pytest.mark.parametrize("name", ROWS)
def test_odd_rows(name: str, tmp_path: Path) -> None:
    line = ROWS[name]
    cuts = [
        (0.0, 0, 1.0),
        (0.0, 1, 1.0),
        (0.0, 9, 1.0),
        (0.0, 400, 1.0),
        (0.0, 0, 0.37),
        (0.4, 0, 1.0),
        (0.01, 50, 0.6),
    ]
    kinds = [(0.0, 0.0, 0, 1.0), *((1.0, *cut) for cut in cuts)] * 2
    noise = torch.tensor([0.37123] * 8 + [LAST, 0.0] * 4, dtype=torch.float64)
    given = sampled.rows(line.expand(len(kinds), -1).contiguous(), kinds, noise)
    wanted, certain = sampled.certain(given)
    made = call(given, tmp_path)
    assert certain.float().mean() > 0.7
    assert torch.equal(made[certain], wanted[certain])
    # also where rounding decides, never a token without any probability
    assert (torch.isfinite(line[made]) & (made >= 0)).all()


def test_rows_without_a_finite_maximum_are_marked(tmp_path: Path) -> None:
    logits = randn(10, 300)
    logits[1, 299], logits[4, 7], logits[6] = math.nan, math.inf, -math.inf
    logits[8, 3], logits[8, 200] = math.nan, math.inf
    for temperature in (0.0, 1.0):
        given = sampled.rows(logits, [(temperature, 0.1, 20, 0.9)] * 10, torch.full((10,), 0.5))
        made = call(given, tmp_path)
        assert (made < 0).nonzero()[:, 0].tolist() == [1, 4, 6, 8]
        assert torch.equal(made, ops.SAMPLE.reference(*given.values()))


@pytest.mark.slow
def test_tokens_are_drawn_as_often_as_they_are_likely(tmp_path: Path) -> None:
    """Numbers spread evenly meet every token in proportion, give or take one at each end of its share."""
    count = 50
    line = randn(12)
    noise = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    given = sampled.rows(line.expand(count, -1).contiguous(), [(0.8, 0.0, 7, 0.9)] * count, noise)
    made = torch.bincount(call(given, tmp_path), minlength=12)
    weights = (line.double() / 0.8).softmax(-1)
    ranked = weights.sort(descending=True).values[:7]
    kept = int((ranked.cumsum(-1) < 0.9 * ranked.sum()).sum()) + 1
    wanted = torch.where(weights >= ranked[kept - 1], weights, 0)
    assert (made[wanted == 0] == 0).all()
    assert ((made - count * wanted / wanted.sum()).abs() <= 1).all()


def test_a_row_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    kinds: Kinds = [(1.0, 0.0, 0, 0.9), (0.7, 0.02, 30, 1.0), (0.0, 0.0, 0, 1.0), (2.0, 0.0, 600, 0.99)]
    given = sampled.rows(randn(4, 1009), kinds, torch.tensor([0.2, 0.9, 0.4, 0.77], dtype=torch.float64))
    together = call(given, tmp_path)
    for row in range(4):
        alone = {name: t[row : row + 1] for name, t in given.items()}
        assert torch.equal(call(alone, tmp_path), together[row : row + 1])
    wide = torch.full((4, 1009 + 9), math.nan)
    wide[:, 3:1012] = given["logits"]
    assert torch.equal(call({**given, "logits": wide[:, 3:1012]}, tmp_path), together)


def test_no_rows(tmp_path: Path) -> None:
    given = sampled.rows(torch.ones(2, 8), [(1.0, 0.0, 0, 1.0)] * 2, torch.zeros(2))
    assert call({name: t[:0] for name, t in given.items()}, tmp_path).shape == (0,)
