"""A device that sweeps can be tested with: it computes by the operation's reference, and wrongly where it is told to.

Times are what a function of the configuration says, so that every choice that follows from them is known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.kernel_ops import with_buffers
from deepinfer_compile.kernels import AnySpec, Limits, specs
from deepinfer_compile.sweep import Sweep
from deepinfer_compile.sweep_machine import Run, Timing, Unfit
from deepinfer_compile.sweep_shapes import Shape
from deepinfer_compile.targets.nvidia import SM90
from deepinfer_compile.tuning import Store

DEVICE = "a device of tests"
Fault = Callable[[Any], str]


def spec_of(name: str) -> AnySpec:
    return next(s for s in specs() if s.op.name == name and "triton" in s.sources)


def shape(spec: AnySpec, params: Any, tokens: int, context: int = 1) -> Shape:
    """So many requests of one new token."""
    return Shape(spec, params, tokens, ((tokens, 1, context),))


@dataclass
class FakeCall:
    spec: AnySpec
    operands: Mapping[str, Any]
    tensors: dict[str, Tensor]
    names: list[str]
    fault: str
    config: Any
    machine: FakeMachine
    runs: int = 0

    def __call__(self) -> None:
        self.runs += 1
        if self.fault == "raises":
            raise ValueError("cannot run\nthis one")
        if self.fault == "lost":
            self.machine.lost = True
        made = self.spec.op.reference(*self.operands.values())
        for name, result in zip(self.names, made if isinstance(made, tuple) else (made,)):
            out = self.tensors[name]
            out.copy_(result.reshape(out.shape) * (1.01 if self.fault == "wrong" else 1))
            if self.fault == "partial":
                out.view(-1)[-1] = torch.nan
            if self.fault == "racy" and self.runs > 1:
                out.view(-1)[0] *= 1 + 2**-20
        if self.fault == "writes":
            self.tensors[self.spec.op.mutates[0]].view(-1)[0] = 3.0


@dataclass
class FakeMachine:
    """fault: of a configuration, "" for none. seen: every configuration that was prepared."""

    fault: Fault = lambda config: ""
    target: str = SM90.name
    name: str = DEVICE
    limits: Limits = SM90.limits
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    most_bytes: int = 1 << 26
    group: int = 7
    seen: list[Any] = field(default_factory=list)
    lost: bool = False

    def __enter__(self) -> FakeMachine:
        return self

    def __exit__(self, *error: object) -> None: ...

    def compile(self, spec: AnySpec, params: Any, configs: Sequence[Any], operands: Mapping[str, Tensor]) -> list[str]:
        return ["the compiler says no" if self.fault(c) == "compile" else "" for c in configs]

    def prepare(self, spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> FakeCall:
        self.seen.append(config)
        if self.fault(config) == "spills":
            raise Unfit("it spills 999 words a thread")
        plan = spec.plan(params, config)
        tensors = with_buffers(plan, operands)
        schema = spec.op.overload._schema.arguments
        given = dict.fromkeys(a.name for a in schema)
        plain = [a.name for a in schema if "Tensor" not in str(a.type)]
        given |= {name: getattr(params, name) for name in plain if hasattr(params, name)} | dict(operands)
        given |= {"form": "absorbed"} if "form" in given else {}
        for name in (a.name for a in schema if str(a.type).startswith("List")):
            found = {key: t for key, t in operands.items() if key.startswith(f"{name}_")}
            given[name] = [found.get(f"{name}_{i}") for i in range(len(plan.results))]
        given = {name: given[name] for name in (a.name for a in schema)}
        return FakeCall(spec, given, tensors, [b.name for b in plan.results], self.fault(config), config, self)

    def sync(self) -> None:
        if self.lost:
            raise RuntimeError("the device is lost")


@dataclass
class FakeTimer:
    """us: what a configuration takes. timed: every configuration that was timed."""

    us: Callable[[Any], float]
    timed: list[Any] = field(default_factory=list)

    def __call__(self, run: Run, hopeless: float) -> Timing:
        assert isinstance(run, FakeCall)
        self.timed.append(run.config)
        run()
        us = self.us(run.config)
        return Timing(us, 3 if us > hopeless else 15)


def filled(folder: Path, shapes: Sequence[Shape], us: Callable[[Any], float], **machine: Any) -> Store:
    """A store that a sweep with those times wrote."""
    store = Store(folder)
    list(Sweep(FakeMachine(**machine), FakeTimer(us), store).run(shapes))
    return store
