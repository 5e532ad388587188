"""Recognise index arithmetic, masks and gates by what they compute, not by how they are spelt.

There are dozens of ways to write "the weight of expert e for this token" or "the gate of an expert". What they have in
common is their value: the piece of graph is run on small concrete numbers and compared with the definition. Structure
decides only where a piece begins and ends.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate

from deepinfer_compile.graph import argument, is_op, target_name, value
from deepinfer_compile.match import CASTS
from deepinfer_compile.ops.activation import KINDS, gate_value

A = torch.ops.aten
CLAMPS = (A.clamp.default, A.clamp_max.default, A.clamp_min.default)
SHAPE_ONLY = (
    *(A.zeros_like.default, A.ones_like.default, A.full_like.default, A.empty_like.default),
    *(A.new_zeros.default, A.new_ones.default, A.new_full.default, A.new_empty.default),
)
"""Calls that read the shape and dtype of their operand, not its values."""
COPIES = (A._to_copy.default, A.clone.default, A.alias.default)
PARTS = (A.slice.Tensor, A.split.Tensor, A.split_with_sizes.default)
ROWS = 64
"""Rows to try what acts on each row alone with."""
LIMIT_ELEMENTS = 1 << 26
"""Of one value on the CPU."""
LIMIT_ON_DEVICE = 1 << 31
"""Of one value on an accelerator, where the graph itself makes values as large."""
CPU = torch.device("cpu")
DEFAULT_ALPHA, DEFAULT_LIMIT = 1.702, 7.0
"""What activations that use neither carry, as capture does."""


class NearMiss(Exception):
    """A matcher gives a candidate up; the text is the reason that the report shows."""


def no_input(node: Node) -> NoReturn:
    """The default for inputs that were not given."""
    raise NearMiss(f"it depends on the input {node.meta.get('weight', node.name)}")


def place_of_values(node: Node) -> torch.device:
    """Where to evaluate what a node leads to: beside it on an accelerator, else on the CPU."""
    device = value(node).device
    return device if device.type == "cuda" else CPU


def concrete_size(size: Any, tokens: int) -> int:
    """A size with every symbol standing for `tokens`."""
    if not isinstance(size, SymInt):
        return int(size)
    expr = size.node.expr
    return int(expr.subs(dict.fromkeys(expr.free_symbols, tokens)))


@dataclass
class Concrete:
    """Values of nodes on concrete numbers: every symbolic size is `tokens`, `given` nodes have the given values.

    missing: what an input that is not given stands for; it may raise NearMiss. device: where values are. fewer: what is
    given has fewer rows than the graph says, and so has what is made of it.
    """

    tokens: int
    given: dict[Node, Any] = field(default_factory=dict)
    missing: Callable[[Node], Any] = no_input
    device: torch.device = CPU
    fewer: bool = False

    def shape(self, node: Node) -> tuple[int, ...]:
        """Concrete shape of a node."""
        return tuple(concrete_size(d, self.tokens) for d in value(node).shape)

    def value(self, wanted: Node) -> Any:
        """The value of a node. Raises NearMiss where it depends on something unknown or too large."""
        stack = [wanted]
        while stack:
            node = stack[-1]
            if node in self.given:
                stack.pop()
                continue
            if isinstance(value(node), SymInt):
                self.given[node] = concrete_size(value(node), self.tokens)
                continue
            needed = [i for i in self._read(node) if i not in self.given]
            if needed:
                stack.extend(needed)
                continue
            self.given[node] = self.missing(node) if node.op == "placeholder" else self._call(node)
        return self.given[wanted]

    def _read(self, node: Node) -> list[Node]:
        """Operands whose values matter to a call."""
        return (
            node.all_input_nodes
            if not is_op(node, *SHAPE_ONLY)
            else [n for n in node.all_input_nodes if n is not node.args[0]]
        )

    def _operand(self, node: Node) -> Any:
        if node in self.given:
            return self.given[node]
        return torch.empty(self.shape(node), dtype=value(node).dtype, device=self.device)

    def _here(self, item: Any) -> Any:
        """What stands for an operand: values are on one device, wherever the graph runs."""
        if isinstance(item, Node):
            return self._operand(item)
        return self.device if isinstance(item, torch.device) else item

    def _call(self, node: Node) -> Any:
        if node.op != "call_function":
            raise NearMiss(f"it depends on {node.op} {node.name}")
        held = value(node)
        limit = LIMIT_ELEMENTS if self.device == CPU else LIMIT_ON_DEVICE
        if not self.fewer and isinstance(held, Tensor) and torch.Size(self.shape(node)).numel() > limit:
            raise NearMiss(f"{node.name} is too large to evaluate")
        args, kwargs = map_aggregate((node.args, node.kwargs), self._here)  # type: ignore[misc]
        try:
            with torch.no_grad():
                return _run(node.target, args, kwargs)
        except (RuntimeError, IndexError, ValueError, TypeError) as err:
            raise NearMiss(f"{target_name(node)} does not evaluate: {str(err).splitlines()[0]}") from err


def _run(target: Any, args: Any, kwargs: Any) -> Any:
    """A call; whole numbers are counted as floating ones, the CPU knows no other way."""
    if target is A.histc.default and not args[0].is_floating_point():
        return target(args[0].double(), *args[1:], **kwargs).to(args[0].dtype)
    return target(*args, **kwargs)


def ancestors(node: Node, stops: Sequence[Node] = ()) -> Iterator[Node]:
    """A node and what it is computed from, nearest first; stops are yielded and not entered."""
    queue, seen = [node], {node}
    for current in queue:
        yield current
        if current in stops:
            continue
        for source in current.all_input_nodes:
            if source not in seen:
                seen.add(source)
                queue.append(source)


def numbers(node: Node, stops: Sequence[Node] = (), targets: Sequence[object] = ()) -> set[float]:
    """Every number written in the calls between `stops` and `node`, or in those of the given targets."""
    found: set[float] = set()

    def collect(arg: Any) -> None:
        if isinstance(arg, (list, tuple)):
            for a in arg:
                collect(a)
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
            found.add(arg)

    for current in ancestors(node, stops):
        if current in stops or current.op != "call_function":
            continue
        if not targets or current.target in targets:
            collect(current.args)
            collect(list(current.kwargs.values()))
    return found


def operand(node: Node, index: int = 0) -> Node:
    """Operand `index` of a call, which must be a node. Raises NearMiss."""
    found = node.args[index] if index < len(node.args) else None
    if not isinstance(found, Node):
        raise NearMiss(f"operand {index} of {target_name(node)} is not a tensor")
    return found


def operands(node: Node, index: int = 0) -> list[Node]:
    """Operand `index` of a call, which must be a list of nodes. Raises NearMiss."""
    found = node.args[index]
    if not isinstance(found, (list, tuple)) or not all(isinstance(n, Node) for n in found):
        raise NearMiss(f"operand {index} of {target_name(node)} is not a list of tensors")
    return list(found)  # type: ignore[arg-type]


def item_of(node: object, index: int) -> Node | None:
    """The call whose element `index` a node is, or None."""
    if is_op(node, operator.getitem) and node.args[1] == index:  # type: ignore[attr-defined]
        source = node.args[0]  # type: ignore[attr-defined]
        return source if isinstance(source, Node) else None
    return None


def before_f32(node: Node) -> Node:
    """What a node is a copy of in f32: of bf16 widened to f32, the bf16 node. Ops that work in f32 need no copy."""
    while is_op(node, *CASTS) and value(node).dtype == torch.float32:
        source = operand(node)
        if value(source).dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return node
        node = source
    return node


@dataclass(frozen=True)
class Gate:
    """A gated activation. interleaved: gate and up alternate in one tensor. swapped: the up part comes first."""

    kind: str
    alpha: float
    limit: float
    interleaved: bool = False
    swapped: bool = False


def find_gate(sources: Sequence[Node], result: Node) -> Gate:
    """The gated activation that makes `result` [..., I] of one tensor [..., 2I] or of two tensors [..., I].

    The elementwise graph between them is run on a probe that reaches beyond every clamp and compared with each known
    form. Raises NearMiss if none fits.
    """
    limits = sorted({abs(n) for n in numbers(result, sources, CLAMPS)}) or [DEFAULT_LIMIT]
    alphas = sorted({*numbers(result, sources, (A.mul.Tensor,)), DEFAULT_ALPHA})
    rows = ROWS if _keeps_rows(sources, result) else None
    probe = Concrete(3, fewer=rows is not None)
    reach = 1.6 * max(limits)
    drawn = [_probe(_fewer(probe.shape(s), rows), value(s).dtype, reach, seed) for seed, s in enumerate(sources)]
    probe.given.update(zip(sources, drawn))
    wanted = probe.value(result)
    if not wanted.numel():
        raise NearMiss("there are no rows to try the activation on")
    best: tuple[float, Gate] | None = None
    for gate in _gates(len(sources) == 1, alphas, limits):
        first, second = _halves(drawn, gate)
        if first.shape != wanted.shape:
            continue
        got = gate_value(first, second, gate.kind, gate.alpha, gate.limit)
        error = float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30))
        if best is None or error < best[0]:
            best = error, gate
    tolerance = 1e-6 if wanted.dtype == torch.float32 else 1e-2
    if best is None or best[0] > tolerance:
        raise NearMiss(f"the activation before {result.name} is none of {KINDS}")
    return best[1]


def _keeps_rows(sources: Sequence[Node], result: Node) -> bool:
    """Whether every call between acts on each row [..., :] alone and in the same way, so that a few rows show all."""
    for node in ancestors(result, sources):
        if node in sources:
            continue
        if is_op(node, operator.getitem, *COPIES):
            continue
        if is_op(node, *PARTS):
            rank = value(operand(node)).dim()
            if int(argument(node, "dim")) % rank != rank - 1:  # type: ignore[call-overload]
                return False
        elif torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            return False
    held = [value(n) for n in (*sources, result)]
    return len({str(tuple(t.shape[:-1])) for t in held}) == 1


def _fewer(shape: tuple[int, ...], rows: int | None) -> tuple[int, ...]:
    return shape if rows is None else (*(min(n, rows) for n in shape[:-1]), shape[-1])


def _probe(shape: tuple[int, ...], dtype: torch.dtype, reach: float, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    return ((2 * torch.rand(shape, generator=gen) - 1) * reach).to(dtype)


def _gates(fused: bool, alphas: list[float], limits: list[float]) -> Iterator[Gate]:
    for swapped in (False, True):
        for interleaved in (False, True) if fused else (False,):
            for kind in KINDS:
                uses_alpha, uses_limit = kind == "swiglu_oai", kind in ("swiglu_oai", "swiglu_clamp")
                for alpha in alphas if uses_alpha else [DEFAULT_ALPHA]:
                    for limit in limits if uses_limit else [DEFAULT_LIMIT]:
                        yield Gate(kind, alpha, limit, interleaved, swapped)


def _halves(drawn: Sequence[Tensor], gate: Gate) -> tuple[Tensor, Tensor]:
    if len(drawn) == 2:
        first, second = drawn
    elif gate.interleaved:
        first, second = drawn[0][..., 0::2], drawn[0][..., 1::2]
    else:
        half = drawn[0].shape[-1] // 2
        first, second = drawn[0][..., :half], drawn[0][..., half:]
    return (second, first) if gate.swapped else (first, second)


def dense_weights(ids: Tensor, weights: Tensor, count: int) -> Tensor:
    """[..., E] of chosen ids and weights [..., k]: the definition that every spelling is compared with."""
    dense = torch.zeros(*ids.shape[:-1], count, dtype=weights.dtype)
    return dense.scatter_add(-1, ids.long(), weights)


def sample_choice(shape: tuple[int, ...], count: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Distinct ids [..., k] and weights of both signs that are exact in every float type.

    With an odd seed all tokens choose the same experts, which shows any limit on tokens per expert.
    """
    gen = torch.Generator().manual_seed(seed)
    rows = torch.Size(shape[:-1]).numel()
    draws = [torch.randperm(count, generator=gen)[: shape[-1]] for _ in range(1 if seed % 2 else rows)]
    ids = torch.stack(draws).expand(rows, -1)
    weights = torch.randint(-127, 128, shape, generator=gen).to(torch.float32) / 64
    return ids.reshape(shape), weights.to(dtype)


