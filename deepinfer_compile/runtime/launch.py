"""How a compiled kernel is called, as data: what it takes, what it makes, and the launches of one call in order.

A kernel record in a bundle holds one `LaunchPlan`. Grids, buffer shapes and scalar arguments are expressions over the
sizes and strides of the operands, so one plan serves every batch, memory can be planned before anything runs, and a
launcher needs no code of the template. An expression is a whole number or a tuple: ("size", operand, dimension),
("stride", operand, dimension) in elements, or (operator, a, b) with an operator of `OPERATORS`. Dimensions count from
the end if negative. The stride of a dimension of size 1 is 0: no step is ever taken along it, and what a tensor has
there may be anything.

What the code was compiled to rely on (types, packed dimensions, divisibility) is checked here, at the call, by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.errors import BundleCorrupt, KernelOperand

Expr = int | tuple[Any, ...]

OPERATORS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "mul": lambda a, b: a * b,
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
SCALARS = ("i32", "i64")
EARLY = "launch_pdl"
"""The option of launches that may start early, by the compiler's name for it. A launcher may ignore it."""


@dataclass(frozen=True)
class Operand:
    """One tensor that a call gives.

    shape: of the last dimensions, None where any size is fine; those before have size 1. packed: how many of the last
    dimensions must lie without gaps.
    """

    name: str
    dtype: str
    shape: tuple[int | None, ...]
    packed: int = 1


@dataclass(frozen=True)
class Buffer:
    """One contiguous tensor that the caller allocates, contents undefined: a result or scratch memory."""

    name: str
    dtype: str
    shape: tuple[Expr, ...]


@dataclass(frozen=True)
class Argument:
    """One argument of a launch, by the name it has in the source.

    type: the compiler's name, such as "*bf16" or "i64". value: an expression for a number (a type of SCALARS), the name
    of an operand or buffer for all else. multiple: what the code relies on; bytes that a tensor's address, or what a
    number, is a multiple of.
    """

    name: str
    type: str
    value: str | Expr
    multiple: int = 1


@dataclass(frozen=True)
class Launch:
    """One launch of one entry function. options: what the compiler must be told (warps, stages).

    With `EARLY` among them it may start before the launch before has ended: the source waits where it must.
    """

    entry: str
    grid: tuple[Expr, ...]
    arguments: tuple[Argument, ...]
    options: dict[str, int]


@dataclass(frozen=True)
class LaunchPlan:
    """Everything to do for one call. results: what the operation gives, in its order; the graph knows their shape."""

    operands: tuple[Operand, ...]
    results: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    launches: tuple[Launch, ...]


