"""Runs a program eagerly and through the backend, and compares everything that a caller could see."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._prims_common import check_significant_strides
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from deepinfer_compile.backend import Prepared, prepare
from tests.property.programs import Program

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-5, torch.bfloat16: 3e-2}
"""Of the largest value, absolute, where a pattern was rewritten. Everything else must be equal to the bit. What was
computed from values in a narrower dtype is held to that one's."""


@dataclass
class Report:
    """What the backend made of one program's graphs."""

    prepared: list[Prepared] = field(default_factory=list)

    @property
    def left(self) -> list[str]:
        """Why graphs were left to Inductor."""
        return [p.left for p in self.prepared if p.left]

    @property
    def rewritten(self) -> bool:
        """Whether any graph holds an op of the dialect."""
        return any(p.ran for p in self.prepared)


def eager_door(report: Report) -> Callable[..., Any]:
    """A torch.compile backend that runs what Inductor would be given, without compiling it."""

    def door(gm: GraphModule, example_inputs: Any) -> Any:
        report.prepared.append(prepare(gm, options={"kernels": False}))
        return report.prepared[-1].gm

    return door


@dataclass(frozen=True)
class Seen:
    """What a caller sees after a call: every tensor there is, by name, and whose memory each lies in."""

    values: dict[str, Any]
    homes: dict[str, tuple[str, ...]]


def call(run: Callable[..., Any], module: nn.Module, arguments: dict[str, Any]) -> Seen:
    """Call and collect: results, arguments, members, and all the memory that they are parts of."""
    result = run(**arguments)
    flat, shape = pytree.tree_flatten(result)
    before = {**arguments, **dict(module.named_buffers(remove_duplicate=False)), **dict(module.named_parameters())}
    values = {**{f"result {i}": v for i, v in enumerate(flat)}, **before, "structure": str(shape)}
    tensors = {n: v for n, v in values.items() if isinstance(v, Tensor) and v.numel()}
    homes = {}
    for name, value in values.items():
        if isinstance(value, Tensor):
            homes[name] = tuple(n for n, v in tensors.items() if _memory(v) == _memory(value))
    memory = {f"memory of {n}": _all_of(v) for n, v in before.items() if isinstance(v, Tensor)}
    return Seen({**values, **memory}, homes)


def _memory(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def _all_of(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())  # type: ignore[call-overload]


def differences(want: Seen, got: Seen, exact: bool, through: torch.dtype = torch.float32) -> Iterator[str]:
    """What differs, in words. through: the narrowest dtype that values may have had on the way."""
    if list(want.values) != list(got.values):
        yield f"{list(got.values)} in place of {list(want.values)}"
        return
    for name, a in want.values.items():
        b = got.values[name]
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            if type(a) is not type(b) or a != b:
                yield f"{name} is {b!r}, was {a!r}"
            continue
        if (a.dtype, a.shape, a.requires_grad) != (b.dtype, b.shape, b.requires_grad):
            yield f"{name} is {b.dtype} {tuple(b.shape)}, was {a.dtype} {tuple(a.shape)}"
        elif not check_significant_strides(a, b)[0]:
            yield f"{name} has strides {b.stride()}, had {a.stride()}"
        elif not close(a, b, exact, through):
            yield f"{name} differs by {(a.double() - b.double()).abs().max()}"
        elif a.numel() and want.homes.get(name) != got.homes.get(name):
            yield f"{name} lies in the memory of {got.homes.get(name)}, lay in that of {want.homes.get(name)}"


def close(want: Tensor, got: Tensor, exact: bool, through: torch.dtype = torch.float32) -> bool:
    """Equal to the bit, or within the tolerance of the narrower of two dtypes: its own and that of what it is from."""
    if exact or not want.is_floating_point():
        return torch.equal(want, got) or (want.is_floating_point() and torch.equal(want.nan_to_num(), got.nan_to_num()))
    largest = want.double().nan_to_num().abs().max().clamp(min=1.0).item() if want.numel() else 1.0
    tol = max(TOLERANCES[want.dtype], TOLERANCES[through]) * largest
    return torch.allclose(want.double(), got.double(), rtol=0, atol=tol, equal_nan=True)


def check(
    program: Program,
    backend: Callable[[Report], Callable[..., Any]] = eager_door,
    exact: bool = True,
    reference: str = "",
) -> Report:
    """Two calls on the same arguments and one at other sizes are those of eager, or AssertionError says where not.

    reference: a backend of torch.compile whose results are wanted in place of eager's.
    """
    torch._dynamo.reset()
    report = Report()
    module = program.module()
    calls = [program.arguments(0, module), program.arguments(1, module)]
    ours, our_calls = copy.deepcopy((module, calls))
    through = torch.bfloat16 if "bfloat16" in str(program) else torch.float32
    how = {"dynamic": program.dynamic, "fullgraph": True}
    wanted = torch.compile(module, backend=reference, **how) if reference else module
    compiled = torch.compile(ours, backend=backend(report), **how)
    with torch.set_grad_enabled(program.grad):
        for which in (0, 0, 1):
            want = call(wanted, module, calls[which])
            got = call(compiled, ours, our_calls[which])
            found = list(differences(want, got, exact and not report.rewritten, through))
            assert not found, f"call {which}: {'; '.join(found)}\n{program}"
    return report


def counts(prepared: Prepared) -> dict[str, int]:
    """Dialect ops in a graph."""
    return dict(collections.Counter(prepared.ran))
