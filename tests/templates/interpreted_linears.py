"""Several linear layers in one launch give the bits of as many launches of the kernel for one.

Run by test_interpreted.py in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Case, Limits, specs
from deepinfer_compile.templates.linear import Config
from deepinfer_compile.templates.linears import Params
from tests.templates.interpreted_cases import check
from tests.triton_interpreter import run

ONE = next(s for s in specs() if s.op is ops.LINEAR)
SEVERAL = next(s for s in specs() if s.op is ops.LINEARS)
CONFIGS = {
    "row": (1, Config(1, 8, 128, 1, 4, 1)),
    "row that starts early": (1, Config(1, 8, 128, 1, 4, 1, pdl=True)),
    "rows": (3, Config(1, 16, 256, 1, 4, 1)),
    "rows in parts": (2, Config(1, 16, 64, 4, 2, 1)),
    "tile": (3, Config(16, 16, 64, 1, 4, 3)),
    "tiles in parts": (18, Config(16, 32, 128, 2, 4, 2)),
}
"""Tokens, and how they are computed."""
SHAPES = {
    "full": ((64, 32), (False, False), torch.bfloat16, 8),
    "odd": ((37, 70, 1), (False, True, True), torch.float32, 1),
    "wide": ((520, 3), (True, False), torch.bfloat16, 2),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_each_result_has_the_bits_of_the_kernel_for_one(name: str, shape: str, tmp_path: Path) -> None:
    tokens, config = CONFIGS[name]
    lines, biased, dtype, align = SHAPES[shape]
    params = Params(300, lines, dtype, biased, align)
    given = SEVERAL.inputs(Case(shape, params, (tokens,), (tokens,)), torch.Generator().manual_seed(tokens))
    made = run(SEVERAL, params, config, given, tmp_path)
    assert len(made) == len(lines)
    for n, one in enumerate(params.each()):
        alone = {"x": given["x"], "weight": given["weights"][n], "bias": given["biases"][n]}
        (want,) = run(ONE, one, config, alone, tmp_path)
        assert not want.isnan().any()
        assert torch.equal(made[n], want)


@pytest.mark.parametrize("found", [c for c in SEVERAL.cases if sum(c.lengths) <= 3], ids=lambda c: c.name)
def test_the_default_for_one_token(found: Case[Params], tmp_path: Path) -> None:
    limits = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)
    config = SEVERAL.default(found.params, limits, 1)
    assert config.block_t == 1
    check(SEVERAL, found, config, tmp_path)
