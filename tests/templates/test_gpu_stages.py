"""Pipelining is a matter of speed: kernels give the same with every number of stages (GEN-4)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile.kernel_ops import operator
from deepinfer_compile.kernels import AnySpec, specs
from deepinfer_compile.runtime.launch import tensors_of
from deepinfer_compile.targets import device_limits

pytestmark = pytest.mark.gpu


def stages_of(config: Any) -> dict[str, int]:
    """Fields of a configuration that say how many stages a loop has."""
    return {f.name: getattr(config, f.name) for f in fields(config) if f.name.endswith("stages")}


def alike(configs: Iterable[Any]) -> list[Any]:
    """The largest set of configurations that differ in nothing but stages."""
    groups: dict[Any, list[Any]] = {}
    for config in configs:
        groups.setdefault(replace(config, **dict.fromkeys(stages_of(config), 0)), []).append(config)
    return max(groups.values(), key=len)


def pipelined() -> list[Any]:
    found = []
    for spec in specs():
        small = [c for c in spec.cases if 0 < sum(c.lengths) <= 1000]
        if small and any(f.name.endswith("stages") for f in fields(spec.config)):
            found.append(pytest.param(spec, max(small, key=lambda c: sum(c.lengths)), id=spec.op.name))
    return found


@pytest.mark.parametrize(("spec", "case"), pipelined())
def test_stages_do_not_change_results(spec: AnySpec, case: Any) -> None:
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None, "no target is this GPU"
    given = spec.inputs(case, torch.Generator().manual_seed(4))
    results: dict[str, tuple[Tensor, ...]] = {}
    for config in alike(spec.space(case.params, limits)):
        kernel = operator(spec, case.params, config)
        there = {n: t.cuda() for n, t in tensors_of(given).items()}
        made = kernel.overload(*(there[n] for n in kernel.operands))
        results[str(stages_of(config))] = tuple(t.cpu() for t in (made if isinstance(made, tuple) else (made,)))
    assert len(results) > 1
    first, *others = results
    for other in others:
        for want, got in zip(results[first], results[other], strict=True):
            assert torch.equal(want, got), f"{other} gives other bits than {first}"
