"""ATen operations as ONNX nodes: one small function each, in a table by the operation's name.

Only what captured language models use is here; an operation that is missing is an error that names it and its source
line, never a guess. Element types follow torch: operands are cast to the type that torch computes in.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from deepinfer_compile.errors import NoOnnxForm
from deepinfer_compile.graph import place_of, target_name, tensor
from deepinfer_compile.onnx_graph import Call, Complex, Emitter, Value

Lower = Callable[[Call], Value]
TABLE: dict[str, Lower] = {}


def lowers(*names: str) -> Callable[[Lower], Lower]:
    """Register a function for operations by name, `default` left out. A second one for a name is an error."""

    def register(function: Lower) -> Lower:
        for name in names:
            if name in TABLE:
                raise ValueError(f"{name} is lowered twice")
            TABLE[name] = function
        return function

    return register


def lower(g: Emitter, node: Node, env: dict[Node, Value]) -> Value:
    """Emit one call. Raises NoOnnxForm naming the operation and its line in the user's model."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return _number_function(g, node, env)
    found = TABLE.get(target_name(node))
    if found is None:
        raise NoOnnxForm(op=target_name(node), reason="no rule says what it becomes", where=place_of(node))
    first: Any = node.args[0] if node.args else None
    if isinstance(first, Node) and isinstance(env[first], Complex) and target_name(node) in BY_PARTS:
        real = {torch.complex64: torch.float32, torch.complex128: torch.float64}[tensor(node).dtype]
        return Complex(found(Call(g, node, {**env, first: part}, real)) for part in env[first])
    return found(Call(g, node, env))


BY_PARTS = (
    *(
        "aten.mul.Tensor",
        "aten.unsqueeze",
        "aten.reshape",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.transpose.int",
    ),
    *("aten.index.Tensor", "aten.index_select", "aten.embedding"),
)
"""What is done to a complex tensor by doing it to its parts; a product only with what is real."""


def _number_function(g: Emitter, node: Node, env: dict[Node, Value]) -> Value:
    """getitem, and arithmetic on sizes."""
    args: Any = torch.fx.node.map_arg(node.args, lambda n: env[n])
    if node.target is operator.getitem:
        return args[0][args[1]]
    kinds: dict[Any, str] = {operator.add: "Add", operator.sub: "Sub", operator.mul: "Mul", operator.floordiv: "Div"}
    kinds |= {operator.mod: "Mod", torch.sym_max: "Max", torch.sym_min: "Min"}
    if node.target not in kinds or len(args) != 2:
        raise NoOnnxForm(op=target_name(node), reason="no rule says what it becomes", where=place_of(node))
    return g.op(kinds[node.target], g.size(args[0]), g.size(args[1]))


# -- one element at a time --------------------------------------------------------------------------------------------

_UNARY = {
    "cos": "Cos",
    "sin": "Sin",
    "exp": "Exp",
    "log": "Log",
    "floor": "Floor",
    "relu": "Relu",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "neg": "Neg",
    "abs": "Abs",
    "reciprocal": "Reciprocal",
    "sqrt": "Sqrt",
    "erf": "Erf",
    "logical_not": "Not",
    "bitwise_not": "Not",
}
for _name, _kind in _UNARY.items():
    TABLE[f"aten.{_name}"] = lambda c, kind=_kind: c.g.op(kind, c.typed("self", c.dtype))  # type: ignore[misc]

_BINARY = {"add": "Add", "sub": "Sub", "mul": "Mul", "div": "Div"}
_OTHER_BINARY = {
    "pow.Tensor_Scalar": "Pow",
    "pow.Tensor_Tensor": "Pow",
    "min.other": "Min",
    "max.other": "Max",
    "minimum": "Min",
    "maximum": "Max",
    "div.Tensor_mode": "Div",
    "div.Scalar_mode": "Div",
}
_COMPARE = {"gt": "Greater", "ge": "GreaterOrEqual", "lt": "Less", "le": "LessOrEqual", "eq": "Equal"}


def _binary(c: Call, kind: str) -> str:
    if c.get("rounding_mode") is not None:
        raise c.refuse(f"division that rounds ({c['rounding_mode']})")
    left, right = ("self", "exponent") if kind == "Pow" else ("self", "other")
    b = c.typed(right, c.dtype)
    if c.get("alpha", 1) != 1:
        b = c.g.op("Mul", b, c.g.const(c["alpha"], c.dtype))
    return c.g.op(kind, c.typed(left, c.dtype), b)