def given_choice(
    ids: Node, weights: Node, count: int, tokens: int, seed: int, device: torch.device = CPU
) -> tuple[Concrete, Tensor, Tensor]:
    """An evaluation in which a choice of experts has random values; those values beside it, on the CPU."""
    probe = Concrete(tokens, device=device)
    shape = probe.shape(ids)
    drawn, share = sample_choice(shape, count, value(weights).dtype, seed)
    probe.given.update({ids: drawn.to(device, value(ids).dtype), weights: share.to(device)})
    return probe, drawn, share


def id_candidates(node: Node, stops: Sequence[Node] = ()) -> list[Node]:
    """Tensors that may be the chosen experts' ids [..., k]: integers with a static last axis, nearest first."""
    found = []
    for source in ancestors(node, stops):
        held = value(source)
        if source in stops or not isinstance(held, Tensor) or held.dtype not in (torch.int64, torch.int32):
            continue
        if held.dim() >= 2 and isinstance(held.shape[-1], int):
            found.append(source)
    return found


def weight_candidates(node: Node, ids: Node) -> list[Node]:
    """Tensors that may be the chosen experts' weights: floats of the ids' shape, nearest first."""
    wanted = str(tuple(value(ids).shape))
    return [
        n
        for n in ancestors(node, (ids,))
        if isinstance(held := value(n), Tensor) and held.is_floating_point() and str(tuple(held.shape)) == wanted
    ]


