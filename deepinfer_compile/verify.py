"""What holds of every graph between passes: one generator a rule, each yielding problems in words.

The rules run after every pass on every graph that it changed. They know nothing of the pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from deepinfer_compile.errors import GraphInvalid
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import (
    evaluate,
    fake_mode_of,
    is_evaluated,
    is_op,
    node_text,
    origin_of,
    set_evaluated,
    shape_text,
    value,
    writes,
    written,
)
from deepinfer_compile.program import Program, output_values
from deepinfer_compile.runtime.interpret import known_namespace

ALLOWED_FUNCTIONS: frozenset[object] = frozenset(
    {
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.mod,
        operator.neg,
        torch.sym_max,
        torch.sym_min,
        torch.sym_sum,
        torch.sym_int,
        torch.sym_float,
    }
)


CAPTURED_NAMESPACES = ("transformers",)
"""Namespaces that captured graphs may hold and bundles may not: raising replaces their operations."""


def _known(namespace: str) -> bool:
    return known_namespace(namespace) or namespace in CAPTURED_NAMESPACES


def rule_lint(gm: GraphModule) -> Iterator[str]:
    """The graph is well formed: every operand is defined before its use."""
    try:
        gm.graph.lint()
    except RuntimeError as err:
        yield str(err).splitlines()[0]


def rule_targets(gm: GraphModule) -> Iterator[str]:
    """Every call is an op overload of a known namespace (of any, in a foreign graph) or a plain number function."""
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "output", "call_module"):
            continue
        if node.op != "call_function":
            yield f"{node_text(node)}: {node.op} is not a call of an op"
        elif gm.meta.get("foreign") and isinstance(node.target, torch._ops.OpOverload):
            continue
        elif node.target not in ALLOWED_FUNCTIONS and not _known(getattr(node.target, "namespace", "")):
            yield f"{node_text(node)}: it is no operation of a known namespace"


def rule_values(gm: GraphModule) -> Iterator[str]:
    """Every node's recorded shape and dtype is what its op gives on the operands' recorded values.

    What was found so after an earlier pass, and has the same value and operands since, is not evaluated again; nor is a
    call of an op with operands of shapes and dtypes with which it was called before in the graph."""
    mode = fake_mode_of(gm.graph)
    known: dict[Any, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if "val" not in node.meta:
            yield f"{node_text(node)}: no recorded value"
            continue
        if node.op != "call_function" or is_evaluated(node):
            continue
        key = (node.target, _form(map_arg((node.args, node.kwargs), value)))
        try:
            if key not in known:
                known[key] = evaluate(node.target, node.args, node.kwargs, mode)
        except (RuntimeError, TypeError, ValueError, IndexError) as err:
            yield f"{node_text(node)}: does not evaluate: {str(err).splitlines()[0]}"
            continue
        found = known[key]
        if same(found, value(node)):
            set_evaluated(node)
        else:
            yield f"{node_text(node)}: records {shape_text(value(node))}, the op gives {shape_text(found)}"


def _form(held: Any) -> Any:
    """All that shapes and dtypes of a result depend on, of an argument."""
    if isinstance(held, Tensor):
        return (held.dtype, _form(tuple(held.shape)), _form(held.stride()), held.device)
    if isinstance(held, (tuple, list)):
        return tuple(map(_form, held))
    if isinstance(held, dict):
        return tuple((name, _form(h)) for name, h in held.items())
    return held.node.expr if isinstance(held, torch.SymInt) else (type(held), repr(held))


def same(a: Any, b: Any) -> bool:
    """Equal structure, dtypes and (symbolic) shapes."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and len(a.shape) == len(b.shape) and all(map(_equal_dim, a.shape, b.shape))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, Tensor) == isinstance(b, Tensor)


def _equal_dim(a: Any, b: Any) -> bool:
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    expr_a, expr_b = (d.node.expr if isinstance(d, torch.SymInt) else d for d in (a, b))
    return bool(expr_a == expr_b) or bool((expr_a - expr_b).simplify() == 0)


GRAPH_RULES: tuple[Callable[[GraphModule], Iterator[str]], ...] = (rule_lint, rule_targets, rule_values)


def rule_calls(program: Program) -> Iterator[str]:
    """Every block call passes what the block takes, and records what the block gives."""
    for call in program.calls():
        block = program.blocks.get(str(call.target))
        if block is None:
            yield f"skeleton calls block {call.target!r}, which does not exist"
            continue
        holes = [n for n in block.graph.nodes if n.op == "placeholder"]
        if len(holes) != len(call.args):
            yield f"{call.target}: called with {len(call.args)} values, takes {len(holes)}"
            continue
        for hole, arg in zip(holes, call.args):
            if not isinstance(arg, Node) or not same(value(arg), value(hole)):
                given = shape_text(value(arg)) if isinstance(arg, Node) else repr(arg)
                yield f"{call.target}: input {hole.name} takes {shape_text(value(hole))}, is given {given}"
        given_out = output_values(block)
        wanted = value(call) if isinstance(value(call), (tuple, list)) else (value(call),)
        if not same(tuple(given_out), tuple(wanted)):
            gives, records = shape_text(tuple(given_out)), shape_text(tuple(wanted))
            yield f"{call.target}: gives {gives}, the skeleton records {records}"