def _compare(c: Call, kind: str) -> str:
    other = c.fake("other") if c.is_tensor("other") else c["other"]
    dtype = torch.result_type(c.fake("self"), other)
    return c.g.op(kind, c.typed("self", dtype), c.typed("other", dtype))


for _name, _kind in {
    f"{n}{f}": k for n, k in _BINARY.items() for f in (".Tensor", ".Scalar")
}.items() | _OTHER_BINARY.items():
    TABLE[f"aten.{_name}"] = lambda c, kind=_kind: _binary(c, kind)  # type: ignore[misc]
for _name, _kind in _COMPARE.items():
    for _form in (".Tensor", ".Scalar"):
        TABLE[f"aten.{_name}{_form}"] = lambda c, kind=_kind: _compare(c, kind)  # type: ignore[misc]
for _form in (".Tensor", ".Scalar"):
    TABLE[f"aten.ne{_form}"] = lambda c: c.g.op("Not", _compare(c, "Equal"))
for _name, _kind in {"logical_and": "And", "bitwise_and": "And", "logical_or": "Or", "bitwise_or": "Or"}.items():
    for _form in ("", ".Tensor"):
        TABLE[f"aten.{_name}{_form}"] = lambda c, kind=_kind: c.g.op(  # type: ignore[misc]
            kind, c.typed("self", torch.bool), c.typed("other", torch.bool)
        )


@lowers("aten.rsub.Scalar")
def _rsub(c: Call) -> str:
    return c.g.op("Sub", c.typed("other", c.dtype), c.typed("self", c.dtype))


@lowers("aten.pow.Scalar")
def _power_of_number(c: Call) -> str:
    return c.g.op("Pow", c.g.const(c["self"], c.dtype), c.typed("exponent", c.dtype))


@lowers("aten.square")
def _square(c: Call) -> str:
    return c.g.op("Mul", c["self"], c["self"])


@lowers("aten.rsqrt")
def _rsqrt(c: Call) -> str:
    return c.g.op("Reciprocal", c.g.op("Sqrt", c.typed("self", c.dtype)))


@lowers("aten.expm1")
def _expm1(c: Call) -> str:
    return c.g.op("Sub", c.g.op("Exp", c.typed("self", c.dtype)), c.g.const(1.0, c.dtype))


@lowers("aten.silu")
def _silu(c: Call) -> str:
    return c.g.op("Mul", c["self"], c.g.op("Sigmoid", c["self"]))


@lowers("aten.gelu")
def _gelu(c: Call) -> str:
    return gelu(c.g, c["self"], c.dtype, c["approximate"])


@lowers("aten.softplus")
def _softplus(c: Call) -> str:
    beta = c.g.const(float(c["beta"]), c.dtype)
    scaled = c.g.op("Mul", c["self"], beta)
    # above the threshold the function is the identity to within rounding, in torch by definition
    large = c.g.op("Greater", scaled, c.g.const(float(c["threshold"]), c.dtype))
    return c.g.op("Where", large, c["self"], c.g.op("Div", c.g.op("Softplus", scaled), beta))


@lowers("aten.clamp", "aten.clamp.Tensor", "aten.clamp_min", "aten.clamp_max")
def _clamp(c: Call) -> str:
    x: str = c.typed("self", c.dtype)
    x = x if c.get("min") is None else c.g.op("Max", x, c.typed("min", c.dtype))
    return x if c.get("max") is None else c.g.op("Min", x, c.typed("max", c.dtype))


