"""A loaded bundle against the eager model: ragged prefill, a few tokens at once, then single tokens, all rows compared.

The bundle runs through the executor that serves requests, with its real programs, pages that are shuffled and poisoned,
and several requests in a batch, so that what is compared is what will answer. Eager runs each sequence by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.capture import hf
from deepinfer_compile.cli.examine import eager_logits, sample_ids
from deepinfer_compile.errors import NotAModelFolder
from deepinfer_compile.observe import TOLERANCES, relative
from deepinfer_compile.runtime.batch import PAGE_SIZE, GroupMeta, StepInput
from deepinfer_compile.runtime.executor import BundleExecutor
from deepinfer_compile.runtime.loading import open_executor

TEXT = (
    "The compiler reads the model once and writes programs that serve it. Every number it gives is compared with what "
    "the model itself would have given, because a fast wrong answer is worth nothing. "
) * 4
LENGTHS = (9, 30, 97)
"""Tokens of the samples; all but the last SINGLE and FEW of each are prefilled."""
FEW = 3
SINGLE = 2
NARROW_FACTOR = 2.0


@dataclass(frozen=True)
class Sample:
    """One sequence of token ids."""

    name: str
    ids: tuple[int, ...]


def compare(
    files: BundleFiles, folder: Path, target: str | None, native: bool, tolerance: float | None
) -> dict[str, Any]:
    """Errors per sample, the limit and the verdict, as plain data. Raises NotAModelFolder and what loading raises."""
    given = folder if files.manifest.weights.mode != "copy" else None
    executor, _ = open_executor(files, target, native, given)
    samples = make_samples(files, executor.max_model_len)
    got, programs = bundle_logits(executor, samples)
    want = folder_logits(folder, samples, torch.float32)
    errors = [relative(g, w) for g, w in zip(got, want)]
    limit, limit_is = (tolerance, "given") if tolerance is not None else _limit(files, folder, samples, want)
    worst = max(errors)
    rows = [
        {
            "name": s.name,
            "tokens": len(s.ids),
            "programs": programs,
            "error": e if math.isfinite(e) else None,
            "same_best": int((g.argmax(-1) == w.argmax(-1)).sum()) if g.shape == w.shape else 0,
        }
        for s, e, g, w in zip(samples, errors, got, want)
    ]
    detail = f"logits differ by {worst:.1e} of the largest (limit {limit:.1e})"
    return {"ok": worst <= limit, "limit": limit, "limit_is": limit_is, "detail": detail, "samples": rows}


def make_samples(files: BundleFiles, limit: int) -> list[Sample]:
    """Sequences of unlike lengths: text where there is a tokenizer, and random ids. limit: the bundle's context."""
    vocab = int(files.manifest.model["vocab_size"])
    lengths = [min(n, limit) for n in LENGTHS]
    random = sample_ids(vocab, max(lengths))
    samples = [Sample(f"random ids {n}", tuple(random[:n])) for n in lengths]
    if not files.manifest.tokenizer:
        return samples
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(files.path("tokenizer/tokenizer.json"))).encode(TEXT).ids
    return [Sample(f"text {len(ids[:n])}", tuple(ids[:n])) for n in lengths[:2] if ids] + samples[-1:]


def bundle_logits(executor: BundleExecutor, samples: Sequence[Sample]) -> tuple[list[Tensor], list[str]]:
    """Logits [len(ids), V] of every sample, and the names of the programs that gave them."""
    parts = [_parts(len(s.ids)) for s in samples]
    pages = [-(-len(s.ids) // PAGE_SIZE) for s in samples]
    executor.allocate((sum(pages),) * len(executor.groups))
    for held in executor.allocated.values():
        if held.is_floating_point():
            held.fill_(math.nan)
    shuffled = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).to(torch.int32)
    tables = shuffled.split(pages)
    done = [0] * len(samples)
    out: list[list[Tensor]] = [[] for _ in samples]
    used: dict[str, None] = {}
    for step in range(max(map(len, parts))):
        active = [i for i in range(len(samples)) if step < len(parts[i])]
        counts = [parts[i][step] for i in active]
        ids = [samples[i].ids[done[i] : done[i] + n] for i, n in zip(active, counts)]
        lengths = [len(samples[i].ids) for i in active]
        inputs = _step_input([done[i] for i in active], ids, lengths, [tables[i] for i in active], len(executor.groups))
        used[executor.choose(sum(counts), len(counts))] = None
        for i, n, logits in zip(active, counts, executor.step(inputs).float().cpu().split(counts)):
            out[i].append(logits)
            done[i] += n
    return [torch.cat(part) for part in out], list(used)


def _parts(length: int) -> list[int]:
    """How a sequence is read: most of it, a few tokens, then one by one."""
    single = min(SINGLE, length - 1)
    few = min(FEW, length - 1 - single)
    return [n for n in (length - few - single, few, *(1,) * single) if n]


def _step_input(
    starts: Sequence[int],
    ids: Sequence[Sequence[int]],
    lengths: Sequence[int],
    tables: Sequence[Tensor],
    groups: int,
) -> StepInput:
    """A step of packed requests; every row's logits are wanted, and all cache groups use the same page numbers.

    lengths: of the whole sequences, which is what eager's length-dependent rotary forms see.
    """
    counts = [len(part) for part in ids]
    positions = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, counts)])
    ends = torch.tensor([s + n for s, n in zip(starts, counts)], dtype=torch.int32)
    table = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True, padding_value=-1)
    owner = torch.repeat_interleave(torch.arange(len(ids)), torch.tensor(counts))
    slot = table[owner, positions // PAGE_SIZE].long() * PAGE_SIZE + positions % PAGE_SIZE
    return StepInput(
        input_ids=torch.tensor([t for part in ids for t in part]),
        position_ids=positions,
        rows=torch.arange(len(positions)),
        query_start=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32),
        seq_len=ends,
        context_hint=torch.tensor(lengths)[owner],
        groups=(GroupMeta(table, slot),) * groups,
    )


def folder_logits(folder: Path, samples: Sequence[Sample], dtype: torch.dtype) -> list[Tensor]:
    """What Transformers gives for each sample, computed in `dtype`, as fp32. Raises NotAModelFolder, MissingExtra."""
    package = hf.transformers()
    package.utils.logging.disable_progress_bar()
    try:
        model = package.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, trust_remote_code=False, attn_implementation="eager"
        ).eval()
    except (OSError, ValueError, KeyError) as err:
        raise NotAModelFolder(path=folder, reason=str(err).splitlines()[0]) from None
    return [eager_logits(model, s.ids, range(len(s.ids))) for s in samples]


def _limit(files: BundleFiles, folder: Path, samples: Sequence[Sample], want: Sequence[Tensor]) -> tuple[float, str]:
    """The largest error allowed, and what it is. A narrow type is judged against its own eager error."""
    types = {c.dtype for c in files.manifest.constants.values()}
    if "bfloat16" not in types:
        return TOLERANCES[torch.float32], "fp32"
    eager = folder_logits(folder, samples, torch.bfloat16)
    own = max(relative(g, w) for g, w in zip(eager, want))
    return NARROW_FACTOR * own, f"{NARROW_FACTOR:g} x the error of eager bfloat16, {own:.1e}"


__all__ = ["bundle_logits", "compare", "make_samples"]
