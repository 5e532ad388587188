"""Every case of every kernel, run in Triton's interpreter, against the operation's reference in fp64.

Run by test_interpreted.py in a process of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepinfer_compile.kernels import AnySpec, Case, Limits, specs
from tests.triton_interpreter import run

LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32, pdl=True)
SMALL = [(spec, c) for spec in specs() for c in spec.cases if sum(c.lengths) <= 1000]
CASES = [pytest.param(spec, c, id=f"{spec.op.name}-{c.name}") for spec, c in SMALL]


WRITTEN = ("kv", "latent", "cache")


def clone(arguments: dict[str, Any]) -> dict[str, Any]:
    """Operands that may be written apart from the originals; the layout of the others is part of the case."""
    return {name: item.clone() if name in WRITTEN else item for name, item in arguments.items()}


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def check(spec: AnySpec, case: Case[Any], config: Any, folder: Path) -> None:
    """Results within tolerance of fp64 and unbiased, whole numbers equal; what is written equals what the reference
    writes. That a second run gives the same bits is tested on GPUs: here programs run one behind the other."""
    given = spec.inputs(case, torch.Generator().manual_seed(1))
    floats = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, given)
    wanted = as_tuple(spec.op.reference(*clone(floats).values()))
    written = clone(given)
    types = [made.dtype for made in as_tuple(spec.op.reference(*written.values()))]
    first = clone(given)
    got = run(spec, case.params, config, first, folder)
    for name in spec.op.mutates:
        torch.testing.assert_close(first[name], written[name], rtol=0, atol=0, equal_nan=True)
    for want, dtype, found in zip(wanted, types, got, strict=True):
        found = found.view(want.shape)
        assert found.dtype == dtype
        if not want.is_floating_point():
            if spec.unordered:
                found, want = found.sort().values, want.sort().values
            assert torch.equal(found, want), config
            continue
        scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
        error = (found.double() - want) / scale
        allowed = spec.tolerance[case.params.dtype]
        assert not error.isnan().any()
        assert float(error.abs().max()) <= allowed, f"{config}: {float(error.abs().max())} > {allowed}"
        assert abs(float(error.mean())) <= allowed / 4, f"{config}: biased by {float(error.mean())}"


def defaults(spec: AnySpec, case: Case[Any]) -> dict[Any, int]:
    """The configs for a batch that leaves cores idle and for one that does not, and where a case has a single token,
    for that; each with the number of requests that it is for."""
    found: dict[Any, int] = {}
    for requests in (*((1,) if sum(case.new) == 1 else ()), 64, 4096):
        tokens = requests * getattr(case.params, "queries", 1)
        found.setdefault(spec.default(case.params, LIMITS, tokens), requests)
    return found


LONG = (
    *(("mix_streams", "typical"), ("sample", "whole"), ("sample", "half"), ("cached_select_rows", "prompts")),
    *(("cached_latent_attention", "chunk"), ("join_streams", "typical"), ("collapse_streams", "typical")),
    ("partial_rope", "typical"),
)
"""Cases that take seconds, of kernels whose other cases have all their ways."""


def marks(spec: AnySpec, case: Case[Any]) -> tuple[Any, ...]:
    """Why a case does not always run."""
    return (pytest.mark.slow,) if (spec.op.name, case.name) in LONG else ()


DEFAULTS = [
    pytest.param(spec, case, config, id=f"{spec.op.name}-{case.name}-{requests}", marks=marks(spec, case))
    for spec, case in SMALL
    for config, requests in defaults(spec, case).items()
]


@pytest.mark.parametrize(("spec", "case", "config"), DEFAULTS)
def test_default(spec: AnySpec, case: Case[Any], config: Any, tmp_path: Path) -> None:
    check(spec, case, config, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_space(spec: AnySpec, case: Case[Any], tmp_path: Path) -> None:
    """Configs that differ in more than warps and stages, which only schedule: the first, and every seventh."""
    shapes = {}
    for config in spec.space(case.params, LIMITS):
        key = tuple(v for k, v in sorted(vars(config).items()) if not k.endswith(("warps", "stages")))
        shapes.setdefault(key, config)
    assert shapes
    for config in list(shapes.values())[::7]:
        check(spec, case, config, tmp_path)
