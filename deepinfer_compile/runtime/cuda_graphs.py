"""Decode steps as CUDA graphs: one per number of requests of a short ladder, captured when it is first needed.

A replay runs on tensors of its own, into which a step's inputs are copied at once, so that the host's part of a step
does not grow with the model; where tokens are chosen on the device, that is the end of the graph, and only ids come
back. The chosen tokens are also left where the next replay reads its input ids, so that a step that follows can start
before the host has seen them. A step with fewer requests than its graph is filled up with requests of length 0, whose
tokens have no place in a cache (slot -1), are attended by nobody and whose logits nobody reads.
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

FED = "input_ids"
"""What a step that follows finds on the device."""
TURNS = 2
"""Steps that can be under way at a time."""
FIXED = ("rows", "query_start")
"""One token a request: the same in every step."""
_IDLE = {"slot_": -1, "context_hint": 1}
"""What inputs hold where there is no request: 0 if they are not named here, and no page (-1) in block tables."""


def bucket_of(requests: int) -> int | None:
    """Requests of the smallest graph that takes a step, None where none is large enough."""
    return next((size for size in LADDER if size >= requests), None)


class PackedInputs:
    """Every input of a step in one piece of memory, on the host and on the device, so that a step costs one copy.

    On the host there are TURNS of them, since the copy of a step that is under way may not have begun.
    like: the inputs of some step, `FED` first. size: requests that there is room for. pages: columns of a block table.
    """

    def __init__(self, like: Mapping[str, Tensor], size: int, pages: int, device: torch.device) -> None:
        shapes = {name: _room(name, size, pages, held) for name, held in like.items()}
        bytes_of = {name: prod(shape) * like[name].element_size() for name, shape in shapes.items()}
        starts = dict(zip(bytes_of, accumulate((_aligned(n) for n in bytes_of.values()), initial=0)))
        total = sum(map(_aligned, bytes_of.values()))
        if starts[FED] != 0:
            raise AssertionError(f"{FED} is not the first input")
        there = torch.empty(total, dtype=torch.uint8, device=device)
        pieces = {name: slice(start, start + bytes_of[name]) for name, start in starts.items()}
        self.inputs = {name: there[piece].view(like[name].dtype).view(shapes[name]) for name, piece in pieces.items()}
        self._turns = tuple(_Turn(like, shapes, pieces, there, _aligned(bytes_of[FED])) for _ in range(TURNS))
        self._next = 0
        self._turns[0].send(following=False)

    def fill(self, given: Mapping[str, NDArray[Any]], *, following: bool = False) -> int:
        """Take a step's inputs, those that are not given stay; where there is no request, inputs are idle.

        following: all but `FED`, which is on the device already. Waits until the step before the last has its inputs,
        and not for the copy, which is ordered before later kernels. Returns which turn it was.
        """
        at = self._next
        self._next = (at + 1) % TURNS
        turn = self._turns[at]
        turn.wait()
        for name, held in given.items():
            if name not in FIXED and not (following and name == FED):
                turn.take(name, held)
        turn.send(following=following)
        return at


class _Turn:
    """The host's side of one step's inputs. there: all inputs on the device; `FED` is its first `fed` bytes."""

    def __init__(
        self,
        like: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        pieces: Mapping[str, slice],
        there: Tensor,
        fed: int,
    ) -> None:
        self._on_gpu = there.device.type == "cuda"
        here = torch.empty(len(there), dtype=torch.uint8, pin_memory=self._on_gpu)
        self._all, self._unfed = (there, here), (there[fed:], here[fed:])
        self._sent = torch.cuda.Event() if self._on_gpu else None
        self._stream: Any = None
        # torch's indexing would cost more than the copy
        self._given: dict[str, NDArray[Any]] = {
            name: here[piece].view(like[name].dtype).view(shapes[name]).numpy() for name, piece in pieces.items()
        }
        for name, view in self._given.items():
            if name in FIXED:
                view[:] = np.arange(len(view))
            else:
                view.fill(-1 if name.startswith("block_table") else _idle(name))

    def wait(self) -> None:
        """Until the last copy is over, also one after which an interrupt came."""
        if self._stream is not None:
            self._stream.synchronize()
            self._stream = None
        elif self._sent is not None:
            self._sent.synchronize()

    def take(self, name: str, held: NDArray[Any]) -> None:
        view = self._given[name]
        if name.startswith("block_table"):
            view[: held.shape[0], : held.shape[1]] = held
            return
        count = held.shape[-1]
        view[..., :count] = held
        if count < view.shape[-1]:
            view[..., count:] = _idle(name)

    def send(self, *, following: bool) -> None:
        there, here = self._unfed if following else self._all
        if self._sent is None:
            there.copy_(here)
            return
        self._stream = torch.cuda.current_stream(there.device)
        there.copy_(here, non_blocking=True)
        self._sent.record()
        self._stream = None


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
    """drawn: where the device leaves the chosen tokens, none where nothing draws.

    here: on the host, for the tokens of a step and of the one that follows it; ended: recorded behind each copy.
    """

    graph: Any
    packed: PackedInputs
    logits: Tensor
    drawn: Tensor | None
    here: tuple[Tensor, ...] = ()
    ended: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Replay:
    """A replay under way. logits: good until the next one starts."""

    logits: Tensor
    here: Tensor
    ended: Any

    def tokens(self) -> Ints:
        """See `Flight`."""
        self.ended.synchronize()
        found: Ints = self.here.numpy().copy()
        return found


class DecodeGraphs:
    """Graphs of one program. max_model_len: the longest context, which sizes the block tables. state: what kernels
    are chosen by. draw: what chooses tokens at the end of a step, if anything does."""

    def __init__(
        self, program: ProgramRunner, device: torch.device, max_model_len: int, state: StepState, draw: Draw | None
    ) -> None:
        self.program, self.device, self.pages = program, device, -(-max_model_len // PAGE_SIZE)
        self.state, self.draw = state, draw
        self.captured: dict[int, _Captured] = {}
        self.pool: Any = None

    def run(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of a step of one token a request; None where no graph is large enough. given: on the host."""
        found = self._of(given)
        if found is None:
            return None
        found.packed.fill(_arrays(given))
        found.graph.replay()
        return found.logits[: given["seq_len"].shape[0]]

    def start(self, given: Mapping[str, Tensor], numbers: Numbers, *, following: bool = False) -> Replay | None:
        """Start such a step, whose tokens are drawn by `numbers`; None where none draws or no graph is large enough.

        following: the input ids are the tokens of the step started last, of as many requests; at most two are under
        way at a time.
        """
        found = self._of(given)
        if found is None or found.drawn is None:
            return None
        turn = found.packed.fill(_arrays(given) | dict(numbers), following=following)
        found.graph.replay()
        here, ended = found.here[turn], found.ended[turn]
        here.copy_(found.drawn, non_blocking=True)
        ended.record()
        requests = given["seq_len"].shape[0]
        return Replay(found.logits[:requests], here[:requests], ended)

    def _of(self, given: Mapping[str, Tensor]) -> _Captured | None:
        requests = given["seq_len"].shape[0]
        size = bucket_of(requests)
        if size is None or given["rows"].shape[0] != requests:
            return None
        if size not in self.captured:
            self.captured[size] = self._capture(size, given)
        return self.captured[size]

    def _capture(self, size: int, given: Mapping[str, Tensor]) -> _Captured:
        numbers = {name: torch.empty(1, dtype=dtype) for name, dtype in NUMBERS.items()} if self.draw else {}
        self.state.tokens = size  # also when fewer come first: the graph is kept
        packed = PackedInputs({**given, **numbers}, size, self.pages, self.device)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            self._step(packed)  # loads what is loaded at the first use, outside the graph
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            logits, drawn = self._step(packed)
        self.pool = self.pool or graph.pool()
        if drawn is None:
            return _Captured(graph, packed, logits, None)
        here = tuple(torch.empty(size, dtype=torch.int64, pin_memory=True) for _ in range(TURNS))
        return _Captured(graph, packed, logits, drawn, here, tuple(torch.cuda.Event() for _ in range(TURNS)))

    def _step(self, packed: PackedInputs) -> tuple[Tensor, Tensor | None]:
        logits = self.program.run(packed.inputs)
        if self.draw is None:
            return logits, None
        drawn = self.draw.enqueue(logits, {name: packed.inputs[name] for name in NUMBERS})
        # a row without a finite maximum has no token, and yet the next step must be able to look its input up
        torch.clamp(drawn, min=0, out=packed.inputs[FED].view(-1))
        return logits, drawn


def _arrays(given: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: held.numpy() for name, held in given.items()}
