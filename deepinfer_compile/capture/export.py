"""torch.export as the tracer: one functional ATen graph of a packed-token function, weights as named inputs."""

from __future__ import annotations

import logging
import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.exc import UserError, UserErrorType
from torch.fx import Graph, GraphModule, Node

from deepinfer_compile.capture.again import met_again
from deepinfer_compile.capture.decompose import decomposed
from deepinfer_compile.capture.standins import without_values
from deepinfer_compile.errors import CompileError, DynamicRangeLost, UnsupportedConstruct
from deepinfer_compile.graph import make_module
from deepinfer_compile.program import WeightRef

EXAMPLE_TOKENS = 12
EXAMPLE_ROWS = 3
MAX_TOKENS = 1 << 20


@dataclass(frozen=True)
class Exported:
    """A flat graph whose placeholders are `inputs` (user inputs in order) and `weights` (by placeholder name)."""

    gm: GraphModule
    inputs: tuple[str, ...]
    weights: dict[str, WeightRef]
    max_tokens: int | None = None
    """The longest input that the traced code itself allows (a table sliced to the length), None if any."""


DYNAMIC_DIMS = {"input_ids": 1, "position_ids": 1, "rows": 0, "context_hint": 1}


def export_packed(
    function: nn.Module, examples: dict[str, Tensor], taken: dict[str, str], names: dict[str, str], bounded: bool
) -> Exported:
    """Trace `function(**examples)`; the token and row dimensions stay symbolic.

    taken: our input name -> the function's parameter; inputs are renamed to ours. names: a tensor's attribute path ->
    its name in checkpoints (tied tensors share one). bounded: promise 1..MAX_TOKENS instead of learning the range.
    Raises UnsupportedConstruct with the user's line where the model's code cannot be expressed as a graph.
    """
    try:
        program, graph = _export(function, examples, taken, bounded)
    except CompileError:
        raise
    except Exception as err:  # torch.export raises many unrelated types; all of them mean that capture failed
        raise UnsupportedConstruct(construct=_first_line(err), fix=_advice(err), where=_user_line(err)) from err
    exported = _as_inputs(program, graph, names, {theirs: ours for ours, theirs in taken.items()})
    _check_dynamic(exported, taken)
    return replace(exported, max_tokens=_longest(program, exported))


def _export(function: nn.Module, examples: dict[str, Tensor], taken: dict[str, str], bounded: bool) -> Any:
    """torch.export's program and its functional graph. Where a promised range meets a condition that torch cannot prove
    for all of it (torch 2.11 does not know that min(16 T, 48 T) is 16 T), the range is learned after all, and checked
    like any other."""
    sizes = {"input_ids": "tokens", "position_ids": "tokens", "context_hint": "tokens", "rows": "rows"}
    dims = {size: torch.export.Dim(size, min=1, max=MAX_TOKENS) for size in ("tokens", "rows")}
    dynamic: dict[str, Any] = {
        taken[k]: {DYNAMIC_DIMS[k]: dims[sizes[k]] if bounded else torch.export.Dim.AUTO} for k in taken
    }
    quiet = logging.getLogger("torch.export")
    level = quiet.level
    quiet.setLevel(logging.ERROR)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's own, about how it stores specs
            trace = partial(torch.export.export, function, (), examples, dynamic_shapes=dynamic, strict=False)
            return decomposed(met_again(trace))
    except UserError as err:
        if not bounded or err.error_type is not UserErrorType.CONSTRAINT_VIOLATION:
            raise
    finally:
        quiet.setLevel(level)
    return _export(function, examples, taken, bounded=False)


def _longest(program: Any, exported: Exported) -> int | None:
    """Upper bound of the token dimension that tracing found, None if it found none below MAX_TOKENS."""
    ids = next(n for n in exported.gm.graph.nodes if n.name == "input_ids")
    size = ids.meta["val"].shape[1].node.expr
    if size not in program.range_constraints:  # the model ties the length to another size; its own range is not known
        return None
    upper = program.range_constraints[size].upper
    return int(upper) if upper < MAX_TOKENS else None


