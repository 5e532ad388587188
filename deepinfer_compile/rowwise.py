"""The proof that a program treats packed tokens independently: a dataflow analysis over the skeleton and all blocks.

Every value is told apart by what its elements may depend on: nothing but weights (CONST), one token each along one
dimension (Rows), batch metadata and caches (BATCH), indices of wanted rows (ROW_IDS), or a size (SIZE). A rule per op
says what comes out, or refuses. An op without a rule is refused: safety is proven, never assumed. Rules of ATen ops
are in `rowwise_aten.py`, those of the dialect in `rowwise_dialect.py`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from deepinfer_compile.errors import NotRowwise
from deepinfer_compile.graph import argument, place_of, tensor, value
from deepinfer_compile.match import expr
from deepinfer_compile.program import Program
from deepinfer_compile.skeleton import tokens_of


@dataclass(frozen=True)
class Rows:
    """A tensor whose dimension `dim` runs over rows, index = row * inner + j; an element depends on its own row only.

    axis: "tokens" for the T packed tokens, "rows" for the N wanted rows (each of which reads one token), "kept" for
    the K tokens that layers above a boundary run on.
    """

    axis: str
    dim: int
    inner: int = 1


class Kind(Enum):
    """Values that do not run over tokens."""

    CONST = "made of weights alone"
    SIZE = "a size"
    ROW_IDS = "indices of wanted rows"
    BATCH = "batch metadata or a cache"
    ROW_BATCH = "metadata of a batch of wanted rows"
    KEPT_IDS = "indices of kept tokens"
    KEPT_ROW_IDS = "indices of wanted rows among kept tokens"
    KEPT_BATCH = "metadata of a batch of kept tokens"


Value = Any
"""Rows, a Kind, or a tuple of them."""


class Call:
    """One call under analysis: its arguments as nodes, numbers and analysed values."""

    def __init__(self, node: Node, env: dict[Node, Value], tokens: Any) -> None:
        self.node, self.env, self.tokens = node, env, tokens

    @property
    def name(self) -> str:
        """The op as rules name it: `aten.linear`, without the overload."""
        schema = getattr(self.node.target, "_schema", None)
        return schema.name.replace("::", ".") if schema is not None else str(self.node.target)

    def arg(self, name: str, default: Any = None) -> Any:
        """An argument by its schema name: a node or a plain value."""
        return argument(self.node, name, default)

    def of(self, arg: object) -> Value:
        """What an argument depends on; None for an absent one, CONST for a number."""
        if isinstance(arg, Node):
            return self.env[arg]
        return None if arg is None else Kind.CONST

    def rank(self, arg: Node) -> int:
        """Number of dimensions of a tensor argument."""
        return tensor(arg).dim()

    def dim(self, arg: Node, dim: int) -> int:
        """A dimension of a tensor argument, counted from 0."""
        return dim % max(1, self.rank(arg))

    def result_rank(self) -> int:
        """Number of dimensions of the (first) result."""
        return int(self.results()[0].dim())

    def same_for_all(self, found: Value) -> Value:
        """`found` for every result of the call."""
        val = value(self.node)
        return (found,) * len(val) if isinstance(val, (tuple, list)) else found

    def rows(self, arg: Node) -> Rows:
        """An argument that must run over tokens or rows."""
        found = self.of(arg)
        if not isinstance(found, Rows):
            self.refuse(f"operand {arg.name} is {found.value if isinstance(found, Kind) else 'not one tensor'}")
        return found

    def constant(self, arg: object, what: str) -> None:
        """Refuse an argument that depends on tokens."""
        if self.of(arg) not in (Kind.CONST, None):
            self.refuse(f"{what} depends on tokens")

    def results(self) -> list[Tensor]:
        """Recorded values of the call's results."""
        val = value(self.node)
        return list(val) if isinstance(val, (tuple, list)) else [val]

    def spans(self, val: Tensor) -> dict[int, int]:
        """Dimensions whose size is k * T, with k."""
        return {i: k for i, d in enumerate(val.shape) if (k := self.multiple(d)) > 0}

    def sized(self) -> Value:
        """What a tensor made from sizes alone is: CONST, or equal rows if a dimension is a multiple of T."""
        found = [Rows("tokens", dim, inner) for dim, inner in self.spans(tensor(self.node)).items()]
        if len(found) > 1:
            self.refuse("two dimensions of its result run over the tokens")
        return found[0] if found else Kind.CONST

    def multiple(self, size: Any) -> int:
        """k of a size k * T; 0 if it does not depend on T."""
        size = expr(size)
        if isinstance(size, int) or self.tokens not in size.free_symbols:
            return 0
        factor = size / self.tokens
        if not factor.is_Integer:
            self.refuse(f"size {size} is not a multiple of the number of tokens")
        return int(factor)

    def refuse(self, reason: str) -> NoReturn:
        """Raise NotRowwise for this call."""
        raise NotRowwise(node=self.node.name, target=self.name, reason=reason, where=place_of(self.node))


