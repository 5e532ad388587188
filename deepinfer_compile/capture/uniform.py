"""Prove which layers of a model do the same: run all of them once on the meta device and write down what they do.

Capture traces one layer of a kind and lets it stand for the others. Equal classes, attributes and shapes do not prove
that it may: code can ask for the layer's index, the model's loop can treat one layer apart, and attributes can hide in
lists, tensors and closures. What a layer computes is the list of operators that it calls with all their arguments, so
that list is recorded for every layer, and layers are of one kind only where the lists are equal. The same is recorded
for the trimmed model: what is traced must be what the whole model does there. On the meta device an operator costs
microseconds, and an operator that was met before is not run again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_compile.errors import UnsupportedConstruct

Source = tuple[str, int | str]
"""Where what a layer reads was made: ("1 back", which of that layer's results), or ("prefix", an input or a number)."""
Result = tuple[int, int | str]
"""A tensor: the layer that made it (-1: what comes before the first) and its number there, or an input's name."""


@dataclass(frozen=True)
class Unit:
    """What was done for one layer: before it since the last one, and in it (digests), and where what it reads was made,
    in the order of first use: `sources` as seen from the layer, `reads` as seen from the model."""

    before: str
    inside: str
    sources: tuple[Source, ...]
    reads: tuple[Result, ...] = field(compare=False, default=())

    @property
    def done(self) -> tuple[str, str]:
        """What was done, whatever it was done to."""
        return self.before, self.inside


@dataclass(frozen=True)
class Doings:
    """What a model did: the operators before its first layer, for each layer, and after the last."""

    prefix: str
    layers: tuple[Unit, ...]
    suffix: str
    last: Unit
    shapes: dict[Result, tuple[torch.dtype, tuple[int, ...]]] = field(compare=False, repr=False)

    @property
    def units(self) -> tuple[Unit, ...]:
        """What was done for each layer, and after the last."""
        return (*self.layers, self.last)

    @property
    def is_chain(self) -> bool:
        """Whether nothing reads results of a layer but what follows it."""
        return all(where in ("prefix", "1 back") for unit in self.units for where, _ in unit.sources)

    def read_of(self, layer: int) -> set[int | str]:
        """Which results of a layer are read elsewhere."""
        return {number for unit in self.units for maker, number in unit.reads if maker == layer}

    def same_kind(self, first: int, other: int) -> bool:
        """Whether two layers do the same. What enters layer 0 comes from the prefix, elsewhere from one layer back."""
        a, b = self.layers[first], self.layers[other]
        if first > 0 or other == 0:
            return a == b
        flows = len(a.sources) == len(b.sources) and all(
            x == y or (x[0] == "prefix" and y[0] == "1 back") for x, y in zip(a.sources, b.sources, strict=True)
        )
        return flows and (a.before, a.inside) == (b.before, b.inside)

    def shown_by(self, trimmed: Doings, kept: tuple[int, ...]) -> bool:
        """Whether a model with only the `kept` layers does what this one does before, in and after them."""
        ends = (self.prefix, self.suffix) == (trimmed.prefix, trimmed.suffix)
        return ends and all(self.layers[i] == unit for i, unit in zip(kept, trimmed.layers, strict=True))

    def done_by(self, trimmed: Doings, kept: tuple[int, ...]) -> bool:
        """The same, but for which layers what is read comes from."""
        ends = (self.prefix, self.last.done) == (trimmed.prefix, trimmed.last.done)
        return ends and all(self.layers[i].done == u.done for i, u in zip(kept, trimmed.layers, strict=True))


def doings(function: nn.Module, path: str, arguments: dict[str, Tensor]) -> Doings:
    """Run `function(**arguments)` on the meta device and digest what it calls, layer by layer of the list at `path`.

    Weights are neither copied nor read; small tensors that are no weights count by their content. Raises
    UnsupportedConstruct if the layers are not called once each in order, or the model needs values.
    """
    layers: Any = function.get_submodule(path)
    record = _Record(path, len(layers))
    held = {id(t): t for _, t in _tensors(function)}
    meta = {key: torch.empty_like(t, device="meta") for key, t in held.items()}
    fixed = _unsaved(function)
    for name, tensor in _tensors(function):
        content = _content(tensor) if name in fixed else ""
        record.weights.setdefault(id(meta[id(tensor)]), (name, content))
    given = {k: t.to("meta") for k, t in arguments.items()}
    for name, tensor in given.items():
        record.made[id(tensor)] = (-1, name)
    try:
        with torch.no_grad(), _exporting(), _marked(layers, record), record:
            functional_call(function, {name: meta[id(t)] for name, t in _tensors(function)}, (), given)
    except UnsupportedConstruct:
        raise
    except Exception as err:  # anything that the model's code raises; all of it means that nothing is proven
        first = (str(err).strip().splitlines() or [""])[0]
        raise UnsupportedConstruct(construct=f"{type(err).__name__}: {first}", fix="trace all layers") from err
    return record.finish()


@contextmanager
def _exporting() -> Iterator[None]:
    """Model code takes the branches that it takes under torch.export."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    before = [getattr(torch.compiler, flag) for flag in flags]
    try:
        for flag in flags:
            setattr(torch.compiler, flag, True)
        yield
    finally:
        for flag, value in zip(flags, before, strict=True):
            setattr(torch.compiler, flag, value)


@contextmanager
def _marked(layers: nn.ModuleList, record: _Record) -> Iterator[None]:
    hooks = []
    for i, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: record.enter(i)))
        hooks.append(layer.register_forward_hook(lambda *_, i=i: record.leave(i)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(function: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from function.named_parameters(remove_duplicate=False)
    yield from function.named_buffers(remove_duplicate=False)


def _unsaved(function: nn.Module) -> set[str]:
    """Names of buffers that no checkpoint holds: their content is part of what the model does."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in function.named_modules()
        for name in module._non_persistent_buffers_set
    }