def rule_weights(program: Program) -> Iterator[str]:
    """Weight inputs exist, and their recorded dtype and shape are those of the checkpoint tensor."""
    holes = {n.name: n for n in program.skeleton.graph.nodes if n.op == "placeholder"}
    for name, ref in program.weights.items():
        val = value(holes[name]) if name in holes else None
        if not isinstance(val, Tensor):
            yield f"weight {ref.name} has no input {name!r}"
        elif val.dtype != ref.dtype or tuple(val.shape) != ref.shape:
            yield f"weight {ref.name} is {ref.dtype} {ref.shape}, its input records {shape_text(val)}"


def rule_writes(program: Program) -> Iterator[str]:
    """Only caches are written to: not weights, which programs share, nor values that others may still read."""
    caches = {c.name for c in program.caches}
    given: dict[str, set[str]] = {}
    for call in program.calls():
        holes = (n.name for n in program.blocks[str(call.target)].graph.nodes if n.op == "placeholder")
        fed = {h for h, arg in zip(holes, call.args) if isinstance(arg, Node) and arg.name in caches}
        given[str(call.target)] = given.get(str(call.target), fed) & fed
    for name, gm in program.graphs():
        free = caches if name == "skeleton" else given.get(name, set())
        for node in gm.graph.nodes:
            for target in written(node):
                origin = origin_of(target)
                if origin.op != "placeholder" or origin.name not in free:
                    yield f"{name}: {node_text(node)} writes to {origin.name}, which is no cache"


def contiguous(val: Tensor) -> bool:
    """Whether a fake tensor is dense and in order, whatever its symbolic sizes are; one without elements always is."""
    if any(isinstance(size, int) and size == 0 for size in val.shape):
        return True
    step: Any = 1
    for size, stride in zip(reversed(val.shape), reversed(val.stride())):
        if isinstance(size, int) and size == 1:
            continue
        if not _equal_dim(stride, step):
            return False
        step = step * size
    return True


def fact_functional(program: Program) -> Iterator[str]:
    """Fact.FUNCTIONAL."""
    for name, gm in program.graphs():
        yield from (f"{name}: {node_text(n)} writes to an operand" for n in gm.graph.nodes if writes(n))


def fact_canonical(program: Program) -> Iterator[str]:
    """Fact.CANONICAL."""
    for name, gm in program.graphs():
        for node in gm.graph.nodes:
            if "assert" in str(node.target):
                yield f"{name}: {node_text(node)} is an assertion"


def fact_cached(program: Program) -> Iterator[str]:
    """Fact.CACHED."""
    for name, gm in program.graphs():
        for node in gm.graph.nodes:
            if str(node.target) in ("deepinfer.attention.default", "deepinfer.latent_attention.default"):
                yield f"{name}: {node_text(node)} reads no cache"


def fact_lowered(program: Program) -> Iterator[str]:
    """Fact.LOWERED: what a block hands to a block is contiguous, because compiled blocks read it so."""
    for call in program.calls():
        for arg in call.args:
            made = arg.args[0] if is_op(arg, operator.getitem) else arg  # type: ignore[union-attr]
            if not isinstance(made, Node) or made.op != "call_module":
                continue
            index = arg.args[1] if made is not arg else 0  # type: ignore[union-attr]
            val = output_values(program.blocks[str(made.target)])[index]  # type: ignore[index]
            if isinstance(val, Tensor) and not contiguous(val):
                yield f"{made.target}: output {index} goes to {call.target} and is not contiguous"


FACT_CHECKS: dict[Fact, Callable[[Program], Iterator[str]]] = {
    Fact.FUNCTIONAL: fact_functional,
    Fact.CANONICAL: fact_canonical,
    Fact.CACHED: fact_cached,
    Fact.LOWERED: fact_lowered,
}


def verify(program: Program, changed: frozenset[str], pass_name: str) -> None:
    """Raise GraphInvalid for the first broken rule or held fact. `changed` names the graphs to check in full."""
    for name, gm in program.graphs():
        if name not in changed:
            continue
        for rule in GRAPH_RULES:
            for problem in rule(gm):
                raise GraphInvalid(graph=name, name=pass_name, problem=problem)
    for check in (
        rule_calls,
        rule_weights,
        rule_writes,
        *(FACT_CHECKS[f] for f in program.facts if f in FACT_CHECKS),
    ):
        for problem in check(program):
            raise GraphInvalid(graph="program", name=pass_name, problem=problem)
