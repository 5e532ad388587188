"""Where configurations run and how a call is timed: the GPU of this machine, or Triton's interpreter.

The interpreter serves to try a sweep without a GPU. It computes as a GPU would (in fp32: its products of bf16 are
wrong) and its times mean nothing, so its records have a device of their own and no build takes them.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_compile import kernel_ops, render
from deepinfer_compile.errors import CannotMeasure
from deepinfer_compile.kernels import AnySpec, Limits, fields_of, render_kernel
from deepinfer_compile.runtime.launch import Launch, evaluate, values_of
from deepinfer_compile.sweep_pool import CompilePool
from deepinfer_compile.sweep_worker import reason_of
from deepinfer_compile.tuned import INTERPRETER

SPILLED = 512
"""Words of 4 bytes that a thread may keep in memory for want of registers."""
INTERPRETED_BYTES = 64 << 20
"""Of operands of a call that the interpreter is given at most."""
_EARLY = ("gdc_wait", "gdc_launch_dependents")
Run = Callable[[], None]


class Unfit(Exception):
    """Why a configuration is not timed."""


@dataclass(frozen=True)
class Timing:
    """Median microseconds of some runs."""

    us: float
    samples: int


class Timer(Protocol):
    """How a call is timed. hopeless: microseconds of a call that is not worth more than a few runs."""

    def __call__(self, run: Run, hopeless: float) -> Timing: ...


class Call(Protocol):
    """One configuration on given operands. tensors: operands, results and scratch memory by name."""

    @property
    def tensors(self) -> dict[str, Tensor]: ...

    def __call__(self) -> None: ...


class Machine(Protocol):
    """A device. target, name: in keys of records. most_bytes: of operands, 0 for any. group: configurations that are
    worth compiling together."""

    target: str
    name: str
    limits: Limits
    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    most_bytes: int
    group: int

    def __enter__(self) -> Machine: ...

    def __exit__(self, *error: object) -> None: ...

    def compile(self, spec: AnySpec, params: Any, configs: Sequence[Any], operands: Mapping[str, Tensor]) -> list[str]:
        """Compile configurations; what went wrong with each, or nothing."""
        ...

    def prepare(self, spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> Call:
        """A call that can be run. Raises Unfit."""
        ...

    def sync(self) -> None:
        """Wait until everything that was started has ended. Raises RuntimeError for a fault of the device."""
        ...


def until_clear(sample: Callable[[], float], samples: int, few: int, hopeless: float) -> Timing:
    """The median of `samples`, or of the first `few` where all of them are hopeless."""
    times: list[float] = []
    while len(times) < samples:
        times.append(sample())
        if len(times) == few and min(times) > hopeless:
            break
    return Timing(statistics.median(times), len(times))


class GraphTimer:
    """Replays of a CUDA graph, each with the cache of the chip flushed."""

    SAMPLES, FEW, FLUSHED = 15, 3, 1 << 28

    def __call__(self, run: Run, hopeless: float = float("inf")) -> Timing:
        return self.repeated(run, 1, hopeless)

    def repeated(self, run: Run, repeat: int, hopeless: float = float("inf")) -> Timing:
        """Of one run, where a graph holds `repeat` of them."""
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(repeat):
                run()
        flush = torch.empty(self.FLUSHED, dtype=torch.int8, device="cuda")

        def sample() -> float:
            flush.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            return float(begin.elapsed_time(end)) * 1e3 / repeat

        return until_clear(sample, self.SAMPLES, self.FEW, hopeless)


class WallTimer:
    """Python's own clock."""

    SAMPLES, FEW = 3, 1

    def __call__(self, run: Run, hopeless: float = float("inf")) -> Timing:
        def sample() -> float:
            begin = time.perf_counter()
            run()
            return (time.perf_counter() - begin) * 1e6

        return until_clear(sample, self.SAMPLES, self.FEW, hopeless)


