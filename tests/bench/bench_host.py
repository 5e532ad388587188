"""What the host does before the first token of a conversation that goes on: nothing is computed, so all else counts.

`python -m tests.bench.bench_host [TOKENS ...]` (1024, 8192, 65536, 262144): the median of a few asked one after the
other, in milliseconds, without a folder and with one, where what the last one left is noted while the next one runs.
The first column is what `LLM.generate` takes beside.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from deepinfer_compile.cli.show import stdout, table
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup, StepInput
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.page_rows import Form
from tests.bench.bench_resume import NEW, ask

VOCAB, REPEATS = 32768, 9
PARTS = ("queued", "index", "recompute", "first_token")


class Idle:
    """An executor of a model with whole contexts and windows that computes nothing, with a few bytes a page."""

    draw, identity, reads_hint, keep, vocab_size = None, "idle", False, 140, VOCAB
    groups = (CacheGroup("full", 0, 512), CacheGroup("window128", 128, 512))

    def __init__(self, room: int) -> None:
        self.max_model_len = room

    def allocate(self, pages: tuple[int, ...]) -> None:
        self.logits = torch.zeros(1, VOCAB)

    def step(self, inputs: StepInput) -> torch.Tensor:
        return self.logits[: len(inputs.rows)]

    def start(self, *_: Any, **__: Any) -> None:
        return None

    def page_form(self, group: int) -> Form:
        return Form.of({"rows": (torch.int64, (PAGE_SIZE,))})

    def read_pages(self, group: int, pages: list[int]) -> torch.Tensor:
        return torch.zeros(len(pages), 8 * PAGE_SIZE, dtype=torch.uint8)

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


def measure(tokens: int, folder: Path | None) -> list[float]:
    """Medians of each part, and of what a call takes beside, in seconds."""
    executor: Any = Idle(tokens + PAGE_SIZE)
    llm = LLM(executor, max_num_seqs=1, memory_bytes=1 << 30, prefix_cache_folder=folder)
    rng = random.Random(1)
    start = rng.choices(range(3, VOCAB), k=tokens - NEW)
    ask(llm, start)
    llm.engine.flush(600)
    found = []
    for _ in range(REPEATS):
        prompt = [*start, *rng.choices(range(3, VOCAB), k=NEW)]
        begin = time.perf_counter()
        one = ask(llm, prompt)
        whole = time.perf_counter() - begin
        found.append([whole - one.first_token, *(getattr(one, part) for part in PARTS)])
    llm.close()
    return [statistics.median(each) for each in zip(*found)]


def main(lengths: list[int]) -> None:
    shown = table("tokens", "folder", "beside", *PARTS, numbers=("tokens", "beside", *PARTS))
    with tempfile.TemporaryDirectory() as name:
        for folder in (None, Path(name)):
            for tokens in lengths:
                times = measure(tokens, folder and folder / str(tokens))
                shown.add_row(str(tokens), "yes" if folder else "", *(f"{each * 1e3:.2f}" for each in times))
    stdout().print(shown)


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [1024, 8192, 65536, 262144])
