"""House rules of rendered Triton sources, checked on their syntax tree; nothing is compiled or run.

Configs of one kernel differ in the constants at the head of the file and seldom in its functions, so what is found in
the functions is kept.
"""

from __future__ import annotations

import ast
import builtins
from functools import lru_cache
from types import CodeType, SimpleNamespace
from typing import Any


class _Types:
    """Stands for triton.language at module level: constants are what they wrap, types are their names."""

    @staticmethod
    def constexpr(value: Any) -> Any:
        return value

    def __getattr__(self, name: str) -> str:
        return name


_TRITON = SimpleNamespace(next_power_of_2=lambda n: 1 << (n - 1).bit_length(), cdiv=lambda a, b: -(-a // b))


def _split(text: str) -> tuple[str, str]:
    """Head with the constants, and functions."""
    at = text.find("\n@triton.jit")
    return text[:at], text[at:]


@lru_cache(8)
def constants(text: str) -> dict[str, Any]:
    """The module-level constants of a source."""
    head = ast.parse(_split(text)[0])
    head.body = [n for n in head.body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name)]
    found: dict[str, Any] = {"tl": _Types(), "triton": _TRITON}
    exec(compile(head, "source", "exec"), found)
    return {name: value for name, value in found.items() if name not in ("tl", "triton", "__builtins__")}


@lru_cache
def _functions(body: str) -> dict[str, ast.FunctionDef]:
    return {node.name: node for node in ast.parse(body).body if isinstance(node, ast.FunctionDef)}


def functions(text: str) -> dict[str, ast.FunctionDef]:
    """The functions of a source by name."""
    return _functions(_split(text)[1])


@lru_cache
def _calls(body: str, name: str) -> list[ast.Call]:
    nodes = (n for function in _functions(body).values() for n in ast.walk(function))
    return [n for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


def extents_not_powers_of_two(text: str) -> list[str]:
    """Ranges and tile shapes whose extent is no power of two, or cannot be read from the constants.

    The extents of another tile (`tile.shape[0]`) are as good as that tile's own.
    """
    known = dict(constants(text))
    wrong = []
    for written, code in _extents(_split(text)[1]):
        extent = eval(code, known)
        if type(extent) is not int or extent < 1 or extent & (extent - 1):
            wrong.append(f"{written} = {extent}")
    return wrong


@lru_cache
def _extents(body: str) -> list[tuple[str, CodeType]]:
    """What ranges and tiles are as large as, as text and to evaluate."""
    sizes = [a for call in _calls(body, "tl.arange") for a in call.args[1:]]
    for maker in ("tl.zeros", "tl.full"):
        sizes += [n for call in _calls(body, maker) for n in getattr(call.args[0], "elts", [call.args[0]])]
    own = [n for n in sizes if not (isinstance(n, ast.Subscript) and ast.unparse(n.value).endswith(".shape"))]
    return [(ast.unparse(n), compile(ast.Expression(n), "source", "eval")) for n in own]


def loads_without_a_fill(text: str) -> list[str]:
    """Masked loads that do not say what the masked lanes hold."""
    keywords = [(call, {k.arg for k in call.keywords}) for call in _calls(_split(text)[1], "tl.load")]
    positional = [ast.unparse(call) for call, _ in keywords if len(call.args) > 1]
    return positional + [ast.unparse(call) for call, given in keywords if "mask" in given and "other" not in given]


def undefined_names(text: str) -> list[str]:
    """Names that a function reads and nobody defines."""
    module = set(constants(text)) | set(functions(text)) | {"tl", "triton"} | set(dir(builtins))
    wrong = []
    for function in functions(text).values():
        names = [n for n in ast.walk(function) if isinstance(n, ast.Name)]
        own = {a.arg for a in function.args.args} | {n.id for n in names if isinstance(n.ctx, ast.Store)}
        wrong += [n.id for n in names if isinstance(n.ctx, ast.Load) and n.id not in own | module]
    return wrong
