"""Decode steps as CUDA graphs: one per number of requests of a short ladder, captured when it is first needed.

A replay runs on tensors of its own, into which a step's inputs are copied at once, so that the host's part of a step
does not grow with the model; where tokens are chosen on the device, that is the end of the graph, and only ids come
back. A step with fewer requests than its graph is filled up with requests of length 0, whose tokens have no place in a
cache (slot -1), are attended by nobody and whose logits nobody reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.ops.sample import NUMBERS
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.drawing import Draw, Numbers
from deepinfer_compile.runtime.executor import ProgramRunner
from deepinfer_compile.runtime.kernel_blocks import StepState
from deepinfer_compile.runtime.pages import Ints

LADDER = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Numbers of requests for which graphs are captured. At most half of a graph's requests are there to fill it up."""

FIXED = ("rows", "query_start")
"""One token a request: the same in every step."""
_IDLE = {"slot_": -1, "context_hint": 1}
"""What inputs hold where there is no request: 0 if they are not named here, and no page (-1) in block tables."""


def bucket_of(requests: int) -> int | None:
    """Requests of the smallest graph that takes a step, None where none is large enough."""
    return next((size for size in LADDER if size >= requests), None)


class PackedInputs:
    """Every input of a step in one piece of memory, on the host and on the device, so that a step costs one copy.

    like: the inputs of some step. size: requests that there is room for. pages: columns of a block table.
    """

    def __init__(self, like: Mapping[str, Tensor], size: int, pages: int, device: torch.device) -> None:
        shapes = {name: _room(name, size, pages, held) for name, held in like.items()}
        bytes_of = {name: prod(shape) * like[name].element_size() for name, shape in shapes.items()}
        starts = dict(zip(bytes_of, accumulate((_aligned(n) for n in bytes_of.values()), initial=0)))
        total = sum(map(_aligned, bytes_of.values()))
        self._host = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._there = torch.empty(total, dtype=torch.uint8, device=device)
        # torch's indexing would cost more than the copy
        self._given: dict[str, NDArray[Any]] = {}
        self.inputs: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            piece = slice(starts[name], starts[name] + bytes_of[name])
            self._given[name] = self._host[piece].view(like[name].dtype).view(shape).numpy()
            self.inputs[name] = self._there[piece].view(like[name].dtype).view(shape)
        for name, view in self._given.items():
            if name in FIXED:
                view[:] = np.arange(len(view))
            else:
                view.fill(-1 if name.startswith("block_table") else _idle(name))
        self._there.copy_(self._host)

    def fill(self, given: Mapping[str, NDArray[Any]]) -> None:
        """Take a step's inputs, those that are not given stay; where there is no request, inputs are idle.

        The copy is ordered before later kernels; it must have ended before the next call.
        """
        for name, held in given.items():
            if name in FIXED:
                continue
            view = self._given[name]
            if name.startswith("block_table"):
                view[: held.shape[0], : held.shape[1]] = held
                continue
            count = held.shape[-1]
            view[..., :count] = held
            if count < view.shape[-1]:
                view[..., count:] = _idle(name)
        self._there.copy_(self._host, non_blocking=True)


def _idle(name: str) -> int:
    return _IDLE.get(name.rstrip("0123456789"), 0)


def _aligned(size: int) -> int:
    """Bytes to the next start that any type and any wide load may have."""
    return -(-size // 64) * 64


def _room(name: str, size: int, pages: int, held: Tensor) -> tuple[int, ...]:
    """The shape of an input for `size` requests."""
    if name.startswith("block_table"):
        return (size, pages)
    if name == "query_start":
        return (size + 1,)
    return (1, size) if held.dim() == 2 else (size,)


@dataclass(frozen=True)
class _Captured:
    """tokens: on the host, where they are when the replay has ended; none where nothing draws."""

    graph: Any
    packed: PackedInputs
    logits: Tensor
    tokens: Tensor | None


class DecodeGraphs:
    """Graphs of one program. max_model_len: the longest context, which sizes the block tables. state: what kernels
    are chosen by. draw: what chooses tokens at the end of a step, if anything does."""

    def __init__(
        self, program: ProgramRunner, device: torch.device, max_model_len: int, state: StepState, draw: Draw | None
    ) -> None:
        self.program, self.device, self.pages = program, device, -(-max_model_len // PAGE_SIZE)
        self.state, self.draw = state, draw
        self.captured: dict[int, _Captured] = {}
        self.running = False  # a step that nobody here has waited for
        self.pool: Any = None

    def run(self, given: Mapping[str, Tensor], numbers: Numbers | None = None) -> tuple[Tensor, Ints | None] | None:
        """Logits of a step of one token a request, and tokens drawn by `numbers`; None where no graph is large enough.

        given: on the host. Without numbers nothing is drawn that anyone gets to see.
        """
        requests = given["seq_len"].shape[0]
        size = bucket_of(requests)
        if size is None or given["rows"].shape[0] != requests:
            return None
        if size not in self.captured:
            self.captured[size] = self._capture(size, given)
        found = self.captured[size]
        stream = torch.cuda.current_stream(self.device)
        if self.running:
            stream.synchronize()
        self.running = True  # before it is, since an interrupt may come at any moment
        found.packed.fill({name: held.numpy() for name, held in given.items()} | dict(numbers or {}))
        found.graph.replay()
        if found.tokens is None or numbers is None:
            return found.logits[:requests], None
        stream.synchronize()
        self.running = False
        return found.logits[:requests], found.tokens[:requests].numpy().copy()

    def _capture(self, size: int, given: Mapping[str, Tensor]) -> _Captured:
        numbers = {name: torch.empty(1, dtype=dtype) for name, dtype in NUMBERS.items()} if self.draw else {}
        self.state.tokens = size  # also when fewer come first: the graph is kept
        packed = PackedInputs({**given, **numbers}, size, self.pages, self.device)
        tokens = torch.empty(size, dtype=torch.int64, pin_memory=True) if self.draw else None
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._step(packed, tokens)  # loads what is loaded at the first use, outside the graph
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits = self._step(packed, tokens)
        self.pool = self.pool or graph.pool()
        return _Captured(graph, packed, logits, tokens)

    def _step(self, packed: PackedInputs, tokens: Tensor | None) -> Tensor:
        logits = self.program.run(packed.inputs)
        if self.draw is not None and tokens is not None:
            drawn = self.draw.enqueue(logits, {name: packed.inputs[name] for name in NUMBERS})
            tokens.copy_(drawn, non_blocking=True)
        return logits