@dataclass
class Gpu:
    """A GPU of this machine, kernels compiled by Triton in processes of their own."""

    target: str
    name: str
    limits: Limits
    device: torch.device
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    most_bytes: int = 0

    def __post_init__(self) -> None:
        self._pool = CompilePool()
        self.group = 16 * self._pool.size

    def __enter__(self) -> Gpu:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def compile(self, spec: AnySpec, params: Any, configs: Sequence[Any], operands: Mapping[str, Tensor]) -> list[str]:
        """In parallel, into Triton's cache."""
        shapes = {
            name: [list(t.shape), list(t.stride()), str(t.dtype).removeprefix("torch.")] for name, t in operands.items()
        }
        held = {"params": render.encode_values(spec.name, fields_of(params)), "operands": shapes}
        values = {"kernel": spec.name, "op": spec.op.name, **held}
        encoded = [render.encode_values(spec.name, fields_of(config)) for config in configs]
        return self._pool.reasons([{**values, "config": config} for config in encoded])

    def prepare(self, spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> Call:
        """Load the binaries, and look at what they need."""
        for made in kernel_ops.compile_launches(spec, params, config, operands):
            try:
                _ = made.run  # loads the binary; raises where it takes more than the device has
            except Exception as err:  # an error class of Triton's, which is not imported here
                raise Unfit(reason_of(err)) from None
            if made.n_spills > SPILLED:
                raise Unfit(f"{made.name} spills {made.n_spills} words a thread, more than {SPILLED}")
        return kernel_ops.jit_call(spec, params, config, operands)

    def sync(self) -> None:
        torch.cuda.synchronize(self.device)


@dataclass(frozen=True)
class _Interpreted:
    """A call in the interpreter."""

    kernel: str
    module: ModuleType
    launches: tuple[Launch, ...]
    tensors: dict[str, Tensor]

    def __call__(self) -> None:
        for launch in self.launches:
            grid = tuple(evaluate(e, self.tensors) for e in launch.grid)
            if 0 not in grid:
                getattr(self.module, launch.entry)[grid](*values_of(self.kernel, launch, self.tensors))


@dataclass
class Interpreter:
    """Triton's interpreter, which must have been chosen before Triton was imported."""

    target: str
    limits: Limits
    name: str = INTERPRETER
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    most_bytes: int = INTERPRETED_BYTES
    group: int = 1 << 20
    _patch: Any = None
    _early: tuple[Any, ...] = ()

    def __enter__(self) -> Interpreter:
        """Two things are mended until the exit: Triton 3.6 cannot use a scalar as a loop's bound under NumPy 2.4 and
        newer, and the interpreter knows no launches that start early, which it has no need of."""
        interpreter: Any = import_module("triton.runtime.interpreter")
        self._patch = usual = interpreter._patch_lang_tensor

        def patch(tensor: Any, *rest: Any) -> None:
            usual(tensor, *rest)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        interpreter._patch_lang_tensor = patch
        cuda = import_module("triton.language").extra.cuda
        self._early = tuple(getattr(cuda, name) for name in _EARLY)
        for name in _EARLY:
            setattr(cuda, name, lambda: None)
        return self

    def __exit__(self, *error: object) -> None:
        interpreter: Any = import_module("triton.runtime.interpreter")
        interpreter._patch_lang_tensor = self._patch
        cuda = import_module("triton.language").extra.cuda
        for name, usual in zip(_EARLY, self._early):
            setattr(cuda, name, usual)

    def compile(self, spec: AnySpec, params: Any, configs: Sequence[Any], operands: Mapping[str, Tensor]) -> list[str]:
        """There is nothing to compile."""
        return [""] * len(configs)

    def prepare(self, spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> Call:
        """The rendered source as the interpreter takes it."""
        module = kernel_ops.load_source(render_kernel(spec, params, config, kernel_ops.DIALECT))
        # the compiler folds constants; here Python would have to mix them with the whole numbers of a loop
        for name, item in list(vars(module).items()):
            if type(item).__name__ == "constexpr":
                setattr(module, name, item.value)
        plan = spec.plan(params, config)
        return _Interpreted(spec.name, module, plan.launches, kernel_ops.with_buffers(plan, operands))

    def sync(self) -> None:
        """Everything has ended when it returns."""


def this_machine() -> tuple[Machine, Timer]:
    """The device to measure on, and its timer. Raises CannotMeasure."""
    from deepinfer_compile.targets import TARGETS, device_target

    if os.environ.get("TRITON_INTERPRET") == "1":
        usual = next(t for t in TARGETS.values() if t.limits.device != "cpu")
        return Interpreter(usual.name, usual.limits), WallTimer()
    if not torch.cuda.is_available():
        fix = "run it where the kernels will run; TRITON_INTERPRET=1 tries small fp32 shapes without a GPU"
        raise CannotMeasure(reason="there is no GPU that torch can use", fix=fix)
    device = torch.device("cuda", torch.cuda.current_device())
    target, name = device_target(device), torch.cuda.get_device_name(device)
    if target is None:
        known = ", ".join(t.name for t in TARGETS.values() if t.limits.device != "cpu")
        raise CannotMeasure(reason=f"{name} is no target of this version", fix=f"use a GPU that is one of {known}")
    return Gpu(target.name, name, target.limits, device), GraphTimer()