Rule = Callable[[Call], Value]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of ops, named as `aten.linear` or `deepinfer.rope` without the overload."""

    def keep(function: Rule) -> Rule:
        for name in names:
            if name in RULES:
                raise ValueError(f"op {name} has two rules")
            RULES[name] = function
        return function

    return keep


def aligned(call: Call, args: list[Node], rank: int) -> Value:
    """Operands that broadcast together: those over rows must run over the same dimension, counted from the right."""
    found: Rows | None = None
    for arg in args:
        held = call.of(arg)
        if not isinstance(held, Rows):
            if held is not Kind.CONST:
                call.refuse(f"operand {arg.name} is {held.value if isinstance(held, Kind) else 'a tuple'}")
            continue
        placed = Rows(held.axis, held.dim + rank - call.rank(arg), held.inner)
        if found is not None and placed != found:
            call.refuse("its operands run over tokens in different dimensions")
        found = placed
    return Kind.CONST if found is None else found


def analyse(program: Program, env: dict[Node, Value] | None = None) -> Value:
    """What the program's result depends on; `env` is filled with what each value of the skeleton depends on.

    Raises NotRowwise for the first op that mixes tokens or has no rule.
    """
    tokens = expr(tokens_of(program))
    seen: dict[tuple[str, tuple[Value, ...]], Value] = {}
    env = {} if env is None else env
    for node in program.skeleton.graph.nodes:
        if node.op == "placeholder":
            env[node] = input_value(node, program, tokens)
        elif node.op == "call_module":
            given = tuple(env[a] for a in node.args)
            key = (str(node.target), given)
            if key not in seen:
                seen[key] = _block(program.blocks[key[0]], given, tokens)
            env[node] = seen[key]
        elif node.op == "output":
            return torch.fx.node.map_arg(node.args[0], lambda n: env[n])
        else:
            env[node] = call_value(node, env, tokens)
    raise ValueError(f"program {program.name!r} has no output")


def input_value(node: Node, program: Program, tokens: Any) -> Value:
    """What an input of the program depends on."""
    if node.name in program.weights:
        return Kind.CONST
    if any(node.name == c.name for c in program.caches):
        return Kind.BATCH
    if node.name in ("rows", "kept"):
        return Kind.ROW_IDS if node.name == "rows" else Kind.KEPT_IDS
    found = Call(node, {}, tokens).sized()
    return found if isinstance(found, Rows) else Kind.BATCH


def _block(gm: GraphModule, given: tuple[Value, ...], tokens: Any) -> Value:
    holes = [n for n in gm.graph.nodes if n.op == "placeholder"]
    env: dict[Node, Value] = dict(zip(holes, given))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            env[node] = call_value(node, env, tokens)
        elif node.op == "output":
            out = node.args[0]
            return tuple(env[o] for o in out) if isinstance(out, (tuple, list)) else env[out]
    raise ValueError("a block has no output")


def call_value(node: Node, env: dict[Node, Value], tokens: Any) -> Value:
    """The value of one call, by its rule. Raises NotRowwise."""
    from deepinfer_compile import rowwise_aten, rowwise_dialect  # noqa: F401  (register their rules)

    call = Call(node, env, tokens)
    target, inputs = node.target, node.all_input_nodes
    if isinstance(value(node), (torch.SymInt, torch.SymFloat, torch.SymBool, int)):
        if target is not torch.ops.aten.sym_size.int and any(env[n] is not Kind.SIZE for n in inputs):
            call.refuse("it makes a number of values")
        return Kind.SIZE
    if target is operator.getitem:
        return env[node.args[0]][node.args[1]]  # type: ignore[index]
    tags, name = getattr(target, "tags", ()), call.name
    if torch.Tag.nondeterministic_seeded in tags and name not in RULES:
        call.refuse("it draws random numbers")
    if all(env[n] is Kind.CONST for n in inputs) and not any(call.spans(v) for v in call.results()):
        return call.same_for_all(Kind.CONST)
    if torch.Tag.pointwise in tags:
        found = call.same_for_all(aligned(call, inputs, call.result_rank()))
    elif name in RULES:
        found = RULES[name](call)
    else:
        call.refuse("no rule says how it treats tokens")
    for one, val in zip(found if isinstance(found, tuple) else (found,), call.results(), strict=True):
        if call.spans(val) != ({one.dim: one.inner} if isinstance(one, Rows) and one.axis == "tokens" else {}):
            call.refuse("its rule does not fit its recorded shape")
    return found
