"""Choosing tokens where the logits are: one kernel call, the parameters of all rows in one copy, and ids back.

A row's token depends on that row alone, as with the sampler of the host, and is the same token but for what rounding
decides. Which of the two chooses is a matter of the request, never of its neighbours, so that a seed stays a seed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.ops.sample import NUMBERS
from deepinfer_compile.runtime.kernel_blocks import KernelRunner
from deepinfer_compile.runtime.pages import Ints

Numbers = Mapping[str, NDArray[Any]]
"""Parameters of the draw, one number a row, by the names and types of `ops.sample.NUMBERS`."""
WIDEST_FIRST = sorted(NUMBERS, key=lambda name: -NUMBERS[name].itemsize)
"""So that each part of one piece of memory starts where its type may."""


class Draw(Protocol):
    """Something that chooses tokens from logits on a device."""

    def __call__(self, logits: Tensor, numbers: Numbers) -> Ints:
        """A token per row of `logits` [N, vocab], as the operation `sample` says; -1 without a finite maximum."""
        ...

    def enqueue(self, logits: Tensor, numbers: Mapping[str, Tensor], ids: Tensor) -> None:
        """The same on the device, into ids i64[N], without waiting for it."""
        ...


class KernelDraw:
    """A kernel of `sample` as a `Draw`."""

    def __init__(self, kernel: KernelRunner) -> None:
        self.kernel = kernel

    def __call__(self, logits: Tensor, numbers: Numbers) -> Ints:
        rows = len(logits)
        packed = np.concatenate([numbers[name].view(np.uint8) for name in WIDEST_FIRST])
        there, at, parts = torch.from_numpy(packed).to(logits.device), 0, {}
        for name in WIDEST_FIRST:
            size = rows * NUMBERS[name].itemsize
            parts[name] = there[at : at + size].view(NUMBERS[name])
            at += size
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        self.enqueue(logits, parts, ids)
        return np.array(ids.cpu().numpy(), dtype=np.int64)

    def enqueue(self, logits: Tensor, numbers: Mapping[str, Tensor], ids: Tensor) -> None:
        self.kernel({"logits": logits, **numbers}, (ids,))
