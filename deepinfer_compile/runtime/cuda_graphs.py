"""Decode steps as CUDA graphs: one per number of requests of a short ladder, captured when it is first needed.

A replay runs on tensors of its own, into which a step's inputs are copied at once, so that the host's part of a step
does not grow with the model; where tokens are chosen on the device, that is the end of the graph, and only ids come
back. The chosen tokens are also left where the next replay reads its input ids, so that a step that follows can start
before the host has seen them; its other inputs are copied meanwhile, for the second of two graphs. A step with fewer
requests than its graph is filled up with requests of length 0, whose tokens have no place in a cache (slot -1), are
attended by nobody and whose logits nobody reads.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
"""Graphs of a size. They take turns, so that a step's inputs can be copied while the step before runs on its own."""
FIXED = ("rows", "query_start")
"""One token a request: the same in every step."""
SPARED = 64 << 10
"""Bytes of block tables that nobody reads, from which on they are left out of a copy at the price of a copy a table."""
_IDLE = {"slot_": -1, "context_hint": 1}
"""What inputs hold where there is no request: 0 if they are not named here, and no page (-1) in block tables."""


@contextmanager
def captured(graph: Any, pool: Any) -> Iterator[None]:
    """Capture what the block starts. Nothing is collected meanwhile, since to let go of another graph ends a capture;
    what other threads do with the device does not."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            yield
    finally:
        if collecting:
            gc.enable()


def bucket_of(requests: int) -> int | None:
    """Requests of the smallest graph that takes a step, None where none is large enough."""
    return next((size for size in LADDER if size >= requests), None)


class PackedInputs:
    """Every input of a step in one piece of memory, on the host and on the device, so that a step costs one copy; one
    more for each block table, where these are wide and most of their rows belong to nobody.

    like: the inputs of some step, `FED` first. size: requests (and tokens) that there is room for. pages: columns of a
    block table. fixed: inputs that are 0, 1, 2 and so on in every step.
    """

    def __init__(
        self,
        like: Mapping[str, Tensor],
        size: int,
        pages: int,
        device: torch.device,
        fixed: tuple[str, ...] = FIXED,
    ) -> None:
        self.fixed = fixed
        names = sorted(like, key=_is_table)
        shapes = {name: _room(name, size, pages, like[name]) for name in names}
        bytes_of = {name: prod(shape) * like[name].element_size() for name, shape in shapes.items()}
        starts = dict(zip(bytes_of, accumulate((_aligned(n) for n in bytes_of.values()), initial=0)))
        total = sum(map(_aligned, bytes_of.values()))
        if starts[FED] != 0:
            raise AssertionError(f"{FED} is not the first input")
        here = torch.empty(total, dtype=torch.uint8, pin_memory=device.type == "cuda")
        there = torch.empty(total, dtype=torch.uint8, device=device)
        fed, head = _aligned(bytes_of[FED]), sum(_aligned(n) for name, n in bytes_of.items() if not _is_table(name))
        self._all, self._unfed = (there, here), (there[fed:], here[fed:])
        self._heads = (there[:head], here[:head]), (there[fed:head], here[fed:head])
        # torch's indexing would cost more than the copy
        self._given: dict[str, NDArray[Any]] = {}
        self.inputs: dict[str, Tensor] = {}
        for name, shape in shapes.items():
            piece = slice(starts[name], starts[name] + bytes_of[name])
            self._given[name] = here[piece].view(like[name].dtype).view(shape).numpy()
            self.inputs[name] = there[piece].view(like[name].dtype).view(shape)
        tables = [slice(starts[name], starts[name] + bytes_of[name]) for name in names if _is_table(name)]
        self._tables = [(there[piece].view(size, -1), here[piece].view(size, -1)) for piece in tables]
        self._row_bytes = sum(table.shape[1] for table, _ in self._tables)
        self._size = size
        for name, view in self._given.items():
            if name in fixed:
                view[:] = np.arange(len(view))
            else:
                view.fill(-1 if _is_table(name) else _idle(name))
        there.copy_(here)

    def fill(self, given: Mapping[str, NDArray[Any]], *, following: bool = False) -> int:
        """Take a step's inputs, those that are not given stay; where there is no request, inputs are idle, and what
        block tables hold is not known. How many bytes are copied.

        following: all but `FED`, which the step before leaves on the device. The copy is ordered before what comes
        later on the current stream; it must have ended before the next call.
        """
        rows = 0
        for name, held in given.items():
            if name in self.fixed or (following and name == FED):
                continue
            view = self._given[name]
            if _is_table(name):
                rows = max(rows, held.shape[0])
                view[: held.shape[0], : held.shape[1]] = held
                continue
            count = held.shape[-1]
            view[..., :count] = held
            if count < view.shape[-1]:
                view[..., count:] = _idle(name)
        parts = [self._unfed if following else self._all]
        if (self._size - rows) * self._row_bytes >= SPARED:
            parts = [self._heads[following], *((there[:rows], here[:rows]) for there, here in self._tables)]
        for there, here in parts:
            there.copy_(here, non_blocking=True)
        return sum(there.nbytes for there, _ in parts)


def _is_table(name: str) -> bool:
    return name.startswith("block_table")


def _idle(name: str) -> int:
    return _IDLE.get(name.rstrip("0123456789"), 0)


def _aligned(size: int) -> int:
    """Bytes to the next start that any type and any wide load may have."""
    return -(-size // 64) * 64


def _room(name: str, size: int, pages: int, held: Tensor) -> tuple[int, ...]:
    """The shape of an input for `size` requests."""
    if _is_table(name):
        return (size, pages)
    if name == "query_start":
        return (size + 1,)
    return (1, size) if held.dim() == 2 else (size,)


@dataclass(frozen=True)
class _Turn:
    """One graph with inputs and results of its own. ids: the chosen tokens on the device and on the host; none where
    nothing draws. sent, done, ended: recorded behind the copy of its inputs, its last replay and the copy of
    its ids."""

    graph: Any
    packed: PackedInputs
    logits: Tensor
    ids: tuple[Tensor, Tensor] | None
    sent: Any
    done: Any
    ended: Any


@dataclass(frozen=True)
class Replay:
    """A replay under way. logits: good until its turn comes again."""

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
        self.captured: dict[int, deque[_Turn]] = {}
        self.pool: Any = None
        self.into, self.out = (torch.cuda.Stream(device) for _ in range(2))
        self.done: Any = None  # behind the last replay of any graph
        self.settled = True  # no interrupt came while a step was started

    def run(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of a step of one token a request; None where no graph is large enough. given: on the host."""
        turns = self._of(given)
        if turns is None:
            return None
        turn = self._replay(turns, _arrays(given), following=False)
        self.settled = True
        return turn.logits[: given["seq_len"].shape[0]]

    def start(self, given: Mapping[str, Tensor], numbers: Numbers, *, following: bool = False) -> Replay | None:
        """Start such a step, whose tokens are drawn by `numbers`; None where none draws or no graph is large enough.

        following: the input ids are the tokens of the step started last, of as many requests; at most two are under
        way at a time.
        """
        turns = self._of(given)
        if turns is None or turns[0].ids is None:
            return None
        drawn, here = turns[0].ids
        turn = self._replay(turns, _arrays(given) | dict(numbers), following=following)
        self.out.wait_event(turn.done)
        with torch.cuda.stream(self.out):
            here.copy_(drawn, non_blocking=True)
            turn.ended.record()
        self.settled = True
        requests = given["seq_len"].shape[0]
        return Replay(turn.logits[:requests], here[:requests], turn.ended)

    def _replay(self, turns: deque[_Turn], arrays: dict[str, NDArray[Any]], *, following: bool) -> _Turn:
        """Copy the inputs beside whatever runs, then replay the graph whose turn it is."""
        stream = torch.cuda.current_stream(self.device)
        if not self.settled:
            torch.cuda.synchronize(self.device)
        self.settled = False
        turn = turns[0]
        turns.rotate(-1)
        turn.sent.synchronize()
        # a step that follows is fed by the one under way; other ids must not be written before that one has ended
        before = turn.done if following else self.done
        if before is not None:
            self.into.wait_event(before)
        with torch.cuda.stream(self.into):
            turn.packed.fill(arrays, following=following)
            turn.sent.record()
        stream.wait_event(turn.sent)
        turn.graph.replay()
        turn.done.record(stream)
        self.done = turn.done
        return turn

    def _of(self, given: Mapping[str, Tensor]) -> deque[_Turn] | None:
        requests = given["seq_len"].shape[0]
        size = bucket_of(requests)
        if size is None or given["rows"].shape[0] != requests:
            return None
        if size not in self.captured:
            self.captured[size] = self._capture(size, given)
        return self.captured[size]

    def _capture(self, size: int, given: Mapping[str, Tensor]) -> deque[_Turn]:
        numbers = {name: torch.empty(1, dtype=dtype) for name, dtype in NUMBERS.items()} if self.draw else {}
        self.state.tokens = size  # also when fewer come first: the graphs are kept
        every = [PackedInputs({**given, **numbers}, size, self.pages, self.device) for _ in range(TURNS)]
        # not in the graphs' memory, where the other turn's values may lie before the host has these
        ids = [torch.empty(size, dtype=torch.int64, device=self.device) for _ in every]
        torch.cuda.current_stream(self.device).synchronize()
        side = torch.cuda.Stream(self.device)
        with torch.cuda.stream(side):
            self._step(every[0], ids[0], every[1])  # loads what is loaded at the first use, outside the graph
        side.synchronize()
        turns: deque[_Turn] = deque()
        for packed, drawn, following in zip(every, ids, (*every[1:], every[0])):
            graph = torch.cuda.CUDAGraph()
            with captured(graph, self.pool):
                logits = self._step(packed, drawn, following)
            self.pool = self.pool or graph.pool()
            here = torch.empty(size, dtype=torch.int64, pin_memory=True)
            both = (drawn, here) if self.draw is not None else None
            turns.append(_Turn(graph, packed, logits, both, *(torch.cuda.Event() for _ in range(3))))
        return turns

    def _step(self, packed: PackedInputs, drawn: Tensor, following: PackedInputs) -> Tensor:
        """Logits; chosen tokens go to `drawn` and to the inputs of the step that may follow."""
        logits = self.program.run(packed.inputs)
        if self.draw is not None:
            self.draw.enqueue(logits, {name: packed.inputs[name] for name in NUMBERS}, drawn)
            # a row without a finite maximum has no token, and yet the next step must be able to look its input up
            torch.clamp(drawn, min=0, out=following.inputs[FED].view(-1))
        return logits


def _arrays(given: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    return {name: held.numpy() for name, held in given.items()}
