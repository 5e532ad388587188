"""Choosing tokens where the logits are: one kernel call, the parameters of all rows in one copy, and ids back.

A row's token depends on that row alone, as with the sampler of the host, and is the same token but for what rounding
decides. Which of the two chooses is a matter of the request, never of its neighbours, so that a seed stays a seed.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.kernel_blocks import KernelRunner
from deepinfer_compile.runtime.pages import Ints

Floats = NDArray[np.float32]


class Draw(Protocol):
    """Something that chooses tokens from logits on a device."""

    def __call__(
        self,
        logits: Tensor,
        temperature: Floats,
        min_p: Floats,
        top_k: NDArray[np.int32],
        top_p: Floats,
        noise: NDArray[np.float64],
    ) -> Ints:
        """A token per row of `logits` [N, vocab], as the operation `sample` says; -1 without a finite maximum."""
        ...


class KernelDraw:
    """A kernel of `sample` as a `Draw`."""

    def __init__(self, kernel: KernelRunner) -> None:
        self.kernel = kernel

    def __call__(
        self,
        logits: Tensor,
        temperature: Floats,
        min_p: Floats,
        top_k: NDArray[np.int32],
        top_p: Floats,
        noise: NDArray[np.float64],
    ) -> Ints:
        rows = len(noise)
        # the widest first, so that each part starts where its type may
        packed = np.concatenate([part.view(np.int32) for part in (noise, temperature, min_p, top_k, top_p)])
        there = torch.from_numpy(packed).to(logits.device)
        floats = [there[at * rows : (at + 1) * rows].view(torch.float32) for at in (2, 3, 5)]
        operands = {"logits": logits, "noise": there[: 2 * rows].view(torch.float64)}
        operands |= dict(zip(("temperature", "min_p", "top_p"), floats))
        operands["top_k"] = there[4 * rows : 5 * rows]
        ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
        self.kernel(operands, (ids,))
        return np.array(ids.cpu().numpy(), dtype=np.int64)
