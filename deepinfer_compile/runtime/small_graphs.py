"""Small steps of a program that takes any number of tokens a request, as CUDA graphs.

What a resumed conversation has to compute again is a page of rows or less, and launching a step's kernels one by one
takes longer than they run. A graph is for so many tokens and so many pages a request at most, and is captured when it
is first needed. A step with fewer tokens is filled up with requests of one token and length 0, whose rows have no place
in a cache (slot -1) and are read by nobody. So a graph has as many requests as tokens, the last of which may have none,
and takes every step of its size, whatever requests it is of.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.cuda_graphs import DecodeGraphs, PackedInputs, captured
from deepinfer_compile.runtime.drawing import Draw
from deepinfer_compile.runtime.executor import ProgramRunner
from deepinfer_compile.runtime.kernel_blocks import StepState

SIZES = (16, 32, 64, 128, 256, 512)
"""Numbers of tokens for which graphs are captured."""
FIXED = ("kept",)
"""All tokens: a step that keeps fewer of them is no small one."""
NARROWEST, WIDER = 16, 4
"""Columns of the narrowest block table, and how many times wider the next one is."""


@dataclass(frozen=True)
class _Captured:
    graph: Any
    packed: PackedInputs
    logits: Tensor


class SmallGraphs:
    """Graphs of one program. max_model_len: the longest context. state: what kernels are chosen by."""

    def __init__(self, program: ProgramRunner, device: torch.device, max_model_len: int, state: StepState) -> None:
        self.program, self.device, self.state = program, device, state
        self.pages = -(-max_model_len // PAGE_SIZE)
        self.captured: dict[tuple[int, int], _Captured] = {}
        self.pool: Any = None

    def run(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of a step, good until the next one; None where it is not small. given: on the host."""
        tokens = given["input_ids"].shape[-1]
        size = next((size for size in SIZES if size >= tokens), None)
        if size is None or ("kept" in given and given["kept"].shape[0] != tokens):
            return None
        key = size, self._columns(given)
        # what was started before may still read the inputs, and nothing else is worth starting beside it
        torch.cuda.current_stream(self.device).synchronize()
        if key not in self.captured:
            self.captured[key] = self._capture(*key, given)
        one = self.captured[key]
        one.packed.fill(filled_up(given, size))
        one.graph.replay()
        return one.logits[: given["rows"].shape[0]]

    def _columns(self, given: Mapping[str, Tensor]) -> int:
        needed = max(held.shape[1] for name, held in given.items() if name.startswith("block_table"))
        columns = NARROWEST
        while columns < needed:
            columns *= WIDER
        return max(needed, min(columns, self.pages))

    def _capture(self, size: int, columns: int, given: Mapping[str, Tensor]) -> _Captured:
        self.state.tokens = size  # also when fewer come first: the graph is kept
        packed = PackedInputs(given, size, columns, self.device, FIXED)
        packed.fill(filled_up(given, size))
        torch.cuda.current_stream(self.device).synchronize()
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            self.program.run(packed.inputs)  # loads what is loaded at the first use, outside the graph
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with captured(graph, self.pool):
            logits = self.program.run(packed.inputs)
        self.pool = self.pool or graph.pool()
        return _Captured(graph, packed, logits)


@dataclass(frozen=True)
class CudaGraphs:
    """`Graphs` of the programs of a bundle. waiting: those that wait for the device and cannot be captured."""

    device: torch.device
    max_model_len: int
    state: StepState
    draw: Draw | None
    waiting: Collection[str]

    def decode(self, program: ProgramRunner) -> DecodeGraphs | None:
        """See `Graphs`."""
        if "decode" in self.waiting:
            return None
        return DecodeGraphs(program, self.device, self.max_model_len, self.state, self.draw)

    def small(self, name: str, program: ProgramRunner) -> SmallGraphs | None:
        """See `Graphs`."""
        return None if name in self.waiting else SmallGraphs(program, self.device, self.max_model_len, self.state)


def filled_up(given: Mapping[str, Tensor], size: int) -> dict[str, NDArray[Any]]:
    """A step's inputs, where requests start filled up to `size` requests: one for each token that is missing."""
    arrays = {name: held.numpy() for name, held in given.items()}
    starts = arrays["query_start"]
    more = np.arange(1, size + 2 - len(starts), dtype=starts.dtype)
    arrays["query_start"] = np.concatenate([starts, np.minimum(starts[-1] + more, size)])
    return arrays


__all__ = ["SIZES", "CudaGraphs", "SmallGraphs", "filled_up"]
