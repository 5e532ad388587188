"""Runs a bundle's programs: a flat list of block calls over a list of values, nothing decided at run time but which
program.

A program stores its skeleton as data. At load each block gets a runner (a native package, or the graph on reference
operations) and each value a place in a list; a step fills the inputs and walks the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from deepinfer_compile.errors import BundleCorrupt, WeightMismatch
from deepinfer_compile.runtime.batch import CacheGroup, Flight, StepInput
from deepinfer_compile.runtime.drawing import Draw, Numbers
from deepinfer_compile.runtime.kept import in_prompt, kept_inputs
from deepinfer_compile.runtime.kernel_blocks import StepState
from deepinfer_compile.runtime.page_rows import Form, PageRows, host_memory, in_one
from deepinfer_compile.runtime.staging import PINNED, Staging

STAGING = 32 << 20
"""Bytes of pages that are copied into the caches together, about; so many go to the device while the next are brought
together."""
Runner = Callable[[list[Any]], Sequence[Any]]
"""Takes a block's inputs in order, gives its outputs in order."""


@dataclass(frozen=True)
class _Call:
    runner: Runner
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    frees: tuple[int, ...]


class ProgramRunner:
    """One program bound to runners and weights."""

    def __init__(
        self, data: Mapping[str, Any], runners: Mapping[str, Runner], weights: Mapping[str, Tensor], file: str
    ) -> None:
        self.file = file
        self.caches: list[dict[str, Any]] = data["caches"]
        place: dict[str, int] = {}
        self.initial: list[Any] = []
        calls: list[tuple[Runner, list[int], list[int]]] = []
        for node in data["skeleton"]["nodes"]:
            if node["op"] == "input":
                self._add(place, node["name"], self._weight(node, data, weights))
            elif node["op"] == "block":
                count = len(node["val"]["items"]) if "items" in node["val"] else 1
                first = len(self.initial)
                place[node["name"]] = first
                self.initial.extend([None] * count)
                calls.append(
                    (
                        runners[node["target"]],
                        [place[a["ref"]] for a in node["args"]],
                        list(range(first, first + count)),
                    )
                )
            elif node["op"] == "call" and node["target"] == "getitem":
                place[node["name"]] = place[node["args"][0]["ref"]] + node["args"][1]
            elif node["op"] == "output":
                self.output = place[node["args"][0]["ref"]]
            else:
                raise BundleCorrupt(file=file, reason=f"the skeleton calls {node.get('target')!r}")
        self.place = place
        self.keep = _keep(data["info"], file) if "kept" in place else 0
        self.calls = _with_frees(calls, self.output, sum(n["op"] == "input" for n in data["skeleton"]["nodes"]))

    def _add(self, place: dict[str, int], name: str, held: Any) -> None:
        place[name] = len(self.initial)
        self.initial.append(held)

    def _weight(self, node: dict[str, Any], data: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Tensor | None:
        spec = data["weights"].get(node["name"])
        if spec is None:
            return None
        held = weights[spec["tensor"]]
        found = f"{str(held.dtype).removeprefix('torch.')}{list(held.shape)}"
        if found != f"{spec['dtype']}{spec['shape']}":
            raise WeightMismatch(
                tensor=spec["tensor"], expected=f"{spec['dtype']}{spec['shape']}", found=found, where=self.file
            )
        return held

    def bind(self, name: str, held: Tensor) -> None:
        """Give a cache (or another lasting input) its tensor."""
        self.initial[self.place[name]] = held

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """One step."""
        values = list(self.initial)
        for name, held in inputs.items():
            at = self.place.get(name)
            if at is not None:
                values[at] = held
        for call in self.calls:
            results = call.runner([values[i] for i in call.reads])
            for i, held in zip(call.gives, results):
                values[i] = held
            for i in call.frees:
                values[i] = None
        logits: Tensor = values[self.output]
        return logits


def _with_frees(calls: list[tuple[Runner, list[int], list[int]]], output: int, inputs: int) -> list[_Call]:
    """Values that nobody reads later are dropped at once, so that the peak is what liveness says."""
    later = {output}
    done: list[_Call] = []
    for runner, reads, gives in reversed(calls):
        frees = {i for i in (*reads, *gives) if i not in later and i >= inputs}
        later |= set(reads)
        done.append(_Call(runner, tuple(reads), tuple(gives), tuple(frees)))
    return done[::-1]


class Steps(Protocol):
    """Something that runs steps of one program faster."""

    def run(self, given: Mapping[str, Tensor]) -> Tensor | None:
        """Logits of a step; None where it does not run the step."""
        ...


class DecodeSteps(Steps, Protocol):
    """And steps of one token a request that end in chosen tokens."""

    def start(self, given: Mapping[str, Tensor], numbers: Numbers, *, following: bool = False) -> Flight | None:
        """See `Executor`."""
        ...


class Graphs(Protocol):
    """Makes what runs steps of a program faster; None where nothing does."""

    def decode(self, program: ProgramRunner) -> DecodeSteps | None: ...

    def small(self, name: str, program: ProgramRunner) -> Steps | None: ...


class BundleExecutor:
    """The `Executor` of a loaded bundle."""

    def __init__(
        self,
        programs: Mapping[str, ProgramRunner],
        windows: Sequence[int],
        vocab_size: int,
        max_model_len: int,
        crossover: float,
        device: torch.device,
        state: StepState,
        graphs: Graphs | None = None,
        draw: Draw | None = None,
        identity: str = "",
    ) -> None:
        self.programs = dict(programs)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.crossover = crossover
        self.device, self.state, self.make_graphs = device, state, graphs
        self.graphs: DecodeSteps | None = None
        self.small: dict[str, Steps] = {}
        self.draw, self.identity = draw, identity
        self.keep = max(program.keep for program in programs.values())
        self.reads_hint = any("context_hint" in program.place for program in programs.values())
        self.groups = tuple(self._group(g, window) for g, window in enumerate(windows))
        self.allocated: dict[str, Tensor] = {}
        self._staging: Staging | None = None

    def _group(self, index: int, window: int) -> CacheGroup:
        caches = next(iter(self.programs.values())).caches
        size = sum(prod(c["shape"]) * getattr(torch, c["dtype"]).itemsize for c in caches if c["group"] == index)
        return CacheGroup(f"window{window}" if window else "full", window, size)

    def allocate(self, pages: tuple[int, ...]) -> None:
        """Caches of `pages[g]` pages for group g, contents undefined, shared by all programs."""
        caches = next(iter(self.programs.values())).caches
        self.allocated = {
            c["name"]: torch.empty(
                (pages[c["group"]], *c["shape"]), dtype=getattr(torch, c["dtype"]), device=self.device
            )
            for c in caches
        }
        for program in self.programs.values():
            for name, held in self.allocated.items():
                program.bind(name, held)
        if self.make_graphs is not None:
            self.graphs = self.make_graphs.decode(self.programs["decode"])
            found = {n: self.make_graphs.small(n, p) for n, p in self.programs.items() if n != "decode"}
            self.small = {name: steps for name, steps in found.items() if steps is not None}

    def _caches(self, group: int) -> dict[str, Tensor]:
        caches = next(iter(self.programs.values())).caches
        return {c["name"]: self.allocated[c["name"]] for c in caches if c["group"] == group}

    def page_form(self, group: int) -> Form:
        """See `Executor`."""
        return Form.of({name: (held.dtype, tuple(held.shape[1:])) for name, held in self._caches(group).items()})

    def read_pages(self, group: int, pages: Sequence[int]) -> Tensor:
        """See `Executor`."""
        form, caches = self.page_form(group), self._caches(group)
        found = torch.zeros((len(pages), form.size), dtype=torch.uint8, device=self.device)
        places = torch.tensor(pages, dtype=torch.int64, device=self.device)
        for one in form.places if len(pages) else ():
            rows = caches[one.name].index_select(0, places).view(len(pages), -1)
            found[:, one.start : one.end] = rows.view(torch.uint8)
        return found.cpu()

    def host_memory(self, size: int) -> Tensor:
        """See `Executor`."""
        if self.device.type == "cuda" and self._staging is None:
            self._staging = Staging(torch.empty(PINNED, dtype=torch.uint8, pin_memory=True))
        return self._staging.take(size) if self._staging is not None else host_memory(size)

    def write_pages(self, group: int, pages: Sequence[int], rows: Sequence[PageRows]) -> int:
        """See `Executor`."""
        caches, done = self._caches(group), 0
        kinds = {name: (held.dtype, tuple(held.shape[1:])) for name, held in caches.items()}
        for form, same in groupby(rows, key=lambda one: one.form):
            if form.kinds != kinds:
                break
            contents = [one.content for one in same]
            most = max(1, STAGING // contents[0].nbytes)
            for first in range(0, len(contents), most):
                batch = contents[first : first + most]
                self._write(caches, form, pages[done : done + len(batch)], batch)
                done += len(batch)
        if self._staging is not None:
            self._staging.copied(torch.cuda.current_stream(self.device))
        return done

    def _write(self, caches: Mapping[str, Tensor], form: Form, pages: Sequence[int], contents: list[Tensor]) -> None:
        """Put pages of one form into caches: a copy to the device, and one for each cache."""
        staged, places = self._there(in_one(contents)), self._there(torch.tensor(pages))
        for one in form.places:
            # of the widest type that fits, since copies go by elements
            aligned = one.start % 8 == (one.end - one.start) % 8 == 0
            unit = torch.int64 if aligned else torch.uint8
            bytes_ = caches[one.name].view(len(caches[one.name]), -1).view(torch.uint8)
            bytes_.view(unit).index_copy_(0, places, staged[:, one.start : one.end].view(unit))

    def _there(self, held: Tensor) -> Tensor:
        """A copy on the device that nothing waits for, by way of memory from which the device copies by itself."""
        return held.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else held

    def choose(self, tokens: int, requests: int) -> str:
        """decode: one token a request. verify: few. prefill: more than the crossover between the attention forms."""
        if tokens == requests:
            return "decode"
        return "verify" if tokens <= self.crossover * requests else "prefill"

    def _program(self, inputs: StepInput) -> str:
        """The program that fits a step; where windows lack rows of a prompt, the one that knows which."""
        if self.keep and in_prompt(inputs):
            return "prefill"
        return self.choose(inputs.input_ids.shape[0], inputs.seq_len.shape[0])

    def step(self, inputs: StepInput) -> Tensor:
        """Run the program that fits; logits [N, vocab], see `Executor`."""
        return self.run(self._program(inputs), inputs)

    def run(self, name: str, inputs: StepInput, more: Mapping[str, Tensor] | None = None) -> Tensor:
        """Run one program on a step; logits as `step` gives them. more: inputs beside those of every step."""
        self.state.tokens = inputs.input_ids.shape[0]
        given = {**_given(inputs), **(more or {})}
        if self.programs[name].keep and "kept" not in given:
            given |= kept_inputs(inputs, self.programs[name].keep)
        with torch.no_grad():
            steps = self.graphs if name == "decode" else self.small.get(name)
            logits = steps.run(given) if steps is not None else None
            if logits is None:
                there = {key: held.to(self.device, non_blocking=True) for key, held in given.items()}
                logits = self.programs[name].run(there)
        return logits.float().cpu() if self.draw is None else logits

    def start(self, inputs: StepInput, numbers: Numbers, *, following: bool = False) -> Flight | None:
        """See `Executor`."""
        tokens = inputs.input_ids.shape[0]
        if self.graphs is None or self._program(inputs) != "decode":
            return None
        self.state.tokens = tokens
        with torch.no_grad():
            return self.graphs.start(_given(inputs), numbers, following=following)


def _keep(info: Mapping[str, Any], file: str) -> int:
    """How many rows of a prompt a program keeps. Raises BundleCorrupt."""
    split = info.get("split")
    keep = split.get("keep") if isinstance(split, dict) else None
    if type(keep) is not int or keep < 1:
        raise BundleCorrupt(file=file, reason="it does not say how many rows of a prompt it keeps")
    return keep


def _given(inputs: StepInput) -> dict[str, Tensor]:
    """A step's inputs by the names that programs give them."""
    given = {
        "input_ids": inputs.input_ids.unsqueeze(0),
        "position_ids": inputs.position_ids.unsqueeze(0),
        "context_hint": inputs.context_hint.unsqueeze(0),
        "rows": inputs.rows,
        "query_start": inputs.query_start,
        "seq_len": inputs.seq_len,
    }
    for g, meta in enumerate(inputs.groups):
        given[f"block_table_{g}"] = meta.block_table
        given[f"slot_{g}"] = meta.slot
    return given
