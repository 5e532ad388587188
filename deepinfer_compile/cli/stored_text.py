"""Stored graphs as text, straight from their data: reading a bundle must not need the operations its graphs call."""

from __future__ import annotations

import difflib
from typing import Any

SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "complex64": "c64",
    "complex128": "c128",
}


def graph_lines(graph: dict[str, Any]) -> list[str]:
    """A stored graph, one node a line."""
    return [node_line(node) for node in graph["nodes"]]


def node_line(node: dict[str, Any]) -> str:
    """`%name: f32[1, d0, 96] = aten.linear(%x, %w)`."""
    args = [argument(a) for a in node.get("args", ())]
    if node["op"] == "output":
        return f"return {', '.join(args)}"
    head = f"%{node['name']}: {shape(node['val'])} ="
    if node["op"] == "input":
        return f"{head} input" + (f"  # {node['weight']}" if "weight" in node else "")
    args += [f"{k}={argument(v)}" for k, v in node.get("kwargs", {}).items()]
    layer = f"  # layer {node['layer']}" if node.get("layer") is not None else ""
    return f"{head} {str(node['target']).removesuffix('.default')}({', '.join(args)}){layer}"


def shape(val: dict[str, Any]) -> str:
    """`f32[1, d0]`, `(f32[2], i64[3])`, or the text of a number."""
    if "items" in val:
        return f"({', '.join(shape(v) for v in val['items'])})"
    if "number" in val:
        return str(val["number"])
    return f"{SHORT.get(val['dtype'], val['dtype'])}[{', '.join(map(str, val['shape']))}]"


def argument(arg: Any) -> str:
    """One stored argument."""
    if isinstance(arg, list):
        return f"[{', '.join(map(argument, arg))}]"
    if not isinstance(arg, dict):
        return repr(arg)
    kind, held = next(iter(arg.items()))
    if kind == "ref":
        return f"%{held}"
    if kind == "tuple":
        return f"({', '.join(map(argument, held))})"
    return SHORT.get(str(held), str(held))


def diff(a: list[str], b: list[str], name: str) -> list[str]:
    """Unified diff without its two header lines' dates; empty for equal texts."""
    return list(difflib.unified_diff(a, b, f"a {name}", f"b {name}", lineterm="", n=2))


__all__ = ["diff", "graph_lines", "node_line"]
