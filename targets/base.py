"""What a target is: data that passes may ask, and the three things only it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch.fx import GraphModule

from deepinfer_compile.passbase import Pass


@dataclass(frozen=True)
class Limits:
    """Data about a target. dtypes: weight types it computes in. devices: torch device type that runs it."""

    dtypes: tuple[str, ...]
    device: str


@dataclass(frozen=True)
class Variant:
    """What was built for one target, as the manifest stores it.

    requires: what the running machine must offer (compared by the loader). blocks: block hash -> file in the bundle.
    libraries: shared libraries to load first. files: bundle path -> file on this machine. seconds: compile times.
    """

    target: str
    native: bool
    requires: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    libraries: tuple[str, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Target(Protocol):
    """One place where programs run."""

    @property
    def name(self) -> str:
        """What users call it."""
        ...

    @property
    def limits(self) -> Limits:
        """Its data."""
        ...

    def missing(self) -> str | None:
        """Why native code cannot be built here, in words a user can act on; None if it can."""
        ...

    def prepare(self, isa: str | None) -> tuple[Pass, ...]:
        """Make the target's kernel operations known to torch; the passes that bind a program's ops to them.

        isa: the instruction set to build for, where the target has several; None is this machine's.
        """
        ...

    def build(
        self, blocks: dict[str, GraphModule], options: dict[str, Any], progress: Callable[[str], None]
    ) -> Variant:
        """Compile lowered blocks (by hash) to native code."""
        ...
