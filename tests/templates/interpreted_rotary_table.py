"""rotary_table in Triton's interpreter: as torch's own fp32, at positions up to a million and beyond."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Refused, specs
from tests.triton_interpreter import run

SPEC = next(s for s in specs() if s.op is ops.ROTARY_TABLE)
NEAR = (0, 1, 2, 3, 7, 100, 4095, 131071)
FAR = (999_983, 1_000_000, 1_048_575, 1 << 23, (1 << 24) - 1)


def tables(positions: Tensor, inv_freq: Tensor, folder: Path, block: int = 4) -> tuple[Tensor, Tensor]:
    """cos and sin of the kernel, one after the other, and what torch gives for them in fp32."""
    given = {"position_ids": positions, "inv_freq": inv_freq, "scaling": 1.0, "form": "once", "dtype": torch.float32}
    params = SPEC.bind(Call(SPEC.op, given, "decode"))
    made, wanted = run(SPEC, params, SPEC.config(block, 1), given, folder), SPEC.op.reference(*given.values())
    return torch.cat([t.flatten() for t in made]), torch.cat([t.flatten() for t in wanted])


@pytest.mark.parametrize("base", [1.0, 1e4, 5e5])
@pytest.mark.parametrize("chosen", [NEAR, FAR, (*NEAR, *FAR)])
def test_all_angles_are_those_of_torch(base: float, chosen: tuple[int, ...], tmp_path: Path) -> None:
    """The products are rounded as torch's are: at a million, one unit in the last place is a sixteenth of a radian."""
    inv_freq = base ** -(torch.arange(19) / 19)
    made, wanted = tables(torch.tensor([chosen]), inv_freq.float(), tmp_path)
    assert (made - wanted).abs().max() <= 3e-7


def test_quarter_turns_are_met_from_both_sides(tmp_path: Path) -> None:
    """Angles beside every multiple of an eighth of a turn, where the polynomials are exchanged."""
    eighths = torch.arange(1, 400, dtype=torch.float64) * (torch.pi / 4)
    beside = torch.cat([eighths - 1e-6, eighths, eighths + 1e-6]).float()
    made, wanted = tables(torch.tensor([[1]]), beside, tmp_path, block=1)
    assert (made - wanted).abs().max() <= 3e-7
    exact = torch.cat([beside.double().cos(), beside.double().sin()])
    assert (made - exact).abs().max() <= 2e-7


def test_calls_that_are_no_rows_of_positions_are_refused() -> None:
    given = {"position_ids": torch.zeros(1, 3, dtype=torch.int64), "inv_freq": torch.ones(4), "scaling": 1.0}
    given |= {"form": "once", "dtype": torch.bfloat16}
    assert not isinstance(SPEC.bind(Call(SPEC.op, given, "decode")), Refused)
    for changes in (
        {"position_ids": torch.zeros(3, 3, dtype=torch.int64)},
        {"position_ids": torch.zeros(1, 3)},
        {"position_ids": torch.zeros(1, 6, dtype=torch.int64)[:, ::2]},
        {"inv_freq": torch.ones(4, dtype=torch.float64)},
        {"dtype": torch.float16},
    ):
        assert isinstance(SPEC.bind(Call(SPEC.op, {**given, **changes}, "decode")), Refused)