def _content(tensor: Tensor) -> str:
    if tensor.is_meta:
        return ""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(raw).hexdigest()


class _Record(TorchDispatchMode):
    """Writes down every operator. Tensors count by where they were made, never by identity."""

    def __init__(self, path: str, count: int) -> None:
        super().__init__()
        self.path, self.count = path, count
        self.unit = 0
        self.within = False
        self.weights: dict[int, tuple[str, str]] = {}
        self.made: dict[int, Result] = {}
        self.shapes: dict[Result, tuple[torch.dtype, tuple[int, ...]]] = {}
        self.kept: list[Any] = []
        """every tensor seen, so that no id is used twice"""
        self.before: list[list[Any]] = [[] for _ in range(count + 1)]
        self.inside: list[list[Any]] = [[] for _ in range(count + 1)]
        self.reads: list[dict[int, Result]] = [{} for _ in range(count + 1)]
        self.known: dict[Any, Any] = {}
        self.numbers = [0] * (count + 2)

    def enter(self, layer: int) -> None:
        if layer != self.unit or self.within:
            raise UnsupportedConstruct(construct=f"layer {layer} is called out of order", fix="trace all layers")
        self.within = True

    def leave(self, layer: int) -> None:
        self.within = False
        self.unit = layer + 1

    @property
    def place(self) -> int:
        """The unit that works now; what comes before the first layer is no layer's."""
        return -1 if self.unit == 0 and not self.within else self.unit

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        key = (func, self.form(args), self.form(kwargs or {}))
        described = (func, self.described(args), self.described(kwargs or {}))
        (self.inside if self.within else self.before)[self.unit].append(described)
        out = self.call(func, args, kwargs or {}, key)
        for tensor in _flat(out):
            made = self.made[id(tensor)] = (self.place, self.numbers[self.place])
            self.shapes[made] = (tensor.dtype, tuple(tensor.shape))
            self.numbers[self.place] += 1
            self.kept.append(tensor)
        return out

    def call(self, func: Any, args: Any, kwargs: Any, key: Any) -> Any:
        """The operator's result, made from its known shape where it was met with such arguments before."""
        if func._schema.is_mutable:
            return func(*_on_meta(args), **_on_meta(kwargs))
        like = self.known.get(key)
        if like is not None:
            return torch.empty_strided(like[0], like[1], dtype=like[2], device="meta")
        out = func(*_on_meta(args), **_on_meta(kwargs))
        if isinstance(out, Tensor) and out.is_meta:
            self.known[key] = (tuple(out.shape), out.stride(), out.dtype)
        return out

    def form(self, held: Any) -> Any:
        """What an operator's result depends on, on the meta device."""
        if isinstance(held, Tensor):
            return ("t", held.dtype, tuple(held.shape), held.stride(), held.device.type)
        if isinstance(held, (list, tuple)):
            return tuple([self.form(h) for h in held])
        if isinstance(held, dict):
            return tuple([(k, self.form(h)) for k, h in held.items()])
        return (type(held), held)

    def described(self, held: Any) -> Any:
        """An argument as text would show it: a tensor by its role for this layer, anything else as it is."""
        if isinstance(held, Tensor):
            return (self.role(held), held.dtype, tuple(held.shape))
        if isinstance(held, (list, tuple)):
            return tuple([self.described(h) for h in held])
        if isinstance(held, dict):
            return tuple([(k, self.described(h)) for k, h in held.items()])
        return (type(held), held)

    def role(self, tensor: Tensor) -> Any:
        made = self.made.get(id(tensor))
        if made is not None:
            if made[0] == self.place:
                return made[1]
            seen = self.reads[self.unit]
            for place, source in seen.items():
                if source == made:
                    return ("read", place)
            seen[len(seen)] = made
            return ("read", len(seen) - 1)
        found = self.weights.get(id(tensor))
        if found is not None:
            name, content = found
            stem = f"{self.path}.{self.unit}."
            return (name.removeprefix(stem), content)
        self.kept.append(tensor)
        return ("constant", _content(tensor))

    def finish(self) -> Doings:
        """Digests of all that was written down."""
        if self.unit != self.count:
            raise UnsupportedConstruct(construct=f"layer {self.unit} is not called", fix="trace all layers")
        given: list[list[Any]] = [
            sorted({n for r in self.reads for maker, n in r.values() if maker == i}) for i in range(self.count)
        ]
        units = []
        for i in range(self.count):
            before = self.before[i] if i else []
            sources = tuple(self.source(i, made, given) for made in self.reads[i].values())
            reads = tuple(self.reads[i].values())
            units.append(Unit(_digest(before), _digest(self.inside[i]), sources, reads))
        after, reads = self.before[self.count], tuple(self.reads[self.count].values())
        sources = tuple(self.source(self.count, made, given) for made in reads)
        last = Unit(_digest(after), "", sources, reads)
        return Doings(_digest(self.before[0]), tuple(units), _digest([*after, list(sources)]), last, self.shapes)

    def source(self, unit: int, made: Result, given: list[list[Any]]) -> Source:
        maker, number = made
        if maker < 0:
            return ("prefix", number)
        return (f"{unit - maker} back", given[maker].index(number))


def _flat(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (list, tuple)):
        for held in out:
            yield from _flat(held)


def _on_meta(held: Any) -> Any:
    if isinstance(held, Tensor):
        return held if held.is_meta else held.to("meta")
    if isinstance(held, (list, tuple)):
        return type(held)(_on_meta(h) for h in held)
    if isinstance(held, dict):
        return {k: _on_meta(h) for k, h in held.items()}
    return held


def _digest(held: Any) -> str:
    return hashlib.sha256(repr(held).encode()).hexdigest()
