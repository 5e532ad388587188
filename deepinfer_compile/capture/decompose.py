"""What `ExportedProgram.run_decompositions({})` makes of a graph, without tracing the whole graph again.

torch.export leaves composite calls that may give their own operand back (`to`, `reshape`, `flatten`, `chunk`) and calls
that write. Decomposing with an empty table traces the graph twice more, through functional wrappers around every value:
two thirds of a capture. Yet only these calls change. Here the first of each form is run alone on the recorded values of
its operands, and what it calls takes its place and that of all others of this form; every other call stands in both
graphs as it is. A graph that holds what this does not know (writes to what others may see, submodules, conditions on
sizes) is left to torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate, map_arg
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_compile.capture.again import form_of, unremembered
from deepinfer_compile.graph import evaluate, fake_mode_of, is_op, value, written

A = torch.ops.aten
SIZES = (operator.add, operator.sub, operator.mul, operator.floordiv)
TORCHS = (A.dropout.default, A.native_batch_norm.default, A.detach.default, A.alias.default)
"""Calls of which torch's tracers make something of their own."""


class Unknown(Exception):
    """A graph holds something that is left to torch."""


def decomposed(program: Any) -> tuple[Any, Graph]:
    """(program, flat functional graph) of what torch.export gave: the program itself and a graph with the placeholders
    of its signature, or what `run_decompositions({})` makes of both."""
    try:
        return program, Decomposed(program.graph).graph
    except Unknown:
        done = program.run_decompositions({})
        return done, done.graph


@dataclass(frozen=True)
class _Operand:
    number: int


@dataclass(frozen=True)
class _Made:
    number: int


@dataclass(frozen=True)
class _Size:
    expr: Any


@dataclass(frozen=True)
class _Recipe:
    """The calls that a composite call makes, its operands, what they give and sizes by number, and what it gives."""

    calls: list[tuple[Any, Any, Any, Any]]
    given: Any