def _as_inputs(program: Any, flat: Graph, names: dict[str, str], ours: dict[str, str]) -> Exported:
    """Rebuild the exported graph with every lifted parameter, buffer and constant as a named weight placeholder."""
    sig = program.graph_signature
    if sig.buffers_to_mutate:
        raise UnsupportedConstruct(
            construct=f"the model writes to its buffers {sorted(sig.buffers_to_mutate.values())} in forward",
            fix="state between calls must be a cache input; models that keep state in buffers cannot be packed",
        )
    lifted = {**sig.inputs_to_parameters, **sig.inputs_to_buffers, **sig.inputs_to_lifted_tensor_constants}
    persistent = set(sig.inputs_to_parameters.values()) | (
        set(sig.inputs_to_buffers.values()) - set(getattr(sig, "non_persistent_buffers", ()))
    )
    values = {**program.state_dict, **program.constants}
    graph, env = Graph(), {}
    weights: dict[str, WeightRef] = {}
    inputs: list[str] = []
    for node in flat.nodes:
        if node.op == "placeholder" and node.name in lifted:
            full = lifted[node.name]
            held = values[full]
            name = names.get(full, full)
            if not node.users:
                continue
            new = graph.placeholder(node.name)
            new.meta = dict(node.meta)
            new.meta["weight"] = name
            env[node] = new
            keep = None if full in persistent else without_values(held)
            weights[new.name] = WeightRef(name, held.dtype, tuple(held.shape), keep)
        elif node.op == "placeholder":
            env[node] = graph.placeholder(ours.get(node.name, node.name))
            env[node].meta = dict(node.meta)
            inputs.append(env[node].name)
        elif node.op == "output":
            graph.output(tuple(env[o] for o in node.args[0]))
        else:
            env[node] = graph.node_copy(node, lambda n: env[n])
            env[node].meta = dict(node.meta)
    gm = make_module(nn.Module(), graph)
    return Exported(gm, tuple(inputs), weights)


def _check_dynamic(exported: Exported, taken: dict[str, str]) -> None:
    by_name = {n.name: n for n in exported.gm.graph.nodes if n.op == "placeholder"}
    for name in taken:
        size = by_name[name].meta["val"].shape[DYNAMIC_DIMS[name]]
        if isinstance(size, int):
            raise DynamicRangeLost(name=name, dim=DYNAMIC_DIMS[name], value=size)


def _first_line(err: BaseException) -> str:
    """The kind of an error and what it says first; of violated constraints, which one."""
    lines = str(err).strip().splitlines() or [""]
    if lines[0].startswith("Constraints violated") and len(lines) > 1:
        return f"{type(err).__name__}: the model restricts how many tokens there are: {lines[1].strip(' -')}"
    return f"{type(err).__name__}: {lines[0]}"


def _user_line(err: BaseException) -> str:
    """The last frame that is neither torch's nor ours: the line in the user's model."""
    trace, place = err.__traceback__, ""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "/torch/" not in file and "/deepinfer_compile/" not in file and "contextlib" not in file:
            place = f"{file}:{trace.tb_lineno} in {trace.tb_frame.f_code.co_name}"
        trace = trace.tb_next
    return place


def _advice(err: BaseException) -> str:
    text = f"{type(err).__name__} {err}"
    if "DataDependent" in text or "unbacked" in text:
        return "the line depends on tensor values (a loop over hit experts?); use a batched or grouped form there"
    if "Constraints violated" in text:
        return "remove the comparison with the number of tokens, or report the model"
    return "rewrite the named line without Python control flow on tensor values, or report the model"


def inputs_of(gm: GraphModule) -> list[Node]:
    """Placeholders in order."""
    return [n for n in gm.graph.nodes if n.op == "placeholder"]
