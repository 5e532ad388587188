"""Run a kernel in Triton's CPU interpreter, by its launch plan, on poisoned memory.

Import this only in a process that was started with TRITON_INTERPRET=1 (tests/templates/test_interpreted.py does that).
The interpreter is mended in five places: bf16 matrix products multiply raw bit patterns, casts to bf16 truncate,
Triton 3.6 cannot index with a scalar under NumPy 2.4 and newer, and every call of a device function replaces the whole
language once more. And every look at a type made a table of all of them.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from deepinfer_compile.kernels import AnySpec, render_kernel
from deepinfer_compile.runtime.launch import (
    Buffer,
    check_operands,
    evaluate,
    plan_from_json,
    plan_to_json,
    tensors_of,
    values_of,
)

assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen when triton is imported"

GUARD = 64
"""Elements of NaN before and after every result, which must stay."""
POISON = -(1 << 31)
"""What stands for NaN among whole numbers."""


def _wide(handle: Any) -> Any:
    """A bf16 value, kept as bit patterns, as fp32."""
    return (handle.data.astype(np.uint32) << 16).view(np.float32)


def _mend_dot() -> None:
    old = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, inexact: Any) -> Any:
        if a.dtype.scalar != tl.bfloat16:
            return old(self, a, b, d, precision, inexact)
        made = np.matmul(_wide(a), _wide(b), dtype=d.data.dtype) + d.data
        return interpreter.TensorHandle(made, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _mend_cast() -> None:
    old = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, kind: Any) -> Any:
        if src.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
            return old(self, src, kind)
        bits = np.ascontiguousarray(src.data, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        made = np.where(np.isnan(src.data), (bits >> 16) | 0x40, rounded).astype(np.uint16)
        return interpreter.TensorHandle(made, kind.scalar)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


def _mend_index() -> None:
    old = interpreter._patch_lang_tensor

    def patch(tensor: Any, *rest: Any) -> None:
        old(tensor, *rest)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch


def _mend_replacing() -> None:
    """A launch replaces the language for its kernel; functions called within, once for each module they are from."""
    old, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[int] = set()

    def patch(fn: Any) -> Any:
        known = id(fn.__globals__)
        if known in seen:
            return None
        seen.add(known)
        return old(fn)

    def call(self: Any, *given: Any, **named: Any) -> Any:
        seen.clear()
        return launch(self, *given, **named)

    interpreter._patch_lang = patch
    interpreter.GridExecutor.__call__ = call


def _mend_types() -> None:
    """What NumPy calls a type is kept."""
    old = interpreter._get_np_dtype
    known: dict[str, Any] = {}

    def np_dtype(kind: Any) -> Any:
        if type(kind) is not tl.dtype:
            return old(kind)
        if kind.name not in known:
            known[kind.name] = old(kind)
        return known[kind.name]

    interpreter._get_np_dtype = np_dtype


def _no_early_starts() -> None:
    """Here a launch has ended when the next one starts."""
    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(tl.extra.cuda, name, lambda: None)


_mend_dot()
_mend_cast()
_mend_index()
_mend_replacing()
_mend_types()
_no_early_starts()


def load(text: str, folder: Path) -> Any:
    """A rendered source as a module, from a file of its own."""
    path = folder / f"kernel_{abs(hash(text))}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # the compiler folds constants; here Python would have to mix them with the whole numbers of a loop
    for name, item in list(vars(module).items()):
        if isinstance(item, tl.constexpr):
            setattr(module, name, item.value)
    return module


def run(spec: AnySpec, params: Any, config: Any, arguments: Mapping[str, Any], folder: Path) -> tuple[Tensor, ...]:
    """The results of a kernel, flat as its plan gives them. Operands may be written."""
    made = run_all(spec, params, config, arguments, folder)
    return tuple(made[b.name] for b in spec.plan(params, config).results)


def run_all(spec: AnySpec, params: Any, config: Any, arguments: Mapping[str, Any], folder: Path) -> dict[str, Tensor]:
    """Results and scratch memory of a kernel by name, poisoned where nothing was written."""
    module = load(render_kernel(spec, params, config, "triton"), folder)
    plan = plan_from_json(plan_to_json(spec.plan(params, config)), "test")
    tensors = tensors_of(arguments)
    check_operands(spec.name, plan, tensors)
    guarded = {b.name: _poisoned(b, tensors) for b in (*plan.results, *plan.scratch)}
    tensors |= {name: inner for name, (_, inner) in guarded.items()}
    for launch in plan.launches:
        grid = tuple(evaluate(e, tensors) for e in launch.grid)
        if 0 not in grid:
            getattr(module, launch.entry)[grid](*values_of(spec.name, launch, tensors))
    for name, (whole, inner) in guarded.items():
        edges = torch.cat((whole[:GUARD], whole[GUARD + inner.numel() :]))
        kept = edges.isnan() if edges.is_floating_point() else edges == poison(edges.dtype)
        assert kept.all(), f"{name} was written outside"
    return {name: inner for name, (_, inner) in guarded.items()}


def poison(dtype: torch.dtype) -> float:
    """What memory holds before a kernel runs."""
    return torch.nan if dtype.is_floating_point else 0xA5 if dtype == torch.uint8 else POISON


def _poisoned(buffer: Buffer, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    shape = [evaluate(e, tensors) for e in buffer.shape]
    dtype = getattr(torch, buffer.dtype)
    whole = torch.full((prod(shape) + 2 * GUARD,), poison(dtype), dtype=dtype)
    return whole, whole[GUARD : GUARD + prod(shape)].view(shape)
