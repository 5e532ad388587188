"""Our narrow view of torch.fx: predicates, edits that keep shapes known, and the stable text form.

Every value in a graph carries `meta["val"]`, a fake tensor (or symbolic integer) that states shape and dtype. Edits
made through `Editor` compute it for new nodes by running the op on the operands' fake values, so that no pass can
create a node of unknown shape. `to_text` is for people and golden files; `graphjson` is the form that loads.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}
SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
EVALUATED = "evaluated"


def value(node: Node) -> Any:
    """The fake value of a node: FakeTensor, SymInt, number, or a tuple of them."""
    return node.meta.get("val")


def tensor(node: Node) -> Tensor:
    """The fake tensor of a node that is known to be one."""
    val = value(node)
    if not isinstance(val, Tensor):
        raise TypeError(f"node {node.name} holds {type(val).__name__}, not a tensor")
    return val


def is_op(node: object, *targets: object) -> bool:
    """Whether `node` is a call of one of the given overloads or functions."""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def target_name(node: Node) -> str:
    """Short name of what a node calls: aten.linear, deepinfer.rope, getitem, or the block's name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target)
        return name[: -len(".default")] if name.endswith(".default") else name
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def argument(node: Node, name: str, default: Any = None) -> Any:
    """Argument `name` of a call by its schema, wherever it was passed; the schema's default if it was not."""
    schema = node.target._schema  # type: ignore[union-attr]
    if name in node.kwargs:
        return node.kwargs[name]
    for i, arg in enumerate(schema.arguments):
        if arg.name == name:
            if i < len(node.args):
                return node.args[i]
            return arg.default_value if arg.has_default_value() else default
    return default


def strip(node: Any, *targets: object) -> Any:
    """Walk up through unary calls of the given targets (views, casts) to what they were applied to."""
    while is_op(node, *targets):
        node = node.args[0]
    return node


def only_user(node: Node) -> Node | None:
    """The single user of a node, or None if there are none or several."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The fake tensor mode that the graph's values belong to."""
    for node in graph.nodes:
        val = value(node)
        for v in val if isinstance(val, (tuple, list)) else (val,):
            if isinstance(v, FakeTensor):
                return v.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def evaluate(target: Callable[..., Any], args: Any, kwargs: Any, mode: FakeTensorMode) -> Any:
    """What `target` gives on the fake values of the given node arguments."""
    fake_args, fake_kwargs = map_arg((args, kwargs), value)  # type: ignore[misc]
    # the Python dispatcher keeps sizes symbolic through composite ops, which in C++ may ask for their hints
    with mode, torch.no_grad(), enable_python_dispatcher():
        return target(*fake_args, **fake_kwargs)


def is_evaluated(node: Node) -> bool:
    """Whether `set_evaluated` was told of a call what it still is: of this operation, operands' values and result."""
    known = node.meta.get(EVALUATED)
    return known is not None and _identical(known, _evaluation(node))


def set_evaluated(node: Node) -> None:
    """Note that the recorded value of a call is what its operation gives on the recorded values of its operands. Copies
    of the node keep the note; it stands as long as they have the same value and operands of the same values."""
    node.meta[EVALUATED] = _evaluation(node)


def _evaluation(node: Node) -> Any:
    return (node.target, *map_arg((node.args, node.kwargs), value), value(node))  # type: ignore[misc]


def _identical(a: Any, b: Any) -> bool:
    """Equal structure and numbers; tensors and symbols are the same objects."""
    if a is b:
        return True
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_identical, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(map(_identical, a.values(), b.values()))
    return type(a) is type(b) and not isinstance(a, (Tensor, *SYMBOLS)) and bool(a == b)


class Editor:
    """Insert nodes at one place of a graph; each gets its fake value and the provenance of the node it replaces."""

    def __init__(self, graph: Graph, anchor: Node) -> None:
        self.graph = graph
        self.anchor = anchor
        self.mode = fake_mode_of(graph)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Insert `target(*args, **kwargs)` before the anchor."""
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = evaluate(target, args, kwargs, self.mode)
        set_evaluated(node)
        for key in ("nn_module_stack", "stack_trace", "from_node"):
            if key in self.anchor.meta:
                node.meta[key] = self.anchor.meta[key]
        return node

    def item(self, node: Node, index: int) -> Node:
        """Insert `node[index]` for a call that returns a tuple."""
        return self.call(operator.getitem, node, index)

    def replace(self, old: Node, new: Node) -> None:
        """Give all uses of `old` to `new`. Dead nodes go when the pass ends."""
        old.replace_all_uses_with(new)


def make_module(root: torch.nn.Module, graph: Graph) -> GraphModule:
    """The graph as a module. Its Python source is written and compiled when it is first called: most modules stand
    between two passes and never are."""
    return _LazyGraphModule(root, graph)


def copy_module(gm: GraphModule) -> GraphModule:
    """A copy with its own graph and metadata dictionaries; fake values and submodules are shared."""
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in gm.graph.nodes:
        env[node] = graph.node_copy(node, lambda n: env[n])
        env[node].meta = dict(node.meta)
    new = make_module(gm, graph)
    new.meta = dict(gm.meta)
    return new


def remove_dead(graph: Graph) -> int:
    """Remove nodes nobody reads, keeping inputs and every call that writes to an operand. Returns how many went."""
    removed = 0
    for node in reversed(list(graph.nodes)):
        if node.users or node.op in ("placeholder", "output") or writes(node):
            continue
        graph.erase_node(node)
        removed += 1
    return removed


def writes(node: Node) -> bool:
    """Whether a call writes to one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def written(node: Node) -> list[Node]:
    """The operands that a call writes to."""
    if not writes(node):
        return []
    named = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]  # type: ignore[union-attr]
    found = (argument(node, name) for name in named)
    return [n for f in found for n in (f if isinstance(f, (list, tuple)) else (f,)) if isinstance(n, Node)]


