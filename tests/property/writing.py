"""Writes random programs: a line is kept if eager runs it at both sets of sizes, so what is kept is always valid."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from typing import Any

import torch
from torch import Tensor

from tests.property.lines import BLOCKS, RESULTS, VALUES, VIEWS, WRITES
from tests.property.patterns import PATTERNS, Pattern
from tests.property.programs import LAYOUTS, NAMES, Found, Held, Program, build, inputs_of

FIELDS = re.compile(r"\{([abfimn])\}")
NAME = re.compile(r"\b(?:self\.)?[a-z]\d+\b")
SHAPES: tuple[tuple[str | int, ...], ...] = (
    *(("b", "t"), ("b", "t", 4), ("t", 4), (4,), ("b", "t", 2, 4), (3, 3), ("t", "t"), (), ("b", 1, 6), (2, 4)),
)
LARGEST = 4096
"""Numbers a value may hold: enough for everything here, and no line can blow a program up."""


class Writer:
    """A program on the way: its parts, and the names that the lines so far give in both worlds of sizes."""

    def __init__(self, seed: int, tokens: int = 0) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self.names = {**NAMES, "known": {p.name: p.call for p in PATTERNS if p.call is not None}}
        self.held: list[Held] = []
        self.modules: list[tuple[str, str]] = []
        self.floats: list[tuple[str, float]] = []
        self.steps: list[str] = []
        self.found: list[Found] = []
        self.kept: list[str] = []
        self.counter = itertools.count()
        self.sizes = self._sizes(tokens)
        self.worlds: list[dict[str, Any]] = [{}, {}]

    def _sizes(self, tokens: int) -> tuple[dict[str, int], dict[str, int]]:
        b, t = self.random.choice([1, 2, 2, 2, 3]), max(tokens, self.random.choice([0, 1, 3, 4, 4, 5, 5]))
        other = {"b": self.random.choice([1, 2, 3, 4]), "t": self.random.choice([1, 2, 3, 5, 6, 7])}
        return {"b": b, "t": t}, other

    def refresh(self) -> None:
        """Both worlds from the start."""
        for which, sizes in enumerate(self.sizes):
            module = build(tuple(self.held), tuple(self.modules), self.sizes[0], self.seed, self.names)
            given = inputs_of(tuple(self.held), sizes, self.seed + which + 1, module)
            self.worlds[which] = {**self.names, "self": module, **given, **{k: v + which for k, v in self.floats}}
            for step in self.steps:
                exec(step, self.worlds[which])

    def line(self, text: str, out: str = "") -> bool:
        """Add a line if it runs in both worlds and gives nothing large; `out` names what it gives."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("error")
                for world in self.worlds:
                    exec(text, world)
        except Exception:  # whatever eager refuses is no program
            self.refresh()
            return False
        values = [w[name] for w in self.worlds for name in (out,) if name in w]
        if any(isinstance(v, Tensor) and (v.numel() > LARGEST or not v.isfinite().all()) for v in values):
            self.refresh()
            return False
        self.steps.append(text)
        return True

    def hold(self, **how: Any) -> str:
        """A new input or member; its name."""
        held = Held(name=f"{how.get('kind', 'input')[0]}{next(self.counter)}", **how)
        self.held.append(held)
        self.refresh()
        return held.name if held.kind == "input" else f"self.{held.name}"

    def tensors(self, kind: str) -> list[str]:
        """Names of tensors that may stand for {a}, {f}, {i} or {m}."""
        world, found = self.worlds[0], []
        members = [f"self.{h.name}" for h in self.held if h.kind == "buffer"]
        for name in [*(n for n, v in world.items() if isinstance(v, Tensor)), *members]:
            value = eval(name, world)
            whole = not value.is_floating_point() and value.dtype != torch.bool
            fits = {"a": True, "b": True, "f": value.is_floating_point(), "i": whole, "m": value.dtype == torch.bool}
            if fits[kind] and not value.is_complex():
                found.append(name)
        return found

    def fill(self, template: str) -> str | None:
        """A template with names in its fields; None if there is nothing to put there. Masks and whole numbers never
        come from what a rewrite may round otherwise."""

        def put(m: re.Match[str]) -> str:
            if m[1] == "n":
                return self.random.choice([*(n for n, _ in self.floats), "0.5", "2"])
            names = self.tensors(m[1])
            if len(names) > 3 and self.random.random() < 0.6:
                names = names[-3:]
            return self.random.choice(names)

        try:
            return FIELDS.sub(put, template)
        except IndexError:
            return None

    def glue(self) -> None:
        """One random line."""
        pool = self.random.choices((VALUES, VIEWS, WRITES, BLOCKS), (9, 8, 6, 0.5))[0]
        text, out = self.fill(self.random.choice(pool)), f"v{next(self.counter)}"
        if text is None:
            return
        if pool is BLOCKS:
            self.line(text.replace("{o}", out), out)
        elif pool is WRITES:
            if not any(self.overlaps(name) for name in NAME.findall(text)):
                self.line(text)
        else:
            self.line(f"{out} = {text}", out)

    def overlaps(self, name: str) -> bool:
        """Whether elements of a tensor share memory: eager allows few writes there, and Inductor gets them wrong."""
        value = eval(name, self.worlds[0])
        held = zip(value.stride(), value.shape) if isinstance(value, Tensor) else ()
        return any(step == 0 and size != 1 for step, size in held)

    def embed(self, pattern: Pattern) -> bool:
        """A pattern's line on values that fit, or on new inputs."""
        for _ in range(4):
            state = (list(self.held), list(self.modules))
            fields: dict[str, str] = {}
            for name, shape, dtype, role, below in pattern.operands:
                fields[name] = self._operand(shape, dtype, role, below, tuple(fields.values()))
            if pattern.module:
                fields["module"] = f"self.m{next(self.counter)}"
                self.modules.append((fields["module"][5:], pattern.module))
                self.refresh()
            outs = [f"p{next(self.counter)}" for _ in range(pattern.gives)]
            if self.line(f"{', '.join(outs)} = {pattern.text.format(**fields)}", outs[0]):
                self.kept += outs
                self.found.append(Found(pattern.name, pattern.finds, pattern.missed))
                return True
            self.held, self.modules = state
            self.refresh()
        return False

    def _operand(
        self, shape: tuple[str | int, ...], dtype: torch.dtype, role: str, below: int, taken: tuple[str, ...]
    ) -> str:
        wanted = [[s[d] if isinstance(d, str) else d for d in shape] for s in self.sizes]
        if role == "input" and self.random.random() < 0.5:
            fits = [n for n in self.tensors("f") if n not in taken and self._is(n, wanted, dtype)]
            if fits:
                return self.random.choice(fits)
        layout = self.random.choice(LAYOUTS) if role == "input" else "plain"
        return self.hold(shape=shape, dtype=dtype, layout=layout, kind=role, below=below)

    def _is(self, name: str, wanted: list[list[int]], dtype: torch.dtype) -> bool:
        values = [eval(name, w) for w in self.worlds]
        return all(v.dtype == dtype and list(v.shape) == shape for v, shape in zip(values, wanted))

    def start(self) -> None:
        """Inputs and buffers, some of them over one piece of memory."""
        for _ in range(self.random.randint(1, 3)):
            dtype = self.random.choices((torch.float32, torch.bfloat16, torch.int64, torch.bool), (7, 2, 1, 1))[0]
            self.hold(shape=self.random.choice(SHAPES), dtype=dtype, layout=self.random.choice(LAYOUTS))
        for _ in range(self.random.randint(0, 2)):
            shape = [d for d in self.random.choice(SHAPES) if not isinstance(d, str)]
            self.hold(shape=tuple(shape), layout=self.random.choice(LAYOUTS), kind="buffer")
        buffers = [h.name for h in self.held if h.kind == "buffer"]
        if buffers and self.random.random() < 0.3:
            self.hold(shape=(), alias=f"self.{self.random.choice(buffers)}", kind="buffer")
        if self.random.random() < 0.06:
            names = [h.name for h in self.held if h.kind == "input"]
            view = self.random.choice(["", "[...]", ".transpose(0, -1)"])
            self.hold(shape=(), alias=self.random.choice(names) + view)
        if self.random.random() < 0.3:
            self.floats.append((f"n{next(self.counter)}", self.random.choice([0.5, 1.25, -2.0])))
        self.refresh()

    def gives(self, text: str) -> bool:
        """Whether an expression has a value in both worlds."""
        try:
            return [eval(text, w) for w in self.worlds] != []
        except (IndexError, AttributeError, RuntimeError):
            return False

    def result(self) -> str:
        """What is returned: every pattern's values, and some of the rest."""
        picked = [self.fill(self.random.choice(RESULTS)) for _ in range(self.random.randint(1, 3))]
        made = [n for n in self.tensors("a") if n[0] == "v"]
        parts = [p for p in picked if p is not None and self.gives(p)] + self.kept
        parts += self.random.sample(made, min(len(made), 3))
        self.random.shuffle(parts)
        return ", ".join(parts) + ","


def write(seed: int, patterns: tuple[Pattern, ...] = (), lines: int = 8) -> Program:
    """The program of a seed, with the given patterns in it."""
    # experts show in what is chosen of them, and the modules around attention cannot be called without tokens
    w = Writer(seed, tokens=int(any(p.name.startswith(("experts", "attention")) for p in patterns)))
    w.start()
    places = sorted(w.random.randrange(lines) for _ in patterns)
    for at in range(lines):
        w.glue()
        for place, pattern in zip(places, patterns):
            if place == at:
                w.embed(pattern)
    order = [h.name for h in w.held if h.kind == "input"] + [name for name, _ in w.floats]
    w.random.shuffle(order)
    dynamic = w.random.choice([None, None, True])
    return Program(
        *(seed, w.sizes, tuple(w.held), tuple(w.modules), tuple(w.floats), tuple(w.steps), w.result()),
        *(tuple(order), dynamic, w.random.random() < 0.15, tuple(w.found), w.names),
    )
