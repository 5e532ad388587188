"""Feed given tokens through a loaded bundle step by step and collect the logits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.runtime.batch import PAGE_SIZE, GroupMeta, StepInput
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.loading import open_executor


def open_bundle(folder: Path, native: bool, pages: int = 8) -> BundleExecutor:
    """The executor of a bundle, its caches poisoned with NaN."""
    executor, _ = open_executor(read_bundle(folder), native=native)
    executor.allocate((pages,) * len(executor.groups))
    for cache in executor.allocated.values():
        cache.fill_(float("nan"))
    return executor


def step(executor: BundleExecutor, ids: list[int], start: int, prompt: int, rows: list[int]) -> Tensor:
    """One step of one request whose pages are in descending order."""
    count = len(ids)
    at = torch.arange(start, start + count)
    table = torch.arange(7, -1, -1, dtype=torch.int32)[None]
    slot = table[0, at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
    return executor.step(
        StepInput(
            input_ids=torch.tensor(ids),
            position_ids=at,
            rows=torch.tensor(rows),
            query_start=torch.tensor([0, count], dtype=torch.int32),
            seq_len=torch.tensor([start + count], dtype=torch.int32),
            context_hint=(at + 1).clamp(min=prompt),
            groups=tuple(GroupMeta(table, slot) for _ in executor.groups),
        )
    )


def forced_logits(executor: BundleExecutor, ids: list[int], prompt: int) -> Tensor:
    """Logits [len(ids) - prompt + 1, V]: after the prompt, then after each further token read alone."""
    out = [step(executor, ids[:prompt], 0, prompt, [prompt - 1])]
    out += [step(executor, [ids[i]], i, prompt, [0]) for i in range(prompt, len(ids))]
    return torch.cat(out)