def tensors_of(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a call by the names that plans give operands: those of a list `weights` are `weights_0` and so
    on, with gaps where it holds none."""
    found: dict[str, Tensor] = {}
    for name, held in arguments.items():
        given = {f"{name}_{i}": item for i, item in enumerate(held)} if isinstance(held, list) else {name: held}
        found |= {key: item for key, item in given.items() if isinstance(item, Tensor)}
    return found


def evaluate(expr: Expr, tensors: Mapping[str, Any]) -> int:
    """The value of an expression for the given operands."""
    if isinstance(expr, int):
        return expr
    head, a, b = expr
    if head in ("size", "stride"):
        tensor = tensors[a]
        if head == "size":
            return int(tensor.shape[b])
        return 0 if tensor.shape[b] == 1 else int(tensor.stride(b))
    return OPERATORS[head](evaluate(a, tensors), evaluate(b, tensors))


def buffer_shape(buffer: Buffer, tensors: Mapping[str, Any]) -> tuple[int, ...]:
    """The shape of a buffer for the given operands."""
    return tuple(evaluate(e, tensors) for e in buffer.shape)


def buffer_bytes(buffer: Buffer, tensors: Mapping[str, Any]) -> int:
    """How much memory a buffer takes for the given operands."""
    itemsize: int = getattr(torch, buffer.dtype).itemsize
    return prod(buffer_shape(buffer, tensors)) * itemsize


def check_operands(kernel: str, plan: LaunchPlan, tensors: Mapping[str, Tensor]) -> None:
    """Every operand has the type, shape and layout that the kernel was compiled for. Raises KernelOperand."""
    for operand in plan.operands:
        tensor = tensors[operand.name]
        shape = "[" + ", ".join("any" if n is None else str(n) for n in operand.shape) + "]"
        expected = f"{operand.dtype}{shape}"
        found = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        before, last = tensor.shape[: -len(operand.shape)], tensor.shape[-len(operand.shape) :]
        fits = len(last) == len(operand.shape) and all(n == 1 for n in before)
        fits = fits and all(n is None or n == m for n, m in zip(operand.shape, last))
        if str(tensor.dtype) != f"torch.{operand.dtype}" or not fits:
            raise _mismatch(kernel, operand.name, expected, found, "give it the tensor that the graph names")
        if not _is_packed(tensor, operand.packed):
            strides = f"strides {list(tensor.stride())}"
            packed = f"{expected} with its last {operand.packed} dimension(s) packed"
            raise _mismatch(kernel, operand.name, packed, strides, "make the tensor contiguous")


def _is_packed(tensor: Tensor, dimensions: int) -> bool:
    step = 1
    for size, stride in list(zip(tensor.shape, tensor.stride()))[::-1][:dimensions]:
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def values_of(kernel: str, launch: Launch, tensors: Mapping[str, Tensor]) -> list[Tensor | int]:
    """The arguments of a launch in order, pointers as tensors. Raises KernelOperand for a broken promise."""
    found: list[Tensor | int] = []
    for argument in launch.arguments:
        if isinstance(argument.value, str):
            value: Tensor | int = tensors[argument.value]
            rest = tensors[argument.value].data_ptr() % argument.multiple
        else:
            value = evaluate(argument.value, tensors)
            rest = value % argument.multiple
        if rest:
            expected = f"a multiple of {argument.multiple}"
            fix = "align the tensor, or rebuild for this layout"
            raise _mismatch(kernel, f"{argument.name!r} of {launch.entry}", expected, f"{rest} more", fix)
        found.append(value)
    return found


def _mismatch(kernel: str, operand: str, expected: str, found: str, fix: str) -> KernelOperand:
    return KernelOperand(kernel=kernel, operand=operand, expected=expected, found=found, fix=fix)


def plan_to_json(plan: LaunchPlan) -> dict[str, Any]:
    """The plan as plain data."""
    return dataclasses.asdict(plan)


def plan_from_json(data: Mapping[str, Any], file: str) -> LaunchPlan:
    """The inverse of `plan_to_json`. Raises BundleCorrupt naming `file`."""
    try:
        return LaunchPlan(
            operands=tuple(Operand(**{**o, "shape": tuple(o["shape"])}) for o in data["operands"]),
            results=tuple(_buffer(b) for b in data["results"]),
            scratch=tuple(_buffer(b) for b in data["scratch"]),
            launches=tuple(_launch(item) for item in data["launches"]),
        )
    except (KeyError, TypeError, ValueError) as err:
        raise BundleCorrupt(file=file, reason=f"it holds no launch plan: {err}") from None


def _buffer(data: Mapping[str, Any]) -> Buffer:
    return Buffer(data["name"], data["dtype"], tuple(_expr(e) for e in data["shape"]))


def _launch(data: Mapping[str, Any]) -> Launch:
    arguments = []
    for a in data["arguments"]:
        if (a["type"] in SCALARS) == isinstance(a["value"], str):
            raise ValueError(f"argument {a['name']!r} of type {a['type']!r} cannot be {a['value']!r}")
        value = a["value"] if isinstance(a["value"], str) else _expr(a["value"])
        arguments.append(Argument(a["name"], a["type"], value, a["multiple"]))
    options = {str(k): int(v) for k, v in data["options"].items()}
    return Launch(data["entry"], tuple(_expr(e) for e in data["grid"]), tuple(arguments), options)


def _expr(data: Any) -> Expr:
    """An expression from JSON, checked to the leaves. Raises ValueError."""
    if type(data) is int:
        return data
    if isinstance(data, list | tuple) and len(data) == 3:
        head, a, b = data
        if head in ("size", "stride") and type(a) is str and type(b) is int:
            return (head, a, b)
        if head in OPERATORS:
            return (head, _expr(a), _expr(b))
    raise ValueError(f"{data!r} is no expression")
