"""The kernel contract: from a node of a graph to the source of a kernel and how to call it.

    node -> Call -> (KernelSpec, Params) or Refused -> Config -> source with a stamp, LaunchPlan -> the compiler

A spec belongs to one operation of the dialect, whose reference is the only definition of what the kernel computes.
Params are what the graph fixes, Config is what tuning may choose; both are flat dataclasses of plain data, every field
is a name of the template and nothing else is. What depends on the batch (grids, strides, buffer sizes) is in the launch
plan, as data, so that a running bundle needs none of this. A target asks with its dialect and its limits; its name
never gets here.

Several specs may compute one operation: the first in `specs()` that takes the call is used.
"""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from jinja2 import TemplateNotFound
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import Node, map_arg

from deepinfer_compile import ops, render
from deepinfer_compile.errors import BadStamp, StaleStamp
from deepinfer_compile.graph import argument, value
from deepinfer_compile.ops.registry import Op, Work
from deepinfer_compile.runtime.launch import Argument, LaunchPlan

P = TypeVar("P")
C = TypeVar("C")

TRITON_POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.bool: "*i1",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
"""What Triton calls a pointer to elements of a type."""
MAX_ALIGN = 16
"""Elements; more alignment than this changes no code."""
POINTER_BYTES = 16
"""The widest load."""


@dataclass(frozen=True)
class Limits:
    """Data about a target, all that common code may ask.

    dtypes: weight types it computes in. device: torch device type that runs it. shared_bytes: on-chip memory of one
    program. cores: programs that run at the same time at least. max_warps: warps of one program. read_bytes, flops:
    what it reads and computes (in 16 bits) a second at best, 0 where nobody knows. pdl: a launch can be told that the
    next one may start before it has ended (programmatic dependent launch).
    """

    dtypes: tuple[str, ...]
    device: str
    shared_bytes: int = 0
    cores: int = 1
    max_warps: int = 1
    read_bytes: float = 0.0
    flops: float = 0.0
    pdl: bool = False

    def modelled(self, work: Work) -> float:
        """Seconds that a call takes at least: its bytes or its arithmetic, whichever is longer. 0 without figures."""
        if not self.read_bytes or not self.flops:
            return 0.0
        return max(work.bytes / self.read_bytes, work.flops / self.flops)


@dataclass(frozen=True)
class Call:
    """One call of an operation: its arguments by their schema names (tensors, fake or real, and plain values).

    phase: the program it is in. In "decode" every request has one new token, in "verify" a few, in "prefill" many.
    """

    op: Op
    arguments: Mapping[str, Any]
    phase: str


@dataclass(frozen=True)
class Refused:
    """Why a spec does not take a call, in words for the report."""

    reason: str


@dataclass(frozen=True)
class Case(Generic[P]):
    """A batch to test and to measure with: new tokens of each request and context lengths including them."""

    name: str
    params: P
    new: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class KernelSpec(Generic[P, C]):
    """One kernel: a template folder and all that is known about it.

    sources: dialect -> template file in the folder. bind: what a call fixes, or why the kernel does not take it.
    default: a good Config without measuring, for at most that many tokens a call. space: every legal Config in a fixed
    order. plan: how it is called. work: for new tokens and lengths as in Case. inputs: operands of a case by schema
    name, with NaN wherever nothing may be read. tolerance: largest error relative to the largest output, by dtype.
    few: tokens above which torch's library does as well or better and is taken, None where the kernel is best for any
    number. unordered: rows of whole numbers that it gives are sets, in the kernel's own order.
    """

    name: str
    op: Op
    params: type[P]
    config: type[C]
    sources: Mapping[str, str]
    bind: Callable[[Call], P | Refused]
    default: Callable[[P, Limits, int], C]
    space: Callable[[P, Limits], Iterator[C]]
    plan: Callable[[P, C], LaunchPlan]
    work: Callable[[P, Sequence[int], Sequence[int]], Work]
    cases: tuple[Case[P], ...]
    inputs: Callable[[Case[P], torch.Generator], dict[str, Any]]
    tolerance: Mapping[torch.dtype, float]
    few: int | None = None
    unordered: bool = False

    def template(self, dialect: str) -> str:
        """Path of the template below the templates folder."""
        return f"{self.name}/{self.sources[dialect]}"


AnySpec = KernelSpec[Any, Any]


@cache
def specs() -> tuple[AnySpec, ...]:
    """Every kernel, by folder name and then in the folder's order: `SPECS` of each package of the templates."""
    from deepinfer_compile import templates

    found: list[AnySpec] = []
    for module in sorted(pkgutil.iter_modules(templates.__path__), key=lambda m: m.name):
        package = importlib.import_module(f"{templates.__name__}.{module.name}")
        found += package.SPECS
    return tuple(found)


def call_of(node: Node, phase: str) -> Call | None:
    """The call that a graph node makes, or None if it calls no operation that kernels compute."""
    op = ops.implements(node.target) if node.op == "call_function" else None
    if op is None:
        return None
    found = {}
    theirs = node.target._schema.arguments  # type: ignore[union-attr]
    for schema, own in zip(op.overload._schema.arguments, theirs, strict=True):
        given = argument(node, own.name)
        found[schema.name] = map_arg(given, value)
    return Call(op, found, phase)


