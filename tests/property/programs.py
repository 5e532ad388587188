"""A small program as data: inputs, buffers, submodules and the lines of a forward, which print as the Python that runs.

Sizes "b" and "t" stand for two numbers, so that one program runs at two sets of sizes. Tensors lie in memory as models
leave them (slices, transposes, repeats) or share it.
"""

from __future__ import annotations

import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LAYOUTS = ("plain", "plain", "plain", "turned", "stepped", "inside", "spread")
Size = str | int


@dataclass(frozen=True)
class Held:
    """An input, parameter or buffer. layout: how it lies in memory. alias: an expression over those before it."""

    name: str
    shape: tuple[Size, ...]
    dtype: torch.dtype = torch.float32
    layout: str = "plain"
    alias: str = ""
    kind: str = "input"
    below: int = 3

    def make(self, sizes: dict[str, int], gen: torch.Generator) -> Tensor:
        """Random values: normal, or integers 0..below-1."""
        shape = [sizes[s] if isinstance(s, str) else s for s in self.shape]
        layout = self.layout if shape else "plain"
        if layout == "turned":
            return self._draw([*shape[:-2], *reversed(shape[-2:])], gen).transpose(-1, max(-2, -len(shape)))
        if layout == "stepped":
            return self._draw([*shape[:-1], 2 * shape[-1]], gen)[..., ::2]
        if layout == "inside":
            return self._draw([shape[0] + 2, *shape[1:]], gen)[1:-1]
        if layout == "spread":
            return self._draw([1, *shape[1:]], gen).expand(shape)
        return self._draw(shape, gen)

    def _draw(self, shape: list[int], gen: torch.Generator) -> Tensor:
        if self.dtype == torch.bool:
            return torch.rand(shape, generator=gen) > 0.5
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=gen).to(self.dtype)
        return torch.randint(0, self.below, shape, generator=gen).to(self.dtype)


@dataclass(frozen=True)
class Found:
    """What the backend must make of one line: dialect ops it finds, and a reason among those for what it missed."""

    name: str
    finds: dict[str, int]
    missed: str = ""


@dataclass(frozen=True)
class Program:
    """One module with its calls. order: how the keyword arguments are ordered; `floats` are Python numbers."""

    seed: int
    sizes: tuple[dict[str, int], dict[str, int]]
    held: tuple[Held, ...]
    modules: tuple[tuple[str, str], ...]
    floats: tuple[tuple[str, float], ...]
    steps: tuple[str, ...]
    result: str
    order: tuple[str, ...]
    dynamic: bool | None
    grad: bool
    found: tuple[Found, ...]
    names: dict[str, Any] = field(repr=False, default_factory=dict)

    @property
    def inputs(self) -> tuple[Held, ...]:
        """What a call passes."""
        return tuple(h for h in self.held if h.kind == "input")

    @property
    def source(self) -> str:
        """The forward as Python."""
        arguments = ", ".join([h.name for h in self.inputs] + [name for name, _ in self.floats])
        lines = [line for step in self.steps for line in step.splitlines()]
        head = f"def forward(self, *, {arguments}):" if arguments else "def forward(self):"
        return "\n    ".join([head, *lines, f"return {self.result}"]) + "\n"

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}: {self.sizes}, dynamic={self.dynamic}, called with {', '.join(self.order)}"]
        for h in self.held:
            said = f" = {h.alias}" if h.alias else f": {h.layout} {h.dtype} {h.shape}"
            lines.append(f"# {h.kind} {h.name}{said}")
        lines += [f"# module {name} = {text}" for name, text in self.modules]
        lines += [f"# {f.name}: {f.finds} {f.missed}" for f in self.found]
        return "\n".join([*lines, self.source])

    def module(self) -> nn.Module:
        """A fresh module: random parameters and buffers, the same ones each time."""
        made = build(self.held, self.modules, self.sizes[0], self.seed, self.names)
        file = f"<program {self.seed}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(True), file)
        space = dict(self.names)
        exec(compile(self.source, file, "exec"), space)
        type(made).forward = space["forward"]
        return made

    def arguments(self, which: int, module: nn.Module) -> dict[str, Any]:
        """Arguments of call `which` in the order of `order`. Around patterns widths are known, as weights make them."""
        given = inputs_of(self.held, self.sizes[which], self.seed + which + 1, module)
        given |= {name: number + which for name, number in self.floats}
        for h in self.inputs if self.found else ():
            for at in (i for i, size in enumerate(h.shape) if isinstance(size, int)):
                torch._dynamo.mark_static(given[h.name], at)
        return {name: given[name] for name in self.order}


def build(
    held: tuple[Held, ...],
    modules: tuple[tuple[str, str], ...],
    sizes: dict[str, int],
    seed: int,
    names: dict[str, Any],
) -> nn.Module:
    """A module of a class of its own that holds the parameters, buffers and submodules."""
    made: Any = type("Generated", (nn.Module,), {})()
    gen = torch.Generator().manual_seed(seed)
    for h in held:
        if h.kind == "input":
            continue
        value = eval(h.alias, {"self": made}) if h.alias else h.make(sizes, gen)
        if h.kind == "buffer":
            made.register_buffer(h.name, value)
        else:
            made.register_parameter(h.name, nn.Parameter(value, requires_grad=False))
    for i, (name, text) in enumerate(modules):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + i)
            made.add_module(name, eval(text, names).requires_grad_(False).eval())
    return made


def inputs_of(held: tuple[Held, ...], sizes: dict[str, int], seed: int, module: nn.Module) -> dict[str, Any]:
    """Random inputs by name."""
    gen = torch.Generator().manual_seed(seed)
    given: dict[str, Any] = {}
    for h in held:
        if h.kind == "input":
            given[h.name] = eval(h.alias, {"self": module, **given}) if h.alias else h.make(sizes, gen)
    return given


def filled(module: nn.Module) -> nn.Module:
    """The module with all parameters random (test modules leave them empty)."""
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 1 if p.dim() == 1 else p.shape[-1] ** -0.5)
    return module


NAMES: dict[str, Any] = {"torch": torch, "F": F, "filled": filled}
Known = Callable[..., Any]
