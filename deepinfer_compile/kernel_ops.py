"""Kernels as torch operators, for graphs that Inductor compiles: the same rendered source that bundles hold.

A kernel with its Params and Config becomes one `torch.library.triton_op`: torch sees the launches, so it plans their
memory, records them in CUDA graphs and compiles them once. The source is a file of the build cache, where a person can
read it and a profiler finds it.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.artifacts import cached
from deepinfer_compile.kernels import AnySpec, Call, Limits, Refused, is_large, render_kernel, specs
from deepinfer_compile.ops.registry import Op
from deepinfer_compile.runtime.launch import Buffer, Expr, Launch, LaunchPlan
from deepinfer_compile.tuned import Tuned

NAMESPACE = "deepinfer_kernels"
OURS = ("latent_attention", "experts", "route", "linear")
"""Operations whose kernels beat what Inductor makes of them; the others it fuses with their neighbours."""
SOME = 8
"""Tokens to expect at least where their number varies: one graph then serves a few requests and many."""
DIALECT = "triton"


@dataclass(frozen=True)
class Kernel:
    """A kernel for calls of one operation. overload: takes the tensors of `operands` in order, gives the results."""

    overload: Any
    operands: tuple[str, ...]


class Rendered:
    """Calls of dialect operations as calls of kernels, for one device. used, left: how many, and why not, by name.
    tuned: what to choose configurations from before the defaults; stored: how many came from there, by name."""

    def __init__(self, limits: Limits, tuned: Tuned | None = None) -> None:
        self.limits = limits
        self.tuned = tuned
        self.used: Counter[str] = Counter()
        self.stored: Counter[str] = Counter()
        self.left: Counter[str] = Counter()

    def call(self, op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The results of a call in decode, or None where no kernel takes it."""
        if op.name not in OURS:
            return None
        names = [a.name for a in op.overload._schema.arguments]
        given = dict.fromkeys(names) | dict(zip(names, args)) | dict(kwargs)
        if op is ops.LATENT_ATTENTION and given["mask"] is not None:
            given["mask"] = _expanded(given["mask"], given["q_nope"])
        found = self._kernel(op, given)
        if isinstance(found, Refused):
            self.left[f"{op.name}: {found.reason}"] += 1
            return None
        self.used[op.name] += 1
        made = found.overload(*(given[name] for name in found.operands))
        wanted = op.fake(*given.values())
        if isinstance(wanted, tuple):
            return tuple(t.view(w.shape) for t, w in zip(made, wanted, strict=True))
        return made.view(wanted.shape)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """A linear layer of few tokens, or None where a library does as well or better."""
        count = prod(x.shape[:-1])
        most = next(spec.few or 0 for spec in specs() if spec.op is ops.LINEAR)
        if not isinstance(count, int) or count > most or not is_large(weight):
            return None
        made: Tensor | None = self.call(ops.LINEAR, (x.reshape(count, x.shape[-1]), weight, bias), {})
        return made.view(*x.shape[:-1], weight.shape[0]) if made is not None else None

    def _kernel(self, op: Op, given: Mapping[str, Any]) -> Kernel | Refused:
        if op is ops.LATENT_ATTENTION and given["c"].dtype == torch.float32:
            return Refused("products in fp32 are faster in a library")
        call = Call(op, given, "decode")
        reasons = []
        for spec in specs():
            if spec.op is op and DIALECT in spec.sources:
                params = spec.bind(call)
                if not isinstance(params, Refused):
                    return operator(spec, params, self._config(spec, params, _tokens(op, given)))
                reasons.append(params.reason)
        return Refused("; ".join(reasons) or "no kernel template computes it")

    def _config(self, spec: AnySpec, params: Any, tokens: int) -> Any:
        if self.tuned is None:
            return spec.default(params, self.limits, tokens)
        found = self.tuned.choose(spec, params, tokens)
        self.stored[spec.op.name] += found.bucket is not None
        return found.config


def _expanded(mask: Tensor, q_nope: Tensor) -> Tensor:
    """A mask as the kernel reads it: [B, 1 or H, T, S]."""
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    return mask.expand(q_nope.shape[0], -1, q_nope.shape[2], -1)


def _tokens(op: Op, given: Mapping[str, Any]) -> int:
    """About how many new tokens a call has: where that varies, those of the call that was traced, or SOME."""
    first = given[op.overload._schema.arguments[0].name]
    sizes = (first.shape[0], first.shape[2]) if op is ops.LATENT_ATTENTION else first.shape[:-1]
    count = prod(int(n.node.hint if isinstance(n, torch.SymInt) else n) for n in sizes)
    return max(count, SOME) if any(isinstance(n, torch.SymInt) for n in sizes) else count


_MADE: dict[str, Kernel] = {}
"""Operators of this process by name."""


def operator(spec: AnySpec, params: Any, config: Any) -> Kernel:
    """The operator of a kernel, defined once in this process.

    Without early starts, whatever config says: torch cannot see through the instructions for them, and would take all
    operands for written.
    """
    if getattr(config, "pdl", False):
        config = replace(config, pdl=False)
    text = render_kernel(spec, params, config, DIALECT)
    name = f"{spec.op.name}_{sha256(text.encode()).hexdigest()[:12]}"
    if name not in _MADE:
        plan = spec.plan(params, config)
        operands = tuple(o.name for o in plan.operands)
        run = _runner(load_source(text), plan, operands)
        op: Any = torch.library.triton_op(f"{NAMESPACE}::{name}", run, mutates_args=set(spec.op.mutates))
        op.register_fake(lambda *given: _results(plan, dict(zip(operands, given, strict=True))))
        _MADE[name] = Kernel(getattr(getattr(torch.ops, NAMESPACE), name).default, operands)
    return _MADE[name]


