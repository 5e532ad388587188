"""How an operation of the dialect is defined: schema, fake function, eager reference, work.

The reference is the only definition of an op's meaning: it is what runs when an intermediate graph is executed, what
passes are compared with and what kernel templates are tested against. It is written for clarity, in fp32 accumulation
where the op says so, and never for speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "deepinfer"
_library = torch.library.Library(NAMESPACE, "DEF")


@dataclass(frozen=True)
class Work:
    """Arithmetic and traffic of one call. flops: multiply-adds count two. bytes: each operand moved once."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class Op:
    """One operation of the dialect. `overload` is what graph nodes carry as their target."""

    name: str
    schema: str
    overload: Any
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    work: Callable[..., Work]
    mutates: tuple[str, ...]


OPS: dict[str, Op] = {}


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    work: Callable[..., Work],
) -> Op:
    """Register one op with torch.library and in `OPS`. A second definition of a name is an error."""
    name = schema.split("(", 1)[0]
    if name in OPS:
        raise ValueError(f"operation {name!r} is defined twice")
    _library.define(schema)
    _library.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    overload = getattr(torch.ops.deepinfer, name).default
    mutates = tuple(a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    op = Op(name, schema, overload, reference, fake, work, mutates)
    OPS[name] = op
    return op


def find(target: object) -> Op | None:
    """The dialect op behind a node target, or None."""
    namespace = getattr(target, "namespace", None)
    if namespace != NAMESPACE:
        return None
    return OPS.get(target._schema.name.split("::", 1)[1])  # type: ignore[attr-defined]


def implements(target: object) -> Op | None:
    """The op of which a kernel can take the place of a node target: the dialect op behind it, or that of ATen's
    linear."""
    return OPS["linear"] if target is torch.ops.aten.linear.default else find(target)


def size_bytes(*tensors: Tensor | None) -> int:
    """Bytes of the given tensors, None counting nothing."""
    return sum(int(t.numel()) * t.element_size() for t in tensors if t is not None)


def wide(t: Tensor) -> Tensor:
    """The tensor in the type that references compute in: fp32, or fp64 where the operand is fp64 (exact replay)."""
    return t if t.dtype == torch.float64 else t.float()
