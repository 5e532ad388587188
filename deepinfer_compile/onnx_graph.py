"""Writing ONNX nodes: names, constants, casts and sizes. What operations become is in `onnx_ops` and `onnx_dialect`.

A value of our graph is the name of an ONNX tensor. A symbolic size is the name of an int64 tensor of one element, so
that shapes are joined from pieces. Constants are stored once, however often they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor
from torch.fx import Node

from deepinfer_compile.errors import NoOnnxForm
from deepinfer_compile.graph import place_of, target_name, tensor, value

OPSET = 18
"""What is emitted: reductions take their axes as an input, LayerNormalization and Trilu exist."""
IR_VERSION = 9
TYPES = {
    torch.float64: TensorProto.DOUBLE,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.int16: TensorProto.INT16,
    torch.int8: TensorProto.INT8,
    torch.uint8: TensorProto.UINT8,
    torch.bool: TensorProto.BOOL,
}
Value = Any
"""What a node of our graph became: a tensor's name, a tuple of them, a `Complex`, or a Python number."""


def onnx_type(dtype: torch.dtype) -> int:
    """The ONNX element type of a torch dtype. Raises NoOnnxForm."""
    if dtype not in TYPES:
        raise NoOnnxForm(op=str(dtype), reason="ONNX has no such element type")
    return int(TYPES[dtype])


class Complex(tuple[str, str]):
    """A complex tensor as its real and imaginary part; ONNX has no complex arithmetic."""


class Emitter:
    """The graph under construction. `prefix` goes before the names of new nodes."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, TensorProto] = {}
        self.symbols: dict[str, str] = {}
        self.prefix = ""
        self._memo: dict[Any, Value] = {}
        self._stored: dict[tuple[int, tuple[int, ...], bytes], str] = {}

    @contextmanager
    def under(self, prefix: str) -> Iterator[None]:
        """Name new nodes under a prefix."""
        before, self.prefix = self.prefix, prefix
        try:
            yield
        finally:
            self.prefix = before

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """A node with one output; returns the output's name."""
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, outputs: int, *inputs: str, **attributes: Any) -> tuple[str, ...]:
        """A node with several outputs."""
        name = f"{self.prefix}{kind}_{len(self.nodes)}"
        names = tuple(f"{name}:{i}" for i in range(outputs))
        self.nodes.append(helper.make_node(kind, list(inputs), list(names), name, **attributes))
        return names

    def const(self, held: Any, dtype: torch.dtype = torch.int64) -> str:
        """A constant tensor from a number, or from nested lists of numbers."""
        made = tensor_proto(f"constant_{len(self._stored)}", torch.tensor(held, dtype=dtype))
        key = (made.data_type, tuple(made.dims), made.raw_data)
        if key not in self._stored:
            self._stored[key] = made.name
            self.constants[made.name] = made
        return self._stored[key]

    def once(self, key: Any, make: Callable[[], Value]) -> Value:
        """What `make` emitted the first time it was asked for under this key."""
        if key not in self._memo:
            with self.under("shared/"):
                self._memo[key] = make()
        return self._memo[key]

    def cast(self, x: str, found: torch.dtype, wanted: torch.dtype) -> str:
        """A tensor in another element type, itself if it has that."""
        return x if found == wanted else self.op("Cast", x, to=onnx_type(wanted))

    def size(self, dim: Any) -> str:
        """A size as int64[1]: of a number, of a symbolic size of the trace, or what is that already."""
        if isinstance(dim, str):
            return dim
        if isinstance(dim, int):
            return self.const([dim])
        factor, symbol = dim.node.expr.as_coeff_Mul()
        if str(symbol) not in self.symbols:
            raise NoOnnxForm(op=f"the size {dim}", reason="it is no multiple of a length of the input")
        base = self.symbols[str(symbol)]
        return (
            base
            if factor == 1
            else self.once(("size", str(dim)), lambda: self.op("Mul", base, self.const([int(factor)])))
        )

    def shape(self, dims: Sequence[Any]) -> str:
        """A shape as int64[rank] from numbers and sizes."""
        if all(isinstance(d, int) for d in dims):
            return self.const([int(d) for d in dims])
        return self.op("Concat", *(self.size(d) for d in dims), axis=0)

    def scalar(self, size: Any, dtype: torch.dtype = torch.int64) -> str:
        """A size or number as a tensor without dimensions."""
        if isinstance(size, (int, float)):
            return self.const(size, dtype)
        return self.cast(self.op("Squeeze", self.size(size), self.const([0])), torch.int64, dtype)

    def reshape(self, x: str, dims: Sequence[Any]) -> str:
        """A reshape; one dimension may be -1."""
        return self.op("Reshape", x, self.shape(dims))