@lowers("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(c: Call) -> str:
    return c.g.op("Where", c["condition"], c.typed("self", c.dtype), c.typed("other", c.dtype))


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(c: Call) -> str:
    return c.g.op("Where", c["mask"], c.typed("value", c.dtype), c["self"])


@lowers("aten._to_copy", "aten.to.dtype", "aten.to.dtype_layout", "aten.to.device", "aten.type_as")
def _to(c: Call) -> str:
    return c.g.cast(c["self"], c.fake("self").dtype, c.dtype)


@lowers("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.lift_fresh_copy", "aten.dropout")
def _same(c: Call) -> Value:
    if c.get("train", False):
        raise c.refuse("it is dropout in training mode")
    return c.get("self", None) if "self" in c._raw else c["input"]


# -- over a dimension -------------------------------------------------------------------------------------------------


def _reduce(c: Call, kind: str) -> str:
    dims = c.get("dim")
    dims = list(range(c.fake("self").dim())) if dims is None or dims == [] else dims
    axes = c.g.const(list(dims) if isinstance(dims, (list, tuple)) else [dims])
    return c.g.op(kind, c.typed("self", c.dtype), axes, keepdims=int(c.get("keepdim", False)))


for _name, _kind in {
    "mean.dim": "ReduceMean",
    "sum.dim_IntList": "ReduceSum",
    "mean": "ReduceMean",
    "sum": "ReduceSum",
    "amax": "ReduceMax",
    "amin": "ReduceMin",
}.items():
    TABLE[f"aten.{_name}"] = lambda c, kind=_kind: _reduce(c, kind)  # type: ignore[misc]


@lowers("aten.max.dim", "aten.min.dim")
def _extreme(c: Call) -> tuple[str, str]:
    kind = "Max" if "max" in str(c.call.target) else "Min"
    axis, keep = c.axis(), int(c["keepdim"])
    best = c.g.op(f"Reduce{kind}", c["self"], c.g.const([axis]), keepdims=keep)
    return best, c.g.op(f"Arg{kind}", c["self"], axis=axis, keepdims=keep)


@lowers("aten.softmax.int", "aten._softmax")
def _softmax(c: Call) -> str:
    return c.g.op("Softmax", c.typed("self", c.dtype), axis=c.axis())


@lowers("aten.cumsum")
def _cumsum(c: Call) -> str:
    return c.g.op("CumSum", c.typed("self", c.dtype), c.g.const(c.axis()))


@lowers("aten.topk", "aten.sort", "aten.sort.stable")
def _topk(c: Call) -> tuple[str, ...]:
    axis = c.axis()
    whole = c.fake("self").shape[axis]
    largest = int(c["largest"] if "largest" in c._raw else c["descending"])
    # among equals ONNX takes the lower index first, which is what a stable sort does
    return c.g.ops("TopK", 2, c["self"], c.g.size(c.get("k", whole)), axis=axis, largest=largest, sorted=1)


@lowers("aten.layer_norm")
def _layer_norm(c: Call) -> str:
    sizes = [int(d) for d in c["normalized_shape"]]
    scale = c["weight"] if c["weight"] is not None else c.g.const(torch.ones(sizes).tolist(), c.dtype)
    bias = [] if c["bias"] is None else [c["bias"]]
    return c.g.op("LayerNormalization", c["input"], scale, *bias, axis=-len(sizes), epsilon=float(c["eps"]))


# -- products ---------------------------------------------------------------------------------------------------------


def linear(g: Emitter, x: str, weight: str, bias: str | None) -> str:
    """x [..., K], weight [N, K], bias [N] or None -> [..., N]."""
    y = g.op("MatMul", x, g.once(("t", weight), lambda: g.op("Transpose", weight, perm=[1, 0])))
    return y if bias is None else g.op("Add", y, bias)


@lowers("aten.linear")
def _linear(c: Call) -> str:
    return linear(c.g, c["input"], c["weight"], c["bias"])


@lowers("aten.matmul", "aten.mm", "aten.bmm")
def _matmul(c: Call) -> str:
    return c.g.op("MatMul", c["self"], c["mat2"] if "mat2" in c._raw else c["other"])


@lowers("aten.addmm", "aten.baddbmm")
def _addmm(c: Call) -> str:
    left, right = ("mat1", "mat2") if "mat1" in c._raw else ("batch1", "batch2")
    product, base = c.g.op("MatMul", c[left], c[right]), c["self"]
    if c["alpha"] != 1:
        product = c.g.op("Mul", product, c.g.const(c["alpha"], c.dtype))
    if c["beta"] != 1:
        base = c.g.op("Mul", base, c.g.const(c["beta"], c.dtype))
    return c.g.op("Add", base, product)


# -- shared pieces ----------------------------------------------------------------------------------------------------


def gelu(g: Emitter, x: str, dtype: torch.dtype, approximate: str) -> str:
    """GELU by the error function, or by its tanh form."""
    if approximate == "tanh":
        cube = g.op("Mul", g.op("Mul", x, x), x)
        inner = g.op("Add", x, g.op("Mul", cube, g.const(0.044715, dtype)))
        squashed = g.op("Tanh", g.op("Mul", inner, g.const(math.sqrt(2 / math.pi), dtype)))
    else:
        squashed = g.op("Erf", g.op("Mul", x, g.const(math.sqrt(0.5), dtype)))
    return g.op("Mul", g.op("Mul", x, g.const(0.5, dtype)), g.op("Add", squashed, g.const(1.0, dtype)))


@lowers("aten.polar")
def _polar(c: Call) -> Complex:
    parts = (c.g.op(kind, c["angle"]) for kind in ("Cos", "Sin"))
    return Complex(c.g.op("Mul", c["abs"], part) for part in parts)
