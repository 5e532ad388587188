"""Where outputs lie in memory. A functional graph has values only, and a rewrite may drop or add a copy: here a graph
gets back the sharing and the strides that Dynamo saw, or is refused with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from deepinfer_compile.errors import NotFunctional
from deepinfer_compile.match import equal_size, expr, same_sizes


@dataclass(frozen=True)
class Output:
    """How an output lies in memory: in that of `home`, the first such of (inputs..., outputs...), or is `home` itself.

    like: its shape, strides and dtype as Dynamo saw them; a functional trace has others after a write.
    """

    home: int
    itself: bool
    like: Tensor


def memory(t: Tensor) -> int:
    """What two tensors that share memory have in common."""
    return int(t.untyped_storage()._cdata)


def placed(results: Sequence[Any], seen: Sequence[Any], inputs: Sequence[Any], written: Sequence[int]) -> Any:
    """An Output, or None for what is no tensor, for each of a functional trace's results.

    seen: all inputs and results as Dynamo saw them; written: indices of inputs that the graph writes to.
    Raises NotFunctional for sharing that cannot be kept.
    """
    return tuple(_placed(t, seen[len(inputs) + at], seen, inputs, written) for at, t in enumerate(results))


def _placed(t: Any, like: Any, seen: Sequence[Any], inputs: Sequence[Any], written: Sequence[int]) -> Output | None:
    if not isinstance(t, Tensor):
        return None
    if not isinstance(like, Tensor) or like.dtype != t.dtype or not same_sizes(like.shape, t.shape):
        raise NotFunctional(reason="what Dynamo recorded of an output is not what it is")
    home = next(i for i, other in enumerate(seen) if isinstance(other, Tensor) and memory(other) == memory(like))
    out = Output(home, home < len(inputs) and inputs[home] is t, like)
    if home < len(inputs) and not out.itself:
        if home in written:
            raise NotFunctional(reason="it returns a view of an input that it writes to")
        if inputs[home].dtype != t.dtype:
            raise NotFunctional(reason="it returns a view of an input in another dtype")
    return out


def settled(results: Sequence[Any], outputs: Sequence[Output | None], args: Sequence[Any]) -> list[Any]:
    """The results where their outputs lie: those of other memory or other strides are copied, aliases stay aliases.

    args: the inputs. Raises NotFunctional where an output should share memory and cannot.
    """
    places = {i: a for i, a in enumerate(args) if isinstance(a, Tensor)}
    return [_settled(r, out, outputs, args, places) for r, out in zip(results, outputs, strict=True)]


def _settled(
    result: Any, out: Output | None, outputs: Sequence[Output | None], args: Sequence[Any], places: dict[int, Tensor]
) -> Any:
    """places: the tensor that each home is, added to."""
    if out is None:
        return result
    if out.itself:
        return args[out.home]
    base = places.get(out.home)
    if base is None:
        if any(memory(p) == memory(result) for p in places.values()) or not _lies_as(result, out.like):
            result = _in_order(result, out.like)
        places[out.home] = result
        return result
    if memory(base) == memory(result) and _lies_as(result, out.like):
        # a view of a whole input is not the input itself: its shape may be changed without the input's
        return torch.ops.aten.alias.default(result) if out.home < len(args) else result
    first = outputs[out.home - len(args)] if out.home >= len(args) else None
    if first is None or not _is_whole(first.like):
        raise NotFunctional(reason="an output shares memory in a way that the raised graph does not keep")
    return _view_like(base, out.like, args)


def _is_whole(t: Tensor) -> bool:
    """Whether there is nothing else in its memory, so that every other view of that is a view of it."""
    # as expressions: arithmetic on sizes of Dynamo's trace would be recorded in this one
    return equal_size(t.untyped_storage().nbytes(), expr(t.numel()) * t.element_size())


def _view_like(base: Tensor, like: Tensor, args: Sequence[Any]) -> Tensor:
    """The view of `base`, which is all of its memory, that `like` is of what Dynamo saw in its place."""
    held = [a for a in args if isinstance(a, SymInt)] + [d for a in args if isinstance(a, Tensor) for d in a.shape]
    known = {d.node.expr: d for d in held if isinstance(d, SymInt) and d.node.expr.is_symbol}

    def formed(size: int | SymInt) -> Any:
        # sizes of another trace have no place in this one, their symbols do
        return sympy_interp(PythonReferenceAnalysis, known, size.node.expr) if isinstance(size, SymInt) else size

    start = formed(like.storage_offset()) + base.storage_offset()
    return base.as_strided([formed(d) for d in like.shape], [formed(d) for d in like.stride()], start)


def _lies_as(t: Tensor, like: Tensor) -> bool:
    """Equal strides, but for dimensions of one element or none, whose strides mean nothing."""
    held = zip(t.stride(), like.stride(), like.shape, strict=True)
    return all(equal_size(s, r) or equal_size(d, 1) or equal_size(d, 0) for s, r, d in held)


def _in_order(result: Tensor, like: Tensor) -> Tensor:
    """A copy whose dimensions lie in memory in the order of those of `like`, without gaps."""
    steps = [s.node.hint or 0 if isinstance(s, SymInt) else s for s in like.stride()]
    order = sorted(range(result.dim()), key=lambda d: (-steps[d], d))
    if order == sorted(order):
        copy = result.clone(memory_format=torch.contiguous_format)
    else:
        turned = result.permute(order).clone(memory_format=torch.contiguous_format)
        copy = turned.permute([order.index(d) for d in range(result.dim())])
    if not _lies_as(copy, like):
        raise NotFunctional(reason="an output lies in memory in a way that the raised graph does not keep")
    return copy
