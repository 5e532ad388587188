"""ATen operations that move elements or make them: views, parts, joins, lookups, ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_compile.graph import value
from deepinfer_compile.onnx_graph import Call
from deepinfer_compile.onnx_ops import lowers

# -- views ------------------------------------------------------------------------------------------------------------


@lowers("aten.reshape", "aten.view", "aten._unsafe_view")
def _reshape(c: Call) -> str:
    return c.g.reshape(c["self"], c["shape"] if "shape" in c._raw else c["size"])


@lowers("aten.flatten.using_ints")
def _flatten(c: Call) -> str:
    return c.g.reshape(c["self"], [d if isinstance(d, int) else -1 for d in c.out.shape])


@lowers("aten.unsqueeze")
def _unsqueeze(c: Call) -> str:
    return c.g.op("Unsqueeze", c["self"], c.g.const([c.axis(more=1)]))


@lowers("aten.squeeze.dim", "aten.squeeze.dims", "aten.squeeze")
def _squeeze(c: Call) -> str:
    shape = c.fake("self").shape
    dims = c.get("dim", list(range(len(shape))))
    ones = [d % len(shape) for d in (dims if isinstance(dims, list) else [dims]) if _is_one(shape[d])]
    return c.g.op("Squeeze", c["self"], c.g.const(ones)) if ones else str(c["self"])


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


@lowers("aten.transpose.int", "aten.t", "aten.numpy_T")
def _transpose(c: Call) -> str:
    order = list(range(c.fake("self").dim()))
    a, b = (c.axis("dim0"), c.axis("dim1")) if "dim0" in c._raw else (0, len(order) - 1)
    order[a], order[b] = order[b], order[a]
    return c.g.op("Transpose", c["self"], perm=order)


@lowers("aten.permute")
def _permute(c: Call) -> str:
    rank = c.fake("self").dim()
    return c.g.op("Transpose", c["self"], perm=[int(d) % rank for d in c["dims"]])


@lowers("aten.expand")
def _expand(c: Call) -> str:
    # a size of -1 keeps what is there, and so does 1 in ONNX
    dims = [1 if isinstance(d, int) and d == -1 else d for d in c["size"]]
    return c.g.op("Expand", c["self"], c.g.shape(dims))


@lowers("aten.repeat")
def _repeat(c: Call) -> str:
    missing = len(c["repeats"]) - c.fake("self").dim()
    x = c.g.op("Unsqueeze", c["self"], c.g.const(list(range(missing)))) if missing else c["self"]
    return c.g.op("Tile", x, c.g.shape(c["repeats"]))


@lowers("aten.repeat_interleave.self_int")
def _repeat_interleave(c: Call) -> str:
    if c["dim"] is None:
        raise c.refuse("it repeats over all dimensions")
    axis, rank = c.axis(), c.fake("self").dim()
    spread = c.g.op("Unsqueeze", c["self"], c.g.const([axis + 1]))
    tiled = c.g.op("Tile", spread, c.g.shape([c["repeats"] if i == axis + 1 else 1 for i in range(rank + 1)]))
    return c.g.reshape(tiled, list(c.out.shape))


# -- parts and joins --------------------------------------------------------------------------------------------------


@lowers("aten.select.int")
def _select(c: Call) -> str:
    return c.g.op("Gather", c["self"], c.g.scalar(c["index"]), axis=c.axis())


@lowers("aten.slice.Tensor")
def _slice(c: Call) -> str:
    start = 0 if c["start"] is None else c["start"]
    end = (1 << 63) - 1 if c["end"] is None else c["end"]
    return c.g.op("Slice", c["self"], c.g.size(start), c.g.size(end), c.g.const([c.axis()]), c.g.const([c["step"]]))


@lowers("aten.cat", "aten.concat")
def _cat(c: Call) -> str:
    dim = int(c["dim"])
    return c.g.op("Concat", *_alike(c), axis=dim + c.out.dim() if dim < 0 else dim)


def _alike(c: Call) -> list[str]:
    """The tensors of a list argument in the element type of the result."""
    nodes = c._raw["tensors"]
    return [c.g.cast(c.env[n], value(n).dtype, c.dtype) for n in nodes]


@lowers("aten.stack")
def _stack(c: Call) -> str:
    dim = int(c["dim"])
    axis = dim + c.out.dim() if dim < 0 else dim
    return c.g.op("Concat", *(c.g.op("Unsqueeze", x, c.g.const([axis])) for x in _alike(c)), axis=axis)


@lowers("aten.split.Tensor", "aten.split_with_sizes", "aten.chunk", "aten.split.sizes")
def _split(c: Call) -> tuple[str, ...]:
    axis = c.axis()
    sizes = [v.shape[axis] for v in value(c.call)]
    if len(sizes) == 1:
        return (c["self"],)
    return c.g.ops("Split", len(sizes), c["self"], c.g.shape(sizes), axis=axis)


@lowers("aten.unbind.int")
def _unbind(c: Call) -> tuple[str, ...]:
    axis = c.axis()
    return tuple(c.g.op("Gather", c["self"], c.g.const(i), axis=axis) for i in range(len(value(c.call))))


# -- lookups ----------------------------------------------------------------------------------------------------------


@lowers("aten.embedding")
def _embedding(c: Call) -> str:
    return c.g.op("Gather", c["weight"], c["indices"], axis=0)


@lowers("aten.index_select")
def _index_select(c: Call) -> str:
    return c.g.op("Gather", c["self"], c["index"], axis=c.axis())


@lowers("aten.index.Tensor")
def _index(c: Call) -> str:
    given = [(axis, n) for axis, n in enumerate(c._raw["indices"]) if n is not None]
    if len(given) != 1 or value(given[0][1]).dtype == torch.bool:
        raise c.refuse("it looks up by several tensors, or by a mask")
    return c.g.op("Gather", c["self"], c.env[given[0][1]], axis=given[0][0])


@lowers("aten.gather")
def _gather(c: Call) -> str:
    return c.g.op("GatherElements", c["self"], c["index"], axis=c.axis())


@lowers("aten.scatter.value", "aten.scatter.src")
def _scatter(c: Call) -> str:
    updates = c["src"] if "src" in c._raw else _filled(c, c["value"], c["index"])
    return c.g.op("ScatterElements", c["self"], c["index"], updates, axis=c.axis())


def _filled(c: Call, held: float, like: str) -> str:
    """A constant in the shape of another tensor, in the element type of the result."""
    return c.g.op("Expand", c.g.const(held, c.dtype), c.g.op("Shape", like))


@lowers("aten.tril", "aten.triu")
def _triangle(c: Call) -> str:
    upper = int("triu" in str(c.call.target))
    # Trilu takes no bool in every runtime
    wide = c.g.cast(c["self"], c.dtype, torch.int64) if c.dtype == torch.bool else c["self"]
    out = c.g.op("Trilu", wide, c.g.scalar(c["diagonal"]), upper=upper)
    return c.g.cast(out, torch.int64, torch.bool) if c.dtype == torch.bool else out


# -- making -----------------------------------------------------------------------------------------------------------


@lowers("aten.sym_size.int")
def _sym_size(c: Call) -> str:
    return c.g.op("Gather", c.g.op("Shape", c["self"]), c.g.const([c.axis()]), axis=0)


@lowers("aten.full", "aten.zeros", "aten.ones", "aten.new_zeros", "aten.new_ones", "aten.new_full")
def _full(c: Call) -> str:
    return c.g.op("Expand", c.g.const(_fill(c), c.dtype), c.g.shape(_sizes(c)))


@lowers("aten.full_like", "aten.zeros_like", "aten.ones_like")
def _full_like(c: Call) -> str:
    return _filled(c, _fill(c), c["self"])


def _fill(c: Call) -> float:
    if "fill_value" in c._raw:
        held: float = c["fill_value"]
        return held
    return 1 if "ones" in str(c.call.target) else 0


def _sizes(c: Call) -> Sequence[Any]:
    found: Sequence[Any] = c["size"]
    return found


@lowers("aten.scalar_tensor")
def _scalar_tensor(c: Call) -> str:
    return c.typed("s", c.dtype)


@lowers("aten.arange", "aten.arange.start", "aten.arange.start_step")
def _arange(c: Call) -> str:
    parts = (c.get("start", 0), c["end"], c.get("step", 1))
    return c.g.op("Range", *(c.g.scalar(p, c.dtype) for p in parts))