def seeds_for(ids: Node, count: int, tokens: int) -> list[int]:
    """Seeds of `sample_choice`, three at least, under which every expert is chosen twice: a graph for one token shows
    few of them at a time."""
    shape = Concrete(tokens).shape(ids)
    if shape[-1] > count or not torch.Size(shape).numel():
        raise NearMiss(f"no choice among {count} experts is of shape {list(shape)}")
    seeds: list[int] = []
    wanted = torch.full((count,), 2)
    for seed in range(64 * count):
        drawn = torch.bincount(sample_choice(shape, count, torch.float32, seed)[0].flatten(), minlength=count)
        if seed < 3 or bool(((wanted > 0) & (drawn > 0)).any()):
            seeds.append(seed)
            wanted = wanted - drawn
        if seed >= 2 and bool((wanted <= 0).all()):
            return seeds
    raise NearMiss("the graph has too few tokens to show every expert")


def same_values(agree: Callable[[int], bool], ids: Node, count: int, tokens: int) -> bool:
    """Whether a comparison holds for all seeds; one that cannot be evaluated does not hold."""
    try:
        return all(agree(seed) for seed in seeds_for(ids, count, tokens))
    except NearMiss:
        return False


def crosses_tokens(node: Node, stops: Sequence[Node]) -> Node | None:
    """A running total between `stops` and a node: how dispatch with a capacity counts, or None."""
    scans = (A.cumsum.default, A.cumprod.default)
    return next((n for n in ancestors(node, stops) if n not in stops and is_op(n, *scans)), None)
