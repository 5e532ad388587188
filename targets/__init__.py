"""Where programs run. One file a vendor; the rest of the package asks a target for its data and never names one."""

from __future__ import annotations

if __name__ != "deepinfer_compile.targets":
    raise ImportError(
        "import deepinfer_compile.targets; 'targets' at the repository root is the same package by another name"
    )

import torch

from deepinfer_compile.errors import UnknownTarget
from deepinfer_compile.kernels import Limits
from deepinfer_compile.targets.base import Target
from deepinfer_compile.targets.cpu import CPU
from deepinfer_compile.targets.nvidia import SM90, SM100

TARGETS: dict[str, Target] = {t.name: t for t in (CPU, SM90, SM100)}


def get_target(name: str) -> Target:
    """The target of that name. Raises UnknownTarget."""
    if name not in TARGETS:
        raise UnknownTarget(name=name, known=", ".join(sorted(TARGETS)))
    return TARGETS[name]


def device_target(device: torch.device) -> Target | None:
    """The target that a GPU of this machine is, or None if it is none of ours."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    return next((t for t in (SM90, SM100) if t.capability == capability), None)


def device_limits(device: torch.device) -> Limits | None:
    """The data of the target that a GPU of this machine is, or None if it is none of ours."""
    target = device_target(device)
    return target.limits if target is not None else None
