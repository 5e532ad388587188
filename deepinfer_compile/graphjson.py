"""Graphs as data: fx to JSON and back. The one form of a graph that loads (bundles, reproducers, golden files).

Values of inputs are stored with symbolic sizes by name; on the way back every other value is computed again by running
the op on fake operands, so a loaded graph has no recorded shape that its ops do not give.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from deepinfer_compile.graph import SymbolNames, evaluate, make_module, place_of, value
from deepinfer_compile.runtime.interpret import FLOATS, FUNCTIONS, decode, resolve

HINT = 6
"""Example size given to a symbolic dimension of a loaded graph."""


def encode(arg: Any) -> Any:
    """One node argument as JSON. Raises TypeError for what the form cannot hold."""
    if isinstance(arg, Node):
        return {"ref": arg.name}
    if isinstance(arg, (list, torch.fx.immutable_collections.immutable_list, torch.Size)):
        return [encode(a) for a in arg]
    if isinstance(arg, tuple):
        return {"tuple": [encode(a) for a in arg]}
    if isinstance(arg, float) and not math.isfinite(arg):
        return {"float": next(k for k, v in FLOATS.items() if v == arg or (math.isnan(v) and math.isnan(arg)))}
    if arg is None or isinstance(arg, (bool, int, float, str)):
        return arg
    for kind, cls in (("dtype", torch.dtype), ("layout", torch.layout), ("memory_format", torch.memory_format)):
        if isinstance(arg, cls):
            return {kind: str(arg).removeprefix("torch.")}
    if isinstance(arg, torch.device):
        return {"device": str(arg)}
    raise TypeError(f"a graph cannot store {type(arg).__name__} {arg!r}")


def encode_value(val: Any, names: SymbolNames) -> Any:
    """Shape and dtype of a fake value."""
    if isinstance(val, Tensor):
        dims = [d if isinstance(d, int) else names(d) for d in val.shape]
        return {"dtype": str(val.dtype).removeprefix("torch."), "shape": dims}
    if isinstance(val, (tuple, list)):
        return {"items": [encode_value(v, names) for v in val]}
    return {"number": names(val)}


def target_text(node: Node) -> str:
    """The stored name of what a node calls."""
    if isinstance(node.target, torch._ops.OpOverload):
        namespace, name = node.target._schema.name.split("::", 1)
        return f"{namespace}.{name}.{node.target._overloadname}"
    if isinstance(node.target, str):
        return node.target
    for name, function in FUNCTIONS.items():
        if function is node.target:
            return name
    raise TypeError(f"a graph cannot store a call of {node.target!r}")


def to_json(gm: GraphModule, places: bool = False, symbols: SymbolNames | None = None) -> dict[str, Any]:
    """The graph as plain data. With places, each call says where in the user's model it comes from."""
    names = {"placeholder": "input", "call_function": "call", "call_module": "block", "output": "output"}
    symbols = symbols or SymbolNames()
    nodes: list[dict[str, Any]] = []
    for node in gm.graph.nodes:
        entry: dict[str, Any] = {"name": node.name, "op": names[node.op]}
        if node.op in ("call_function", "call_module"):
            entry["target"] = target_text(node)
        if node.op != "placeholder":
            entry["args"] = [encode(a) for a in node.args]
        if node.kwargs:
            entry["kwargs"] = {k: encode(v) for k, v in node.kwargs.items()}
        if node.op != "output":
            entry["val"] = encode_value(value(node), symbols)
        if "weight" in node.meta:
            entry["weight"] = node.meta["weight"]
        if node.op == "call_module":
            entry["layer"] = node.meta.get("layer")
        if places and node.op == "call_function":
            entry["place"] = place_of(node)
        nodes.append(entry)
    return {"nodes": nodes}


class _Values:
    """Fake values from stored shapes; equal symbol names become one symbol."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        self.symbols: dict[str, Any] = {}

    def symbol(self, name: str) -> Any:
        if name not in self.symbols:
            if not name.isidentifier():
                raise ValueError(f"input size {name!r} is not a plain symbol")
            context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
            # each symbol gets its own hint, or the shape environment would take equal sizes for one symbol
            real = torch.empty(HINT + len(self.symbols))
            fake = self.mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"size_{name}"))
            self.symbols[name] = fake.shape[0]
        return self.symbols[name]

    def tensor(self, stored: dict[str, Any]) -> Tensor:
        dims = [d if isinstance(d, int) else self.symbol(d) for d in stored["shape"]]
        with self.mode:
            return torch.empty(dims, dtype=getattr(torch, stored["dtype"]))


def from_json(
    data: dict[str, Any], blocks: dict[str, GraphModule] | None = None, values: _Values | None = None
) -> GraphModule:
    """A graph module from its data; `blocks` are the graphs that a skeleton calls."""
    values = values or _Values()
    graph = Graph()
    env: dict[str, Any] = {}
    root = torch.nn.Module()
    for name, block in (blocks or {}).items():
        root.add_module(name, block)
    for entry in data["nodes"]:
        kind, name = entry["op"], entry["name"]
        if kind == "input":
            node = graph.create_node("placeholder", name, name=name)
            node.meta["val"] = values.tensor(entry["val"])
            if "weight" in entry:
                node.meta["weight"] = entry["weight"]
        elif kind == "output":
            graph.output(decode(entry["args"][0], env))
            continue
        else:
            args = tuple(decode(a, env) for a in entry["args"])
            kwargs = {k: decode(v, env) for k, v in entry.get("kwargs", {}).items()}
            if kind == "block":
                node = graph.create_node("call_module", entry["target"], args, kwargs, name=name)
                node.meta["layer"] = entry.get("layer")
                node.meta["val"] = _block_value(blocks or {}, entry["target"], args, values.mode)
            else:
                target = resolve(entry["target"])
                node = graph.create_node("call_function", target, args, kwargs, name=name)
                node.meta["val"] = evaluate(target, args, kwargs, values.mode)
        env[name] = node
    return make_module(root, graph)


def _block_value(blocks: dict[str, GraphModule], target: str, args: tuple[Any, ...], mode: FakeTensorMode) -> Any:
    """What a block gives on the fake values of its arguments."""
    env: dict[Node, Any] = dict(zip((n for n in blocks[target].graph.nodes if n.op == "placeholder"), map(value, args)))
    # composite operations take symbolic sizes only through their Python forms
    with enable_python_dispatcher(), mode, torch.no_grad():
        for node in blocks[target].graph.nodes:
            if node.op == "output":
                return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
            if node.op == "call_function":
                a, k = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: env[n])
                env[node] = node.target(*a, **k)
    raise ValueError(f"block {target!r} has no output")
