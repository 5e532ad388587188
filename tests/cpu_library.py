"""Builds and loads the native CPU kernels once for the tests and benchmarks of this checkout."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path

import torch

from deepinfer_compile.ops.cpu import register_fakes
from deepinfer_compile.targets.cpu_kernels import build_kernels, host_isa


def isa() -> str:
    """The instruction set under test: $DEEPINFER_TEST_ISA, else the widest that this machine runs."""
    return os.environ.get("DEEPINFER_TEST_ISA") or host_isa()


@cache
def load() -> Path:
    """The library, built and loaded with its fake functions; operations are then in `torch.ops.deepinfer_cpu`."""
    path = build_kernels(Path(tempfile.mkdtemp(prefix="deepinfer-cpu-")), isa())
    torch.ops.load_library(str(path))
    register_fakes()
    return path