class _Calls(TorchDispatchMode):
    """Notes what a composite call calls."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(t, Tensor) for t in (out if isinstance(out, (tuple, list)) else (out,))):
            self.made.append((func, args, kwargs or {}, out))
        return out


class Decomposed:
    """A copy of a graph, made call by call; raises Unknown. `env`: the node, or the nodes of a tuple, that stands for
    each node of the old one."""

    def __init__(self, old: Graph) -> None:
        self.graph = Graph()
        self.env: dict[Node, Any] = {}
        self.sizes: dict[Any, Node] = {}
        self.recipes: dict[Any, _Recipe] = {}
        self.rewritten: set[Any] = set()
        """old calls whose result was written in part"""
        self.mode = fake_mode_of(old)
        with unremembered(self.mode):
            self.copy_graph(old)
        self.graph.eliminate_dead_code()

    def copy_graph(self, old: Graph) -> None:
        """Make the calls of the old graph in the new one."""
        holes = [node for node in old.nodes if node.op == "placeholder"]
        self.env.update({hole: self.copied(hole) for hole in holes})
        for hole in holes:
            self.note_sizes(self.env[hole])
        for node in old.nodes:
            if node.op != "placeholder":
                self.env[node] = self.copied(node) if node.op == "output" else self.called(node)

    def copied(self, node: Node) -> Node:
        new = self.graph.node_copy(node, self.env.__getitem__)
        new.meta = dict(node.meta)
        if isinstance(value(node), SymInt):
            new = self.sizes.setdefault(value(node).node.expr, new)
            new.meta = {**node.meta, **new.meta}
        return new

    def note_sizes(self, hole: Node) -> None:
        """One call for each size that inputs have; what nobody reads is removed."""
        for dim, size in enumerate(value(hole).shape):
            if isinstance(size, SymInt) and size.node.expr not in self.sizes:
                self.sizes[size.node.expr] = made = self.graph.call_function(A.sym_size.int, (hole, dim))
                made.meta = {"val": size}

    def called(self, node: Node) -> Any:
        """What takes the place of a call. Raises Unknown."""
        target = node.target
        if node.op != "call_function" or target in TORCHS:
            raise Unknown
        if target is operator.getitem and isinstance(self.env[node.args[0]], tuple):  # type: ignore[index]
            return self.env[node.args[0]][node.args[1]]  # type: ignore[index]
        if target is operator.getitem or (target in SIZES and isinstance(value(node), SymInt)):
            return self.copied(node)
        if not isinstance(target, OpOverload):
            raise Unknown
        if target._schema.is_mutable:
            return self.part_written(node) if _is_written_part(node.args[0]) else self.written(node)
        if _is_written_part(node) and node.args[0] in self.rewritten:
            return None  # torch makes a part of what was written when it is written itself
        if target is A.lift_fresh_copy.default:
            return self.new(node, A.clone.default, (self.env[node.args[0]],), {}, value(node))  # type: ignore[index]
        aliases = any(a.alias_info is not None for a in target._schema.arguments)
        if target._can_decompose() and (aliases or torch.Tag.maybe_aliasing_or_mutating in target.tags):
            return self.parts(node)
        return self.copied(node)

    def written(self, node: Node) -> Any:
        """A call that writes to a fresh value of which there is no view: its functional form, read from then on."""
        source: Any = node.args[0]
        if is_op(node, A.detach_.default) and is_op(source, A.lift_fresh_copy.default):
            return self.env[source]
        name, _, overload = str(node.target).removeprefix("aten.").partition(".")
        twin = getattr(getattr(A, name.removesuffix("_"), None), overload, None)
        others = [user for user in source.users if user is not node]
        if twin is None or not name.endswith("_") or written(node) != [source]:
            raise Unknown
        if not _is_fresh(source.args[0] if is_op(source, operator.getitem) else source) or not all(
            map(_is_fresh, others)
        ):
            raise Unknown
        made = evaluate(twin, node.args, node.kwargs, self.mode)
        if (made.dtype, str(made.shape)) != (value(node).dtype, str(value(node).shape)):
            raise Unknown
        args, kwargs = map_arg((node.args, node.kwargs), self.env.__getitem__)  # type: ignore[misc]
        self.env[source] = self.new(node, twin, args, kwargs, made)
        return self.env[source]

    def part_written(self, node: Node) -> None:
        """A write to a slice of a fresh value of which there are only such slices: its functional form."""
        part: Any = node.args[0]
        base = part.args[0]
        others = [user for user in base.users if user is not part]
        if not _is_fresh(base) or not all(_is_fresh(user) or _is_written_part(user) for user in others):
            raise Unknown
        where, source = map_arg((part.args[1:], node.args[1]), self.env.__getitem__)  # type: ignore[misc]
        here = self.env[part]
        if here is None:
            here = self.new(node, part.target, (self.env[base], *where), {}, value(part))
        made = evaluate(A.copy.default, (part, node.args[1]), {}, self.mode)
        copy = self.new(node, A.copy.default, (here, source), {}, made)
        made = evaluate(A.slice_scatter.default, (self.env[base], copy, *where), {}, self.mode)
        self.env[base] = self.new(node, A.slice_scatter.default, (self.env[base], copy, *where), {}, made)
        self.rewritten.add(base)

    def parts(self, node: Node) -> Any:
        """The calls that a composite call makes; what it gives may be an operand. Raises Unknown."""
        operands = node.all_input_nodes
        key = (node.target, _form((node.args, node.kwargs), operands))
        recipe = self.recipes.get(key)
        if recipe is None:
            recipe = self.recipes[key] = self.recipe(node)
        made: list[Node] = []

        def here(held: Any) -> Any:
            if isinstance(held, _Operand):
                return self.env[operands[held.number]]
            if isinstance(held, _Made):
                return made[held.number]
            return self._known(self.sizes, held.expr) if isinstance(held, _Size) else held

        for target, args, kwargs, out in recipe.calls:
            call = self.new(node, target, *map_aggregate((args, kwargs), here), self.copy(out))  # type: ignore[misc]
            if isinstance(out, Tensor):
                made.append(call)
            else:
                made += [self.new(node, operator.getitem, (call, i), {}, v) for i, v in enumerate(value(call))]
        found = map_aggregate(recipe.given, here)
        return tuple(found) if isinstance(found, (tuple, list)) else found

    def recipe(self, node: Node) -> _Recipe:
        """What a composite call makes of operands like these."""
        tensors = [(i, v) for i, n in enumerate(node.all_input_nodes) if isinstance(v := value(n), Tensor)]
        known: dict[int, Any] = {id(v): _Operand(i) for i, v in tensors}
        if len(known) != len(tensors):  # two calls that share a value could not be told apart
            raise Unknown
        args, kwargs = map_arg((node.args, node.kwargs), value)  # type: ignore[misc]
        with self.mode, torch.no_grad(), enable_python_dispatcher(), _Calls() as calls:
            given = node.target.decompose(*args, **kwargs)  # type: ignore[union-attr]

        def named(held: Any) -> Any:
            if isinstance(held, SymInt):
                expr = held.node.expr
                return int(expr) if expr.is_Integer else _Size(expr)
            return self._known(known, id(held)) if isinstance(held, Tensor) else held

        steps, count = [], 0
        for target, args, kwargs, out in calls.made:
            args, kwargs = map_aggregate((args, kwargs), named)  # type: ignore[misc]
            steps.append((target, args, kwargs, out))
            for item in (out,) if isinstance(out, Tensor) else out:
                known[id(item)] = _Made(count)
                count += 1
        return _Recipe(steps, map_aggregate(given, named))

    def copy(self, held: Any) -> Any:
        """Values of the same form as the recipe's, one for each node."""
        with self.mode, torch.no_grad():
            if isinstance(held, Tensor):
                return held.detach()
            return tuple([t.detach() if isinstance(t, Tensor) else t for t in held])

    def new(self, old: Node, target: Any, args: Any, kwargs: Any, val: Any) -> Node:
        """A call in place of another one, from the same place of the model."""
        made = self.graph.call_function(target, args, kwargs)
        made.meta = {**old.meta, "val": val}
        return made

    @staticmethod
    def _known(names: dict[Any, Any], key: Any) -> Any:
        if key not in names:
            raise Unknown
        return names[key]


def _form(held: Any, operands: list[Node]) -> Any:
    """All of a call's arguments that what it calls depends on."""
    if isinstance(held, Node):
        val = value(held)
        if isinstance(val, FakeTensor):
            return (operands.index(held), form_of(val))
        return (operands.index(held), val.node.expr if isinstance(val, SymInt) else held)
    if isinstance(held, (list, tuple)):
        return tuple([_form(h, operands) for h in held])
    if isinstance(held, dict):
        return tuple([(k, _form(h, operands)) for k, h in held.items()])
    return (type(held), held)


def _is_written_part(node: Any) -> bool:
    """Whether a call gives a slice to which a value is written, and nothing else is done with it."""
    if not is_op(node, A.slice.Tensor) or node.kwargs or len(node.users) != 1:
        return False
    (user,) = node.users
    return (
        is_op(user, A.copy_.default)
        and user.args[0] is node
        and len(user.args) == 2
        and not (user.kwargs or user.users)
    )


def _is_fresh(node: Node) -> bool:
    """Whether a call gives tensors of their own, which no operand shares."""
    target = node.target
    if not isinstance(target, OpOverload) or target._can_decompose():  # some composites give their operand back unsaid
        return False
    return all(a.alias_info is None for a in (*target._schema.arguments, *target._schema.returns))
