"""The V3-shaped model as a bundle: decode steps of the engine, with real prompts of the full context before them."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import deepinfer_compile as dc
from deepinfer_compile.capture.source import meta_model
from deepinfer_compile.targets import TARGETS, nvidia
from tests.bench import gpu_model
from tests.bench.gpu_rows import Rows

ROOM = 4096 + 192


def target() -> str:
    """The target that this GPU is."""
    have = torch.cuda.get_device_capability()
    return next(name for name, t in TARGETS.items() if isinstance(t, nvidia.NvidiaTarget) and t.capability == have)


def build(out: Path, targets: list[str]) -> Path:
    """The bundle without weights. Needs no GPU."""
    config = gpu_model.config()
    dc.build(meta_model(config, torch.bfloat16), out, target=targets, weights="none")
    return out


def bundle(rows: Rows, built: Any, batches: list[int]) -> None:
    """Microseconds a step of `Engine.step` with Python and sampling. BENCH_BUNDLE names a bundle built elsewhere."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        given = os.environ.get("BENCH_BUNDLE")
        path = Path(given) if given else build(Path(folder) / "v3.bundle", [target()])
        built_at = time.perf_counter()
        save_file({n: t.contiguous() for n, t in built.state_dict().items()}, Path(folder) / "model.safetensors")
        saved = time.perf_counter()
        llm = dc.load(
            path, checkpoint=folder, max_num_seqs=max(batches), max_num_batched_tokens=8192, max_model_len=ROOM
        )
        loaded = time.perf_counter()
    print(
        f"bundle: built in {built_at - begin:.0f} s, weights saved in {saved - built_at:.0f} s, "
        f"loaded in {loaded - saved:.0f} s",
        flush=True,
    )
    for batch in batches:
        steps(rows, built, llm, batch)


def steps(rows: Rows, built: Any, llm: Any, batch: int, length: int = 4096) -> None:
    """A batch of prompts read, then 64 steps of one token each."""
    generator = torch.Generator().manual_seed(batch)
    prompts = torch.randint(3, 1000, (batch, length), generator=generator).tolist()
    params = dc.SamplingParams(temperature=0.0, max_tokens=160, ignore_eos=True)
    engine = llm.engine
    requests = [engine.make(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not all(request.output_ids for request in requests):
        engine.step()
    read = time.perf_counter() - begin
    times = []
    for _ in range(gpu_model.STEPS):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e6)
    assert engine.alive == batch
    hit = even_hits(built.config.n_routed_experts, built.config.num_experts_per_tok, batch)
    moved = gpu_model.moved_bytes(built, batch, length, hit)
    note = f"prompts read at {batch * length / read:.0f} tokens/s, {hit} experts hit if routed evenly"
    rows.add(f"bundle B {batch} cache {length}", "ours", statistics.median(times[4:]), moved=moved, note=note)
    while engine.alive:
        engine.step()


def even_hits(experts: int, taken: int, tokens: int) -> int:
    """Experts that tokens hit on average when each takes `taken` of them at random."""
    return round(experts * (1 - (1 - taken / experts) ** tokens))