def load_source(text: str) -> ModuleType:
    """The rendered source as a module. Triton reads the text of a function from the module's file."""

    def write(folder: Path) -> None:
        (folder / "kernel.py").write_text(text)

    folder = cached({"kind": "rendered-kernel", "source": text}, write)
    name = f"deepinfer_rendered_{sha256(text.encode()).hexdigest()[:16]}"
    found = importlib.util.spec_from_file_location(name, folder / "kernel.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    found.loader.exec_module(module)
    return module


def _runner(module: ModuleType, plan: LaunchPlan, names: Sequence[str]) -> Callable[..., Any]:
    """What the operator does: allocate, and launch in order."""

    def run(*operands: Tensor) -> Any:
        tensors = with_buffers(plan, dict(zip(names, operands, strict=True)))
        for launch in plan.launches:
            _launch(module, launch, tensors)
        return _one_or_all(tuple(tensors[b.name] for b in plan.results))

    # torch reads the operator's schema from here
    one = inspect.Parameter.POSITIONAL_OR_KEYWORD
    takes = [inspect.Parameter(name, one, annotation=Tensor) for name in names]
    gives = Tensor if len(plan.results) == 1 else tuple[(Tensor,) * len(plan.results)]  # type: ignore[misc]
    run.__signature__ = inspect.Signature(takes, return_annotation=gives)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class JitCall:
    """One call of a kernel that can be run again and again, to measure with. tensors: operands, results and scratch
    memory by name. launches: by entry, in order."""

    tensors: dict[str, Tensor]
    launches: tuple[tuple[str, Callable[[], None]], ...]

    def __call__(self) -> None:
        for _, run in self.launches:
            run()


def jit_call(spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> JitCall:
    """A call of a kernel on given operands."""
    module = load_source(render_kernel(spec, params, config, DIALECT))
    plan = spec.plan(params, config)
    tensors = with_buffers(plan, operands)
    return JitCall(tensors, tuple((n.entry, _direct(module, n, tensors)) for n in plan.launches))


def compile_launches(spec: AnySpec, params: Any, config: Any, operands: Mapping[str, Tensor]) -> list[Any]:
    """Compile every launch of a call into Triton's cache; what Triton makes of each. operands: may be on the meta
    device."""
    module = load_source(render_kernel(spec, params, config, DIALECT))
    plan = spec.plan(params, config)
    tensors = with_buffers(plan, operands)
    made = []
    for launch in plan.launches:
        # the compiler needs a pointer's type alone; what torch allocates is aligned
        values = [
            tensors[a.value].dtype if isinstance(a.value, str) else _value(a.value, tensors) for a in launch.arguments
        ]
        made.append(getattr(module, launch.entry).warmup(*values, grid=(1,), **launch.options))
    return made


def with_buffers(plan: LaunchPlan, operands: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The operands, and results and scratch memory of one call, beside them on their device."""
    tensors = dict(operands)
    for buffer in (*plan.results, *plan.scratch):
        tensors[buffer.name] = _allocate(buffer, tensors)
    return tensors


def _launch(module: ModuleType, launch: Launch, tensors: Mapping[str, Tensor]) -> None:
    grid = tuple(_value(e, tensors) for e in launch.grid)
    values = {
        a.name: tensors[a.value] if isinstance(a.value, str) else _value(a.value, tensors) for a in launch.arguments
    }
    torch.library.wrap_triton(getattr(module, launch.entry))[grid](**values, **launch.options)


def _direct(module: ModuleType, launch: Launch, tensors: Mapping[str, Tensor]) -> Callable[[], None]:
    """A launch as a bundle does it."""
    grid = tuple(_value(e, tensors) for e in launch.grid)
    values = [tensors[a.value] if isinstance(a.value, str) else _value(a.value, tensors) for a in launch.arguments]
    return partial(getattr(module, launch.entry)[grid], *values, **launch.options)


def _results(plan: LaunchPlan, tensors: Mapping[str, Tensor]) -> Any:
    return _one_or_all(tuple(_allocate(b, tensors) for b in plan.results))


def _one_or_all(results: tuple[Tensor, ...]) -> Any:
    return results[0] if len(results) == 1 else results


def _allocate(buffer: Buffer, tensors: Mapping[str, Tensor]) -> Tensor:
    shape = [_value(e, tensors) for e in buffer.shape]
    device = next(iter(tensors.values())).device
    return torch.empty(shape, dtype=getattr(torch, buffer.dtype), device=device)


_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "cdiv": lambda a, b: -(-a // b),
    "min": torch.sym_min,
    "max": torch.sym_max,
}


def _value(expr: Expr, tensors: Mapping[str, Tensor]) -> Any:
    """A plan's expression over sizes that may be symbolic."""
    if isinstance(expr, int):
        return expr
    head, a, b = expr
    if head in ("size", "stride"):
        return tensors[a].shape[b] if head == "size" else tensors[a].stride(b)
    return _OPERATORS[head](_value(a, tensors), _value(b, tensors))
