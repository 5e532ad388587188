"""Run any stage of a program on sample tokens with the reference of every op: the basis of all numeric proof.

Captured, raised and cached stages take different inputs but mean the same function: token ids of one sequence in,
logits of chosen rows out. A cached stage reads the sequence in chunks through poisoned, shuffled pages, packed between
other requests, an empty one and a padding token, so that a stage which confuses requests cannot pass. What the stage
leaves in its caches is a result like the logits; before there are caches, what attention reads stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn.functional import pad

from deepinfer_compile.errors import MissingWeight
from deepinfer_compile.graph import argument, is_op, value
from deepinfer_compile.ops import ATTENTION, LATENT_ATTENTION, SELECTED_ATTENTION
from deepinfer_compile.program import BlockRunner, CacheSpec, Program
from deepinfer_compile.runtime.batch import PAGE_SIZE

LATENTS = (LATENT_ATTENTION.overload,)
EXTRA = PAGE_SIZE + 9
"""Tokens beyond a window: enough for a second page, and for every corner of the mask to be met."""
POISON = -99
"""What caches of whole numbers hold where nothing was written."""
WIDEST = 1024
"""The widest window that a replay reaches past; the references take too long for wider ones."""


@dataclass(frozen=True)
class Trace:
    """What one run of a stage gave.

    logits: [rows, V]. kept: cache name -> what it holds of the sequence, a row a token; of a stage without caches, what
    its attention reads as keys and values. stray: caches in which rows that belong to no token were written.
    """

    logits: Tensor
    kept: dict[str, Tensor]
    cached: bool = False
    stray: tuple[str, ...] = ()


def weights_from(model: nn.Module) -> dict[str, Tensor]:
    """A model's tensors by every name they have."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: t.detach() for name, t in named}


def random_weights(program: Program, seed: int = 0) -> dict[str, Tensor]:
    """Small random values for every checkpoint tensor of a program, for stages captured without weights."""
    gen = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    for ref in program.weights.values():
        if ref.value is not None:
            continue
        fan = ref.shape[-1] if len(ref.shape) > 1 else 1
        draw = (
            torch.randn(ref.shape, generator=gen) / math.sqrt(fan)
            if len(ref.shape) > 1
            else 1 + 0.1 * torch.randn(ref.shape, generator=gen)
        )
        out[ref.name] = draw.to(ref.dtype)
    return out


