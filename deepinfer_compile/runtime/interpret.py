"""Run a graph stored as data: the graph-only mode of a bundle, and the meaning of the JSON graph form.

A graph is `{"nodes": [...]}`; a node is `{"name", "op", "target", "args", "kwargs", "val"}` with op `input`, `call`,
`block` or `output`. Arguments are JSON values or one-key objects for what JSON cannot say: `{"ref": name}`,
`{"dtype": "float32"}`, `{"device": "cpu"}`, `{"layout": ...}`, `{"memory_format": ...}`, `{"float": "inf"}`,
`{"tuple": [...]}`. Targets resolve to operations of known namespaces only; nothing here evaluates text.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deepinfer_compile.errors import BundleCorrupt

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "getitem": operator.getitem,
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "neg": operator.neg,
    "sym_max": torch.sym_max,
    "sym_min": torch.sym_min,
    "sym_sum": torch.sym_sum,
}
NAMESPACES = ("aten", "deepinfer", "prims")
REFUSED = ("from_file", "_print", "_save", "record_stream", "_cuda", "set_data")
FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


def known_namespace(name: str) -> bool:
    """Whether operations of a namespace may be called: ATen, the dialect, and kernel libraries (`deepinfer_...`)."""
    return name in NAMESPACES or name.startswith("deepinfer_")


def resolve(target: str, file: str = "graph") -> Callable[..., Any]:
    """The function behind a target name. Raises BundleCorrupt for anything that is not an allowed operation."""
    if target in FUNCTIONS:
        return FUNCTIONS[target]
    parts = target.split(".")
    if len(parts) != 3 or not known_namespace(parts[0]) or any(w in parts[1] for w in REFUSED):
        raise BundleCorrupt(file=file, reason=f"{target!r} is not an operation a graph may call")
    packet = getattr(getattr(torch.ops, parts[0]), parts[1], None)
    overload = getattr(packet, parts[2], None) if packet is not None else None
    if overload is None:
        raise BundleCorrupt(file=file, reason=f"operation {target!r} does not exist in torch {torch.__version__}")
    found: Callable[..., Any] = overload
    return found


def decode(arg: Any, env: Mapping[str, Any], file: str = "graph") -> Any:
    """One stored argument, references looked up in `env`."""
    if isinstance(arg, list):
        return [decode(a, env, file) for a in arg]
    if not isinstance(arg, dict):
        return arg
    if len(arg) != 1:
        raise BundleCorrupt(file=file, reason=f"argument {arg!r} has {len(arg)} keys")
    ((kind, held),) = arg.items()
    if kind == "ref":
        if held not in env:
            raise BundleCorrupt(file=file, reason=f"value {held!r} is used before it is made")
        return env[held]
    if kind == "tuple":
        return tuple(decode(a, env, file) for a in held)
    if kind == "float" and held in FLOATS:
        return FLOATS[held]
    if kind == "device":
        return torch.device(held)
    if kind in ("dtype", "layout", "memory_format") and isinstance(
        found := getattr(torch, str(held), None), TYPES[kind]
    ):
        return found
    raise BundleCorrupt(file=file, reason=f"argument {arg!r} is not understood")


TYPES: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class GraphFunction:
    """A stored graph as a callable of its inputs in order; values are freed after their last use.

    replaced: other functions for some nodes, by name. device: where values are made that the graph makes on its own.
    """

    def __init__(
        self,
        graph: Mapping[str, Any],
        file: str = "graph",
        replaced: Mapping[str, Callable[..., Any]] | None = None,
        device: str = "",
    ) -> None:
        self.file = file
        self.nodes: list[dict[str, Any]] = [_moved(n, device) for n in graph["nodes"]] if device else graph["nodes"]
        self.inputs = [n["name"] for n in self.nodes if n["op"] == "input"]
        other = replaced or {}
        self.calls = [(n, other.get(n["name"]) or resolve(n["target"], file)) for n in self.nodes if n["op"] == "call"]
        self.output = next((n["args"][0] for n in self.nodes if n["op"] == "output"), None)
        if self.output is None:
            raise BundleCorrupt(file=file, reason="the graph has no output")
        self.free = _last_uses(self.calls, self.output)

    def __call__(self, *values: Any) -> Any:
        if len(values) != len(self.inputs):
            raise ValueError(f"{self.file} takes {len(self.inputs)} values, was given {len(values)}")
        env = dict(zip(self.inputs, values))
        with torch.no_grad():
            for (node, function), dead in zip(self.calls, self.free):
                args = [decode(a, env, self.file) for a in node["args"]]
                kwargs = {k: decode(v, env, self.file) for k, v in node.get("kwargs", {}).items()}
                env[node["name"]] = function(*args, **kwargs)
                for name in dead:
                    env.pop(name, None)
        return decode(self.output, env, self.file)


def _moved(arg: Any, device: str) -> Any:
    """A stored node or argument with another device for every one that it names."""
    if isinstance(arg, list):
        return [_moved(a, device) for a in arg]
    if isinstance(arg, dict):
        if arg.keys() == {"device"}:
            return {"device": device}
        return {key: _moved(held, device) for key, held in arg.items()}
    return arg


def references(arg: Any) -> set[str]:
    """Names that a stored argument refers to."""
    if isinstance(arg, list):
        return set().union(*(references(a) for a in arg)) if arg else set()
    if isinstance(arg, dict):
        return {arg["ref"]} if "ref" in arg else set().union(*(references(v) for v in arg.values()))
    return set()


def _last_uses(calls: Sequence[tuple[dict[str, Any], Any]], output: Any) -> list[set[str]]:
    """For each call, the values nobody reads after it."""
    later = references(output)
    dead: list[set[str]] = []
    for node, _ in reversed(calls):
        used = references(node["args"]) | references(list(node.get("kwargs", {}).values()))
        dead.append((used | {node["name"]}) - later)
        later |= used
    return dead[::-1]