def origin_of(node: Node) -> Node:
    """What a view, or a view of a view, looks into; the node itself if it is no view."""
    while node.op == "call_function":
        schema = getattr(node.target, "_schema", None)
        views = node.target is operator.getitem or any(
            r.alias_info is not None for r in (schema.returns if schema is not None else ())
        )
        if not views or not node.args or not isinstance(node.args[0], Node):
            break
        node = node.args[0]
    return node


@contextmanager
def editing(gm: GraphModule) -> Iterator[Graph]:
    """Edit the graph of `gm`; afterwards drop dead nodes and recompile."""
    yield gm.graph
    remove_dead(gm.graph)
    gm.recompile()


class SymbolNames:
    """Names for symbolic sizes by first appearance (d0, d1, ...), so that text does not depend on the tracer."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def __call__(self, size: Any) -> str:
        """The size as text."""
        return re.sub(r"\b[su]\d+\b", lambda m: self.known.setdefault(m.group(), f"d{len(self.known)}"), str(size))


def shape_text(val: Any, names: SymbolNames | None = None) -> str:
    """`f32[1, d0, 64]` for a tensor, a list for a tuple, the type's name for anything else."""
    names = names or SymbolNames()
    if isinstance(val, Tensor):
        dims = ", ".join(names(d) for d in val.shape)
        return f"{DTYPE_NAMES.get(val.dtype, str(val.dtype))}[{dims}]"
    if isinstance(val, (tuple, list)):
        return "(" + ", ".join(shape_text(v, names) for v in val) + ")"
    return "int" if isinstance(val, torch.SymInt) else type(val).__name__


def _argument_text(arg: Any) -> str:
    if isinstance(arg, Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(_argument_text(a) for a in arg) + "]"
    if isinstance(arg, torch.dtype):
        return DTYPE_NAMES.get(arg, str(arg))
    return repr(arg)


def node_text(node: Node, names: SymbolNames | None = None) -> str:
    """One line of graph text."""
    if node.op == "placeholder":
        role = f"  # {node.meta['weight']}" if "weight" in node.meta else ""
        return f"%{node.name}: {shape_text(value(node), names)} = input{role}"
    args = [_argument_text(a) for a in node.args] + [f"{k}={_argument_text(v)}" for k, v in node.kwargs.items()]
    if node.op == "output":
        return f"return {_argument_text(node.args[0])}"
    return f"%{node.name}: {shape_text(value(node), names)} = {target_name(node)}({', '.join(args)})"


def to_text(gm: GraphModule) -> str:
    """The graph as stable text, one node a line: equal graphs print equally."""
    names = SymbolNames()
    return "\n".join(node_text(n, names) for n in gm.graph.nodes) + "\n"


def same_graph(a: GraphModule, b: GraphModule) -> bool:
    """Whether two graphs print equally; False where that would take printing them to tell."""
    return len(a.graph.nodes) == len(b.graph.nodes) and all(map(_same_line, a.graph.nodes, b.graph.nodes))


def _same_line(a: Node, b: Node) -> bool:
    return (
        (a.name, a.op, a.target, a.meta.get("weight")) == (b.name, b.op, b.target, b.meta.get("weight"))
        and _same_argument(a.args, b.args)
        and _same_argument(a.kwargs, b.kwargs)
        and (value(a) is value(b) or shape_text(value(a)) == shape_text(value(b)))
    )


def _same_argument(a: Any, b: Any) -> bool:
    if isinstance(a, Node):
        return isinstance(b, Node) and a.name == b.name
    if isinstance(a, (tuple, list)):
        return isinstance(b, (tuple, list)) and len(a) == len(b) and all(map(_same_argument, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(_same_argument, a.values(), b.values()))
    return type(a) is type(b) and bool(a == b)


def place_of(node: Node) -> str:
    """Where in the user's model a node comes from: module path and source line, as far as known."""
    stack = node.meta.get("nn_module_stack") or {}
    path = list(stack.values())[-1][0] if stack else ""
    trace = (node.meta.get("stack_trace") or "").strip().splitlines()
    lines = [t.strip() for t in trace if t.strip().startswith("File ")]
    return ", ".join(x for x in (str(path), lines[-1] if lines else "") if x) or node.name
