"""A conversation that goes on, on this CPU: its rows from memory, from disk, or computed again.

`python -m tests.bench.bench_resume [TOKENS ...]` (1024 and 8192), for a tiny llama of random weights, built and run as
graphs. Each conversation has that many tokens, of which the last 32 are new. Of three conversations the one with the
median time to its first token is shown. Files are not in the system's memory when they are read, if they can be taken
out of it.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import deepinfer_compile as dc
from deepinfer_compile.cli.show import size, stdout, table
from tests import models

NEW, REPEATS = 32, 3
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
KINDS = ("computed", "memory", "disk")


def conversation(tokens: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, models.VOCAB), k=tokens)


def load(bundle: Path, limit: int, folder: Path | None) -> dc.LLM:
    return dc.load(bundle, native=False, max_model_len=limit, max_num_seqs=1, prefix_cache_folder=folder)


def ask(llm: dc.LLM, prompt: list[int]) -> Any:
    """What the first token waited for."""
    (out,) = llm.generate([prompt], dc.SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    return out.metrics


def leave_memory(folder: Path) -> None:
    """Write the files of a folder through to the disk, and keep nothing of them in memory."""
    for file in folder.glob("*/*"):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def resume(bundle: Path, folder: Path, tokens: int, limit: int) -> dict[str, Any]:
    """The median of each kind."""
    found: dict[str, list[Any]] = {kind: [] for kind in KINDS}
    for seed in range(REPEATS):
        whole = conversation(tokens, seed)
        first = load(bundle, limit, folder)
        ask(first, [1, 2, 3])  # the first step of a process does more than others
        ask(first, whole[:-NEW])
        first.close()
        leave_memory(folder)
        second = load(bundle, limit, folder)
        ask(second, [1, 2, 3])
        found["disk"].append(ask(second, whole))
        second.close()
        found["memory"].append(ask(first, whole))
        third = load(bundle, limit, None)
        ask(third, [1, 2, 3])
        found["computed"].append(ask(third, whole))
    return {kind: sorted(each, key=lambda one: one.first_token)[REPEATS // 2] for kind, each in found.items()}


def main(lengths: list[int]) -> None:
    limit = max(lengths) + 64
    numbers = ("tokens", "found", "computed", "read", "ms", "MiB/s", "lookup ms", "compute ms", "first token ms", "x")
    shown = table("tokens", "rows from", *numbers[1:], numbers=numbers)
    with tempfile.TemporaryDirectory() as root:
        bundle = Path(root) / "bundle"
        dc.build(models.make("llama", max_position_embeddings=limit, **SIZES), bundle, native=False)
        for tokens in lengths:
            found = resume(bundle, Path(root) / str(tokens), tokens, limit)
            whole = found["computed"].first_token
            for kind in KINDS:
                one = found[kind]
                rate = f"{one.disk_bytes / one.transfer / 2**20:.0f}" if one.transfer else ""
                cells = [one.ram_rows + one.disk_rows, one.recomputed_rows, size(one.disk_bytes)]
                seconds = (one.transfer, rate, one.index, one.recompute, one.first_token)
                times = [each if isinstance(each, str) else f"{each * 1e3:.1f}" for each in seconds]
                shown.add_row(*map(str, (tokens, kind, *cells, *times, f"{whole / one.first_token:.1f}")))
    stdout().print(shown)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1024, 8192])
