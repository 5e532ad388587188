"""Run any stage of a program on sample tokens with the reference of every op: the basis of all numeric proof.

Captured, raised and cached stages take different inputs but mean the same function: token ids of one sequence in,
logits of chosen rows out. A cached stage reads the sequence in chunks through poisoned, shuffled pages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.errors import MissingWeight
from deepinfer_compile.graph import value
from deepinfer_compile.program import Program
from deepinfer_compile.runtime.batch import PAGE_SIZE


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


def logits_of(
    program: Program, weights: Mapping[str, Tensor], ids: Sequence[int], rows: Sequence[int], chunk: int | None = None
) -> Tensor:
    """Logits [len(rows), V] of one sequence, read at once or, by a cached stage, in chunks of `chunk` tokens."""
    bound = bind(program, weights)
    if not program.caches:
        return _run(program, bound, ids, 0, rows, {}, len(ids))
    caches, tables = _caches(program, len(ids))
    out: list[Tensor] = []
    size = chunk or len(ids)
    for start in range(0, len(ids), size):
        part = list(ids[start : start + size])
        wanted = [r - start for r in rows if start <= r < start + len(part)]
        meta = _metadata(program, start, len(part), tables)
        logits = _run(program, {**bound, **caches}, part, start, wanted or [len(part) - 1], meta, len(ids))
        out.append(logits[: len(wanted)])
    return torch.cat(out)


def _run(
    program: Program,
    bound: dict[str, Tensor],
    ids: Sequence[int],
    start: int,
    rows: Sequence[int],
    extra: dict[str, Tensor],
    total: int,
) -> Tensor:
    positions = torch.arange(start, start + len(ids))[None]
    given: dict[str, Any] = {
        "input_ids": torch.tensor([list(ids)]),
        "position_ids": positions,
        "rows": torch.tensor(list(rows)),
        "context_hint": torch.full_like(positions, total),
        **extra,
    }
    names = {n.name for n in program.skeleton.graph.nodes if n.op == "placeholder"}
    result: Tensor = program.run({**bound, **{k: v for k, v in given.items() if k in names}})
    return result


def _caches(program: Program, tokens: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Caches poisoned with NaN, and a shuffled page table for each group."""
    need = -(-tokens // PAGE_SIZE)
    gen = torch.Generator().manual_seed(17)
    tables = [torch.randperm(need + 2, generator=gen)[:need].to(torch.int32)[None] for _ in program.windows]
    caches = {c.name: torch.full((need + 2, *c.shape), math.nan, dtype=c.dtype) for c in program.caches}
    return caches, tables


def _metadata(program: Program, start: int, count: int, tables: list[Tensor]) -> dict[str, Tensor]:
    meta = {
        "query_start": torch.tensor([0, count], dtype=torch.int32),
        "seq_len": torch.tensor([start + count], dtype=torch.int32),
    }
    at = torch.arange(start, start + count)
    for g, table in enumerate(tables):
        meta[f"block_table_{g}"] = table
        meta[f"slot_{g}"] = table[0, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
    return meta


def vocabulary(program: Program) -> int:
    """Width of the logits."""
    out = next(n for n in reversed(program.skeleton.graph.nodes) if n.op == "output").args[0]
    return int(value(out).shape[-1])  # type: ignore[arg-type]
