"""Decode steps as CUDA graphs: one per number of requests of a short ladder, captured when it is first needed.

A replay runs on tensors of its own, into which a step's inputs are copied, so that the host's part of a step does not
grow with the model. A step with fewer requests than its graph is filled up with requests of length 0, whose tokens have
no place in a cache (slot -1), are attended by nobody and whose logits nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.runtime.executor import ProgramRunner
from deepinfer_compile.runtime.pages import pages_for

LADDER = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def bucket_of(requests: int) -> int | None:
    """Requests of the smallest graph that holds as many, None above the ladder."""
    return next((size for size in LADDER if size >= requests), None)


@dataclass(frozen=True)
class _Captured:
    graph: Any
    inputs: dict[str, Tensor]
    logits: Tensor


class DecodeGraphs:
    """The graphs of one program, which must not wait for the device. max_model_len: longest context of a request."""

    def __init__(self, program: ProgramRunner, device: torch.device, max_model_len: int) -> None:
        self.program, self.device, self.pages = program, device, pages_for(max_model_len)
        self.captured: dict[int, _Captured] = {}
        self.pool: Any = None

    def run(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of a step of one token a request, or None where no graph is large enough. given: on any device."""
        requests = given["seq_len"].shape[0]
        size = bucket_of(requests)
        if size is None or given["rows"].shape[0] != requests:
            return None
        if size not in self.captured:
            self.captured[size] = self._capture(size, given)
        found = self.captured[size]
        for name, held in found.inputs.items():
            _fill(name, held, given[name])
        found.graph.replay()
        return found.logits[:requests]

    def _capture(self, size: int, given: Mapping[str, Tensor]) -> _Captured:
        inputs = {name: self._room(name, size, held) for name, held in given.items()}
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self.program.run(inputs)  # loads what is loaded at the first use, outside the graph
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self.program.run(inputs)
        self.pool = self.pool or graph.pool()
        return _Captured(graph, inputs, logits)

    def _room(self, name: str, size: int, held: Tensor) -> Tensor:
        """An input for `size` requests, all of them of length 0."""
        if name.startswith("block_table"):
            return torch.full((size, self.pages), -1, dtype=held.dtype, device=self.device)
        if name in ("rows", "query_start"):
            count = size + (name == "query_start")
            return torch.arange(count, dtype=held.dtype, device=self.device)
        shape = (1, size) if held.dim() == 2 else (size,)
        return torch.full(shape, _IDLE.get(name.rstrip("0123456789"), 0), dtype=held.dtype, device=self.device)


_IDLE = {"slot_": -1, "context_hint": 1}
"""What inputs hold where there is no request; 0 if they are not named here."""


def _fill(name: str, room: Tensor, held: Tensor) -> None:
    """Copy a step's input, and make idle what is left."""
    if name in ("rows", "query_start"):
        return  # one token a request: the same in every step
    if name.startswith("block_table"):
        room[: held.shape[0], : held.shape[1]].copy_(held, non_blocking=True)
        return
    count = held.shape[-1]
    room[..., :count].copy_(held, non_blocking=True)
    room[..., count:].fill_(_IDLE.get(name.rstrip("0123456789"), 0))
