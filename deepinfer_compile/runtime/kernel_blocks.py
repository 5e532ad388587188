"""A block some of whose nodes have kernels: node by node, a kernel where there is one, else the graph's operation.

Which kernel a node gets, or that a library computes it, depends on how many tokens a step has. Everything is checked
when the bundle is opened: that the graph is a form of the block's own, that kernels exist and that their nodes call
operations that kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from deepinfer_compile import ops
from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.errors import BundleCorrupt
from deepinfer_compile.ops.registry import Op
from deepinfer_compile.runtime.interpret import GraphFunction, references, resolve
from deepinfer_compile.runtime.launch import tensors_of
from deepinfer_compile.runtime.stored import Malformed, anything, check_graph, items, record, table, text, whole

_BINARY = record(
    {"file": text, "symbol": text, "shared_bytes": whole(), "threads": whole(1), "hidden_pointers": whole()},
    closed=False,
)
_RECORD = record({"kernel": text, "plan": anything, "binaries": items(_BINARY, 1)}, closed=False)
_NODE = record({"op": text, "kernel": text, "choices": items(anything, 1)})
_BLOCK = record(
    {"graph": anything, "programs": table(record({"kernels": table(_NODE), "left": anything}))}, closed=False
)


class KernelRunner(Protocol):
    """Something that computes one operation."""

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        """Fill contiguous results; operands by schema name."""
        ...


@dataclass
class StepState:
    """What the step that runs now is like. tokens: new tokens in it."""

    tokens: int = 0


def kernel_record(files: BundleFiles, path: str) -> dict[str, Any]:
    """A kernel's record, of the right form. Raises BundleCorrupt."""
    found: dict[str, Any] = files.json(path)
    _checked(_RECORD, found, path)
    return found


def kernel_block(
    files: BundleFiles,
    path: str,
    program: str,
    graph: Mapping[str, Any],
    kernel: Callable[[str, str], KernelRunner],
    state: StepState,
    device: str,
) -> GraphFunction:
    """A block of one program. graph: as the bundle's programs store it; the target may have another of the same inputs
    and outputs. kernel: (name, file) -> what runs it."""
    block = files.json(path)
    _checked(_BLOCK, block, path)
    own = block["graph"]
    if program not in block["programs"] or not _same_values(own, graph, path):
        raise BundleCorrupt(file=path, reason=f"it is not the block that program {program!r} calls")
    targets = {n["name"]: n["target"] for n in own["nodes"] if n["op"] == "call"}
    replaced = {}
    for name, entry in block["programs"][program]["kernels"].items():
        target = resolve(targets[name], path) if name in targets else None
        op = ops.implements(target)
        if op is None or target is None:
            raise BundleCorrupt(file=path, reason=f"node {name[:80]!r} calls no operation that kernels compute")
        choices = [(_upto(c, path), kernel(c[1], path) if c[1] != LIBRARY else None) for c in entry["choices"]]
        if choices[-1][0] is not None:
            raise BundleCorrupt(file=path, reason=f"node {name[:80]!r} has no kernel for any number of tokens")
        # the dispatch to a reference would cost the host more than what it calls
        library = op.reference if ops.find(target) is op else target
        replaced[name] = _call(op, choices, state, library)
    return GraphFunction(own, path, replaced, device)


def _same_values(own: Any, graph: Mapping[str, Any], path: str) -> bool:
    """Whether a target's form of a block takes and gives what the block does. Raises BundleCorrupt for no graph."""
    if own == graph:
        return True
    check_graph(own, path)
    return _values(own) == _values(graph)


def _values(graph: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """What a graph takes, by name, and the shapes of what it gives."""
    *nodes, output = graph["nodes"]
    shapes = {n["name"]: n["val"] for n in nodes}
    given = output["args"][0]
    several = given["tuple"] if isinstance(given, dict) and "tuple" in given else [given]
    gives = [[shapes[name] for name in sorted(references(one))] for one in several]
    return [(n["name"], n["val"]) for n in nodes if n["op"] == "input"], gives


LIBRARY = "library"
"""A choice that is no kernel of ours: the operation that the graph names, run by torch."""

WAITING = (
    *("cached_attention", "cached_latent_attention", "cached_recent", "cached_selected_attention", "experts"),
    *("shared_attention", "write_kv", "write_rows"),
)
"""Operations whose references read sizes back from the device."""


def waits(function: GraphFunction) -> bool:
    """Whether some call of a block waits for the device, so that it cannot be captured in a CUDA graph."""
    masks = {n["name"] for n in function.nodes if isinstance(n.get("val"), dict) and n["val"].get("dtype") in MASKS}
    return any(
        ((op := ops.find(target)) is not None and op.name in WAITING) or _has_size_of_values(node, target, masks)
        for node, target in function.calls
    )


MASKS = ("bool", "uint8")
DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def _has_size_of_values(node: Mapping[str, Any], target: Any, masks: set[str]) -> bool:
    """Whether what a call gives has as many elements as operands say. Taking by numbers gives as many as numbers."""
    if not isinstance(target, OpOverload) or not DYNAMIC & set(target.tags):
        return False
    return target is not torch.ops.aten.index.Tensor or bool(references(node["args"][1]) & masks)


def _upto(choice: Any, path: str) -> int | None:
    """The largest number of tokens that a choice is for."""
    fits = isinstance(choice, list) and len(choice) == 2 and isinstance(choice[1], str)
    if not fits or not (choice[0] is None or (type(choice[0]) is int and choice[0] > 0)):
        raise BundleCorrupt(file=path, reason=f"{str(choice)[:80]!r} is no choice of a kernel")
    upto: int | None = choice[0]
    return upto


def _checked(form: Callable[[Any, str], None], value: Any, path: str) -> None:
    try:
        form(value, "the file")
    except Malformed as error:
        raise BundleCorrupt(file=path, reason=str(error)) from None


def _call(
    op: Op, choices: Sequence[tuple[int | None, KernelRunner | None]], state: StepState, library: Callable[..., Any]
) -> Callable[..., Any]:
    """The operation, computed by the kernel for the tokens of the step, or as the graph names it."""
    names = [a.name for a in op.overload._schema.arguments]
    needed = sum(not a.has_default_value() for a in op.overload._schema.arguments)

    def call(*args: Any, **kwargs: Any) -> Any:
        kernel = next(k for upto, k in choices if upto is None or state.tokens <= upto)
        if kernel is None:
            return library(*args, **kwargs)
        given = dict(zip(names, args)) | kwargs
        args += (None,) * (needed - len(args) - len(kwargs))  # ATen's own defaults that the dialect has not
        made = op.fake(*args, **kwargs)  # on real operands: memory of the right shape
        kernel(tensors_of(given), made if isinstance(made, tuple) else (made,))
        return made

    return call