def bind(program: Program, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Skeleton arguments for the weight inputs. Raises MissingWeight."""
    bound: dict[str, Tensor] = {}
    for name, ref in program.weights.items():
        held = ref.value if ref.value is not None else weights.get(ref.name)
        if held is None:
            raise MissingWeight(tensor=ref.name)
        bound[name] = held
    return bound


def sample_length(program: Program) -> int:
    """How many tokens show what a captured program does: EXTRA past its widest window, as far as that is allowed."""
    windowed = (ATTENTION.overload, SELECTED_ATTENTION.overload)
    found = [n for gm in program.blocks.values() for n in gm.graph.nodes if is_op(n, *windowed)]
    windows = (int(argument(n, "window")) for n in found)
    wanted = max((w for w in windows if w <= WIDEST), default=0) + EXTRA
    return min(wanted, int(program.info.get("max_tokens", wanted)))


def logits_of(
    program: Program, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Sequence[int], chunk: int | None = None
) -> Tensor:
    """Logits [len(rows), V] of one sequence, read at once or, by a cached stage, in chunks of `chunk` tokens."""
    return trace_of(program, weights, ids, rows, chunk).logits


def trace_of(
    program: Program, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Sequence[int], chunk: int | None = None
) -> Trace:
    """Logits of one sequence and what is kept of it, read at once or, by a cached stage, in chunks."""
    bound = bind(program, weights)
    if not program.caches:
        kept: dict[str, Tensor] = {}
        given = _inputs(program, [(list(ids), 0, len(ids))], 0, rows)
        return Trace(program.run({**bound, **given}, _watcher(program, kept)), kept)
    batch = _Batch(program, list(ids), chunk or len(ids))
    out: list[Tensor] = []
    for start in range(0, len(ids), batch.chunk):
        stop = min(start + batch.chunk, len(ids))
        wanted = [r - start for r in rows if start <= r < stop]
        given = batch.step(wanted or [stop - start - 1])
        out.append(program.run({**bound, **batch.caches, **given})[: len(wanted)])
    return Trace(torch.cat(out), batch.kept(), True, batch.stray())


def _inputs(
    program: Program, parts: Sequence[tuple[list[int], int, int]], first: int, rows: Sequence[int]
) -> dict[str, Tensor]:
    """Program inputs for packed parts (ids, start, total length); rows count from token `first`."""
    given = {
        "input_ids": torch.tensor([[i for ids, *_ in parts for i in ids]]),
        "position_ids": torch.cat([torch.arange(start, start + len(ids)) for ids, start, _ in parts])[None],
        "rows": torch.tensor(list(rows)) + first,
        "context_hint": torch.cat([torch.full((len(ids),), total) for ids, _, total in parts])[None],
    }
    names = {n.name for n in program.skeleton.graph.nodes if n.op == "placeholder"}
    return {k: v for k, v in given.items() if k in names}


def _attentions(gm: GraphModule) -> list[Node]:
    return [n for n in gm.graph.nodes if is_op(n, ATTENTION.overload, *LATENTS)]


class _Watched(Interpreter):
    """Runs an uncached block and notes what caches would keep: the keys and values, or latents, of each attention."""

    def __init__(self, gm: GraphModule, prefix: str, kept: dict[str, Tensor]) -> None:
        super().__init__(gm)
        self.names = {n: f"{prefix}_{i}" for i, n in enumerate(_attentions(gm))}
        self.kept = kept

    def run_node(self, n: Node) -> Any:
        if n in self.names:
            given, _ = self.fetch_args_kwargs_from_env(n)
            self.kept[self.names[n]] = _latent_rows(*given[2:4]) if is_op(n, *LATENTS) else _kv_rows(*given[1:3])
        return super().run_node(n)


def _watcher(program: Program, kept: dict[str, Tensor]) -> BlockRunner:
    """Runs blocks and notes in `kept` what the caches of the cached program, by their names there, would hold."""
    stems = program.cache_stems()

    def run(call: Node, args: tuple[Any, ...]) -> Any:
        return _Watched(program.blocks[str(call.target)], f"cache_{stems[call]}", kept).run(*args)

    return run


def _kv_rows(k: Tensor, v: Tensor) -> Tensor:
    """k [1, H, T, D], v [1, H, T, Dv] -> [T, 2, H, max(D, Dv)], NaN where one is narrower."""
    width = max(k.shape[-1], v.shape[-1])
    parts = [pad(t[0], (0, width - t.shape[-1]), value=math.nan).transpose(0, 1) for t in (k, v)]
    return torch.stack(parts, 1)


def _latent_rows(c: Tensor, k_rope: Tensor) -> Tensor:
    """c [1, T, dl], k_rope [1, T, dr] -> [T, dl + dr]."""
    return torch.cat([c[0], k_rope[0]], -1)


@dataclass
class _Request:
    """One sequence of a batch: its ids, how many of them a step reads, how many are read, its pages in each group."""

    ids: list[int]
    rate: int
    tables: list[Tensor]
    done: int = 0


class _Batch:
    """Poisoned caches, and steps that read `main` in chunks between other requests and before a padding token."""

    MAIN = 1

    def __init__(self, program: Program, main: list[int], chunk: int) -> None:
        self.program, self.chunk = program, chunk
        steps = -(-len(main) // chunk)
        other = (main[::-1] * (2 * steps // len(main) + 1))[: 2 * steps]
        plans = [(other[:steps], 1), (main, chunk), ([], 0), (other, 2)]
        needs = [-(-len(ids) // PAGE_SIZE) for ids, _ in plans]
        gen = torch.Generator().manual_seed(17)
        pages = sum(needs) + 2
        shuffled = [torch.randperm(pages, generator=gen)[: sum(needs)].to(torch.int32) for _ in program.windows]
        split = [order.split(needs) for order in shuffled]
        self.requests = [_Request(ids, rate, [g[i] for g in split]) for i, (ids, rate) in enumerate(plans)]
        self.caches = {c.name: _poisoned((pages, *c.shape), c.dtype) for c in program.caches}

    def step(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Inputs of the next step but weights and caches; rows count within the chunk of the main sequence."""
        parts = [(r.ids[r.done : r.done + r.rate], r.done, len(r.ids)) for r in self.requests]
        counts = torch.tensor([0, *(len(ids) for ids, *_ in parts)])
        lengths = [start + len(ids) for ids, start, _ in parts]
        query_start = counts.cumsum(0).to(torch.int32)
        meta = {"query_start": query_start, "seq_len": torch.tensor(lengths, dtype=torch.int32)}
        for g in range(len(self.program.windows)):
            meta[f"block_table_{g}"] = self._table(g)
            slots = [_slots(r.tables[g], start, start + len(ids)) for r, (ids, start, _) in zip(self.requests, parts)]
            meta[f"slot_{g}"] = torch.cat([*slots, torch.tensor([-1])])
        for request, length in zip(self.requests, lengths):
            request.done = length
        given = _inputs(self.program, [*parts, ([0], 0, 1)], int(query_start[self.MAIN]), rows)
        if any(n.name == "kept" for n in self.program.inputs()):  # of the whole sequence, so that nothing is left out
            meta |= {
                "kept": torch.arange(int(counts.sum()) + 1),
                "kept_start": torch.zeros(len(parts), dtype=torch.int64),
            }
        return {**given, **meta}

    def _table(self, group: int) -> Tensor:
        """Page table [R, P] of a group, -1 where a request has no page."""
        widest = max(len(r.tables[group]) for r in self.requests)
        return torch.stack([pad(r.tables[group], (0, widest - len(r.tables[group])), value=-1) for r in self.requests])

    def _flat(self, cache: CacheSpec) -> Tensor:
        """A cache as rows in order of slots; a token's row of a kv cache is its keys and its values."""
        held = self.caches[cache.name]
        return (held.transpose(1, 2) if cache.kind == "kv" else held).flatten(0, 1)

    def kept(self) -> dict[str, Tensor]:
        """Rows of the main sequence in every cache."""
        main = self.requests[self.MAIN]
        return {c.name: self._flat(c)[_held(c, main.tables[c.group], main.done)] for c in self.program.caches}

    def stray(self) -> tuple[str, ...]:
        """Caches with values in rows that no token of any request owns."""
        found = []
        for cache in self.program.caches:
            rows = self._flat(cache)
            free = torch.ones(rows.shape[0], dtype=torch.bool)
            for request in self.requests:
                free[_held(cache, request.tables[cache.group], request.done)] = False
            if not bool(_is_poison(rows[free]).all()):
                found.append(cache.name)
        return tuple(found)


def _poisoned(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), math.nan if dtype.is_floating_point else POISON, dtype=dtype)


def _is_poison(rows: Tensor) -> Tensor:
    return rows.isnan() if rows.is_floating_point() else rows == POISON


def _held(cache: CacheSpec, table: Tensor, done: int) -> Tensor:
    """Where a cache holds the first `done` tokens of a request; one that has fewer rows than tokens, what these
    complete."""
    ratio = PAGE_SIZE // cache.shape[1 if cache.kind == "kv" else 0]
    return _slots(table, 0, done)[ratio - 1 :: ratio] // ratio


def _slots(table: Tensor, start: int, stop: int) -> Tensor:
    """Slots of the tokens start..stop-1 of a request with these pages."""
    at = torch.arange(start, stop)
    return table[at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE


def result(program: Program) -> Tensor:
    """The logits that a program gives, without data."""
    out = next(n for n in reversed(program.skeleton.graph.nodes) if n.op == "output").args[0]
    found: Tensor = value(out)  # type: ignore[arg-type]
    return found


def vocabulary(program: Program) -> int:
    """Width of the logits."""
    return int(result(program).shape[-1])