def is_large(*weights: Tensor) -> bool:
    """Whether linear layers with these weights are worth a launch of ours: half precision, and together 1 MiB or
    more."""
    half = all(weight.dtype == torch.bfloat16 for weight in weights)
    return half and sum(weight.numel() * weight.element_size() for weight in weights) >= 1 << 20


def select(call: Call, dialect: str) -> tuple[AnySpec, Any] | Refused:
    """The kernel for a call and its Params, or why there is none."""
    reasons = []
    for spec in specs():
        if spec.op is not call.op or dialect not in spec.sources:
            continue
        params = spec.bind(call)
        if not isinstance(params, Refused):
            return spec, params
        reasons.append(f"{spec.name}: {params.reason}")
    return Refused("; ".join(reasons) or "no kernel template computes it")


def choices(
    spec: KernelSpec[P, C], params: P, limits: Limits, buckets: Sequence[int]
) -> tuple[tuple[int | None, C], ...]:
    """Default configs by number of tokens: (largest number, Config) in rising order, the last without a limit.

    buckets: the numbers of tokens to choose for, rising; neighbours with one choice become one entry.
    """
    found: list[tuple[int | None, C]] = []
    for tokens in buckets:
        config = spec.default(params, limits, tokens)
        if found and found[-1][1] == config:
            found.pop()
        found.append((tokens, config))
    return (*found[:-1], (None, found[-1][1]))


def alignment(*tensors: Tensor | None) -> int:
    """Elements, a power of two up to MAX_ALIGN, of which every row of every tensor starts at a multiple.

    Proven from offsets and strides, which may be symbolic; dimensions of size 1 and the last one do not count.
    """
    steps: list[Any] = []
    for tensor in tensors:
        if tensor is None:
            continue
        steps.append(tensor.storage_offset())
        rows = list(zip(tensor.shape, tensor.stride()))[:-1]
        steps += [stride for size, stride in rows if not statically_known_true(size == 1)]
    align = MAX_ALIGN
    while not all(statically_known_true(step % align == 0) for step in steps):
        align //= 2
    return align


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below a positive number."""
    return 1 << (number - 1).bit_length()


def side_by_side(*tensors: Tensor) -> bool:
    """Whether the elements of every row of every tensor are provably adjacent in memory."""
    return all(statically_known_true(t.stride(-1) == 1) for t in tensors)


def pointer(name: str, dtype: torch.dtype, align: int = MAX_ALIGN) -> Argument:
    """The argument for an operand or buffer of that name, which starts at a multiple of `align` elements."""
    return Argument(name, TRITON_POINTERS[dtype], name, min(POINTER_BYTES, align * dtype.itemsize))


def type_name(dtype: torch.dtype) -> str:
    """A dtype as launch plans write it."""
    return str(dtype).removeprefix("torch.")


def fields_of(item: Any) -> dict[str, Any]:
    """The fields of a Params or Config by name."""
    return {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}


def render_kernel(spec: KernelSpec[P, C], params: P, config: C, dialect: str) -> str:
    """The source of a kernel; its first line is the stamp. Equal arguments give equal bytes.

    Raises ValueError for a template whose names are not the fields of Params and Config and the stamp, TypeError for a
    value that is not plain data, both naming the value.
    """
    template = spec.template(dialect)
    given = {"params": fields_of(params), "config": fields_of(config)}
    twice = given["params"].keys() & given["config"].keys()
    if twice:
        raise ValueError(f"{template}: {sorted(twice)} are fields of both Params and Config")
    line = render.stamp(template, {kind: render.encode_values(template, found) for kind, found in given.items()})
    text = render.fill(template, {**given["params"], **given["config"]}, line)
    if text.split("\n", 1)[0] != f"# {line}":
        raise ValueError(f"{template}: its first line must be `# {{{{ stamp }}}}`")
    return text


def render_stamp(line: str) -> str:
    """The source that a stamp describes, again. Raises BadStamp, StaleStamp."""
    template, data, digest = render.parse_stamp(line)
    try:
        known = render.digest(template)
    except TemplateNotFound:
        raise BadStamp(stamp=line[:120], reason=f"there is no template {template!r} here") from None
    if known != digest:
        raise StaleStamp(template=template, found=digest, known=known)
    try:
        return _again(template, data)
    except (TypeError, ValueError) as err:
        raise BadStamp(stamp=line[:120], reason=str(err)) from None


def _again(template: str, data: dict[str, Any]) -> str:
    """Render from a stamp's values. Raises TypeError, ValueError for values that do not fit the template."""
    if data.keys() != {"params", "config"}:
        return render.render(template, **{name: render.decode(item) for name, item in data.items()})
    spec, dialect = _owner(template)
    params = {name: render.decode(item) for name, item in data["params"].items()}
    config = {name: render.decode(item) for name, item in data["config"].items()}
    return render_kernel(spec, spec.params(**params), spec.config(**config), dialect)


def _owner(template: str) -> tuple[AnySpec, str]:
    """The spec that a template belongs to, and its dialect. Raises ValueError."""
    for spec in specs():
        for dialect in spec.sources:
            if spec.template(dialect) == template:
                return spec, dialect
    raise ValueError(f"{template!r} belongs to no kernel")
