"""What a pass is: a frozen dataclass whose fields are its options, with declared needs, makes and breaks.

The contract. A pass gets its own copy of the program and may edit it freely; nobody sees it half done. It reads only
the program, the context and its fields. Every candidate ends as `ctx.claim` (and is then rewritten) or `ctx.miss` with
a reason; silence about a candidate is a bug. It never checks, times, logs or dumps: the pipeline does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from torch.fx import GraphModule, Node

from deepinfer_compile.errors import BadOption, UnknownOption, UnknownPass
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import place_of
from deepinfer_compile.program import Program


@dataclass(frozen=True)
class Remark:
    """One candidate's fate. kind: applied or missed. layers: the layers the graph stands for."""

    kind: Literal["applied", "missed"]
    graph: str
    node: str
    reason: str
    place: str
    layers: tuple[int, ...]


@dataclass
class PassContext:
    """What a pass may read and where it reports.

    limit: how many claims may still be granted (bisection caps it); None is no cap.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    limit: int | None = None
    remarks: list[Remark] = field(default_factory=list)
    graph: str = ""
    layers: tuple[int, ...] = ()

    def claim(self, node: Node, reason: str) -> bool:
        """Announce that `node` will be rewritten; False means leave it (bisection has capped the pass)."""
        if self.limit is not None:
            if self.limit <= 0:
                return False
            self.limit -= 1
        self.remarks.append(Remark("applied", self.graph, node.name, reason, place_of(node), self.layers))
        return True

    def miss(self, node: Node, reason: str) -> None:
        """Record that a candidate was left alone and why."""
        self.remarks.append(Remark("missed", self.graph, node.name, reason, place_of(node), self.layers))


class BlockPass(Protocol):
    """A pass over each block graph (`level = "layer"`)."""

    name: ClassVar[str]
    level: ClassVar[str]
    needs: ClassVar[frozenset[Fact]]
    makes: ClassVar[frozenset[Fact]]
    breaks: ClassVar[frozenset[Fact]]

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        """Edit the block in place."""


@runtime_checkable
class ProgramPass(Protocol):
    """A pass over the whole program (`level = "skeleton"`)."""

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        """Return the program to go on with; the given one may be edited."""
        ...


Pass = Any
"""A BlockPass or a ProgramPass; both carry name, level, needs, makes, breaks."""

NONE: frozenset[Fact] = frozenset()
_registry: dict[str, type] = {}
T = TypeVar("T", bound=type)


def register(cls: T) -> T:
    """Make a pass known by its name. A second pass of that name is an error."""
    name = cls.name  # type: ignore[attr-defined]
    if name in _registry:
        raise ValueError(f"pass {name!r} is registered twice")
    if not dataclasses.is_dataclass(cls):
        raise ValueError(f"pass {name!r} must be a dataclass")
    _registry[name] = cls
    return cls


def registered() -> dict[str, type]:
    """All passes by name."""
    import deepinfer_compile.passes  # noqa: F401  (registers every sibling)

    return dict(_registry)


def make(name: str, **options: Any) -> Pass:
    """A pass from its name and options; unknown names and options are errors."""
    known = registered()
    if name not in known:
        raise UnknownPass(name=name, known=", ".join(sorted(known)))
    fields = {f.name for f in dataclasses.fields(known[name])}
    for key in options:
        if key not in fields:
            raise UnknownOption(name=f"{name}.{key}", known=", ".join(sorted(fields)) or "none")
    return known[name](**options)


def options_of(p: Pass) -> dict[str, Any]:
    """The options of a pass as plain data."""
    return {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}


def describe(p: Pass) -> str:
    """`name{option=value}`, only options that differ from their default."""
    odd = {
        f.name: getattr(p, f.name)
        for f in dataclasses.fields(p)
        if f.default is dataclasses.MISSING or getattr(p, f.name) != f.default
    }
    name: str = p.name
    return name + ("{" + ",".join(f"{k}={v}" for k, v in odd.items()) + "}" if odd else "")


def parse(text: str) -> Pass:
    """The inverse of `describe` for options that are numbers, booleans or words."""
    name, _, rest = text.partition("{")
    options: dict[str, Any] = {}
    for part in rest.rstrip("}").split(",") if rest else []:
        key, _, raw = part.partition("=")
        options[key.strip()] = _literal(raw.strip(), text)
    return make(name, **options)


def _literal(raw: str, text: str) -> Any:
    words: dict[str, Any] = {"True": True, "true": True, "False": False, "false": False, "None": None}
    if raw in words:
        return words[raw]
    for convert in (int, float):
        try:
            return convert(raw)
        except ValueError:
            continue
    if not raw.replace("_", "").replace("-", "").isalnum():
        raise BadOption(name=text, value=raw, reason="not a number, boolean or word", fix="write name{key=value,...}")
    return raw


def each_block(program: Program, ctx: PassContext) -> Iterator[GraphModule]:
    """Every block of a program, with the context set to it."""
    for name, gm in program.blocks.items():
        ctx.graph, ctx.layers = name, tuple(program.layers_of(name))
        yield gm


Observer = Callable[[Pass, Program, Program, "Any"], None]
"""Called after every pass with (pass, program before, program after, record)."""
