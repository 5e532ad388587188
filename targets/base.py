"""What a target is: data that passes may ask, and the three things only it can do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from torch.fx import GraphModule

from deepinfer_compile.kernels import Limits
from deepinfer_compile.passbase import Pass


@dataclass(frozen=True)
class Variant:
    """What was built for one target, as the manifest stores it.

    requires: what the running machine must offer (compared by the loader); `device` is the torch device type, cpu if it
    is not named. blocks: block hash -> file in the bundle. kernels: kernel hash -> its record in the bundle, where
    block files name kernels. sampler: the kernel of these that chooses tokens from logits. libraries: shared libraries
    to load first. files: bundle path -> file on this machine. seconds: compile times. tuning: device -> kernel hash ->
    the choices that were taken from a store of measurements.
    """

    target: str
    native: bool
    requires: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    kernels: dict[str, str] = field(default_factory=dict)
    sampler: str = ""
    libraries: tuple[str, ...] = ()
    files: dict[str, Path] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tuning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """What to build: lowered blocks by hash, and by the same hash the programs that call each. isa: as in `prepare`.
    tuned: folder of a store whose configurations come before the defaults. logits: what the programs give, [N, vocab],
    without data."""

    blocks: dict[str, GraphModule]
    programs: dict[str, tuple[str, ...]]
    isa: str | None = None
    tuned: str | None = None
    logits: Tensor | None = None


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

    def build(self, job: Job, progress: Callable[[str], None]) -> Variant:
        """Compile to native code. Raises NativeBuildFailed, TargetUnavailable."""
        ...


__all__ = ["Job", "Limits", "Target", "Variant"]
