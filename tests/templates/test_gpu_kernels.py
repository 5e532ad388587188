"""Every small case of every kernel on the GPU of this machine, as the operator that graphs call, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from deepinfer_compile.kernel_ops import operator
from deepinfer_compile.kernels import AnySpec, Case, specs
from deepinfer_compile.runtime.launch import tensors_of
from deepinfer_compile.targets import device_limits

pytestmark = pytest.mark.gpu
CASES = [
    pytest.param(spec, c, id=f"{spec.op.name}-{c.name}")
    for spec in specs()
    for c in spec.cases
    if sum(c.lengths) <= 1000
]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Memory that torch hands out holds NaN, or the largest whole number."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


def as_tuple(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize(("spec", "case"), CASES)
def test_equals_the_reference(spec: AnySpec, case: Case[Any], tokens: int) -> None:
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None, "no target is this GPU"
    given = spec.inputs(case, torch.Generator().manual_seed(1))
    floats = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t.clone(), given)
    wanted = as_tuple(spec.op.reference(*floats.values()))
    kernel = operator(spec, case.params, spec.default(case.params, limits, tokens))
    runs = []
    for _ in range(2):
        # a whole storage goes over, so that strides and the poison between rows stay
        there = tensors_of(tree_map_only(Tensor, moved, given))
        runs.append((as_tuple(kernel.overload(*(there[n] for n in kernel.operands))), there))
    spec.op.reference(*given.values())
    for name in spec.op.mutates:
        torch.testing.assert_close(runs[0][1][name].cpu(), given[name], rtol=0, atol=0, equal_nan=True)
    for want, got, again in zip(wanted, *(run for run, _ in runs)):
        found = got.cpu().view(want.shape)
        assert torch.equal(found, again.cpu().view(want.shape)), "two runs differ"
        if spec.unordered:
            found, want = found.sort().values, want.sort().values
        scale = max(float(want.abs().max()), 1e-30) if want.numel() else 1.0
        error = (found.double() - want).abs() / scale
        assert float(error.max() if error.numel() else 0.0) <= spec.tolerance[case.params.dtype]


def moved(tensor: Tensor) -> Tensor:
    """The same view of the same storage, on the GPU."""
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return flat.cuda().as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