class Call:
    """One call of our graph, its arguments by the names of the operation's schema.

    `c["dim"]` is an argument as it was emitted (a tensor's name, a number, a list of them), `c.node("self")` the node
    behind it.
    """

    def __init__(self, emitter: Emitter, node: Node, env: dict[Node, Value], real: torch.dtype | None = None) -> None:
        """real: the element type of the parts of a complex tensor, for a call on one of them."""
        self.g, self.call, self.env, self._real = emitter, node, env, real
        arguments = node.target._schema.arguments  # type: ignore[union-attr]
        self._raw = {a.name: a.default_value for a in arguments if a.has_default_value()}
        self._raw |= {a.name: held for a, held in zip(arguments, node.args)} | dict(node.kwargs)

    def __getitem__(self, name: str) -> Value:
        return torch.fx.node.map_arg(self._raw[name], lambda n: self.env[n])

    def get(self, name: str, default: Value = None) -> Value:
        """An argument that the operation may not have."""
        return self[name] if name in self._raw else default

    def node(self, name: str) -> Node:
        """The node behind an argument. Raises NoOnnxForm if it is a number or nothing."""
        held = self._raw.get(name)
        if not isinstance(held, Node):
            raise self.refuse(f"its argument {name!r} is no tensor")
        return held

    def fake(self, name: str) -> Tensor:
        """The recorded value of a tensor argument."""
        return tensor(self.node(name))

    def is_tensor(self, name: str) -> bool:
        """Whether an argument is a tensor."""
        held = self._raw.get(name)
        return isinstance(held, Node) and isinstance(value(held), Tensor)

    @property
    def out(self) -> Tensor:
        """The recorded value of the result."""
        return tensor(self.call)

    @property
    def dtype(self) -> torch.dtype:
        """The element type of the result."""
        return self._real or self.out.dtype

    def typed(self, name: str, dtype: torch.dtype) -> str:
        """A tensor or number argument in an element type."""
        if not self.is_tensor(name):
            held = self[name]
            return self.g.scalar(held, dtype) if isinstance(held, str) else self.g.const(held, dtype)
        found = self.fake(name).dtype
        if found.is_complex and (self._real is None or isinstance(self[name], Complex)):
            raise self.refuse("ONNX has no complex numbers")
        return self.g.cast(self[name], self._real if found.is_complex and self._real else found, dtype)

    def axis(self, name: str = "dim", of: str = "self", more: int = 0) -> int:
        """A dimension argument counted from the front; more: dimensions that the result has beyond `of`."""
        dim = int(self[name])
        return dim + self.fake(of).dim() + more if dim < 0 else dim

    def refuse(self, reason: str) -> NoOnnxForm:
        """The error that says that this call cannot be exported."""
        return NoOnnxForm(op=target_name(self.call), reason=reason, where=place_of(self.call))


def tensor_proto(name: str, held: Tensor) -> TensorProto:
    """A contiguous tensor with its data inside the model."""
    raw = held.reshape(-1).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, onnx_type(held.dtype), tuple(held.shape), raw, raw=True)
