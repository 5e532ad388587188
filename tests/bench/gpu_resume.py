"""A conversation that goes on, on a GPU: rows from the caches' memory, from disk, or computed again.

The causal encoder-decoder of `gpu_ced` with 8 experts and caches in the published bytes, in a bundle that keeps the
last rows of prompts; `resume:40` has the published 40 layers. Each conversation has so many tokens, of which the last
32 are new. Small steps run as graphs, which are captured when one of their size comes for the first time; that time is
shown once, apart. What chooses rows looks at every index key, so its share, which grows with the conversation, is shown
beside the rest of what the device does, and apart from both the host's, which is what is left of the time that it takes
to compute rows again.

BENCH_DISK names a folder on the disk to measure; without it rows lie where temporary files do.
"""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

import deepinfer_compile as dc
from deepinfer_compile.models.deepseek_v41.config import RELEASED_RATIOS
from deepinfer_compile.models.deepseek_v41.storage import PUBLISHED
from tests.bench import gpu_ced
from tests.bench.bench_resume import NEW, ask, leave_memory
from tests.bench.gpu_bundle import target
from tests.bench.gpu_rows import Rows

LENGTHS = (1024, 8192, 65536, 262144)
LAYERS: dict[int, dict[str, Any]] = {
    12: {},
    40: {
        "num_hidden_layers": 40,
        "compress_ratios": RELEASED_RATIOS,
        "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, 20, 24, 28, 32, 36),
        "candidate_source_layer_id": 20,
        "engram_layer_ids": (1, 14),
    },
}
"""What each number of layers changes in the shape of `gpu_ced`."""
ROOM, EXPERTS, REPEATS = 262144 + 256, 8, 5
CHOOSING = ("score", "narrow", "choose")
"""Kernels of `select_rows`."""


def build(out: Path, targets: list[str], layers: int = 12) -> Path:
    """The bundle without weights. Needs no GPU."""
    model = gpu_ced.make(PUBLISHED, n_routed_experts=EXPERTS, **LAYERS[layers])
    dc.build(model, out, target=targets, weights="none", max_model_len=ROOM, keep=gpu_ced.KEEP)
    return out


def name_of(layers: int) -> str:
    """The folder of a bundle among those of BENCH_CED."""
    return f"resume{layers}.bundle"


def load(bundle: Path, weights: Path, folder: Path) -> Any:
    llm = dc.load(
        bundle, checkpoint=weights, max_num_seqs=1, max_num_batched_tokens=gpu_ced.CHUNK, prefix_cache_folder=folder
    )
    ask(llm, gpu_ced.prompts(1, 200)[0])  # the first step of a process does more than others
    return llm


def conversation(tokens: int, of: int = 0) -> list[int]:
    """Others begin otherwise."""
    (found,) = gpu_ced.prompts(1, tokens)
    return [(tokens + of) % 30000, *found[1:]]


def other_end(whole: list[int], way: int = 1) -> list[int]:
    """The same conversation with other new tokens."""
    return [*whole[:-NEW], *(token ^ way for token in whole[-NEW:])]


def settle(llm: Any) -> None:
    """Wait until what was written to disk has come there."""
    before = -1
    while before != (before := llm.prefix_stats.disk_pages):
        time.sleep(0.5)


def resume(rows: Rows, layers: int = 12) -> None:
    """Microseconds to the first token. BENCH_CED names a folder with bundles built elsewhere."""
    with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DISK")) as disk:
        root, kept, given = Path(name), Path(disk), os.environ.get("BENCH_CED")
        bundle = Path(given) / name_of(layers) if given else build(root / "bundle", [target()], layers)
        (root / "weights").mkdir()
        gpu_ced.save_weights(root / "weights", "cuda", n_routed_experts=EXPERTS, **LAYERS[layers])
        llm = load(bundle, root / "weights", kept)
        for tokens in LENGTHS:
            whole = conversation(tokens)
            add(rows, (tokens, layers), "computed", ask(llm, whole[:-NEW]), "")
            settle(llm)
            add(rows, (tokens, layers), "memory, first of its size", ask(llm, whole), "")
            again = sorted((ask(llm, other_end(whole, 2 + i)) for i in range(REPEATS)), key=lambda one: one.recompute)
            shown = shares(again[REPEATS // 2].recompute * 1e3, *device(llm, other_end(whole)))
            add(rows, (tokens, layers), "memory", again[REPEATS // 2], "", shown)
        llm.close()
        del llm
        torch.cuda.empty_cache()
        llm = load(bundle, root / "weights", kept)
        for tokens in LENGTHS:
            warm = conversation(tokens, of=1)
            ask(llm, warm[:-NEW])
            ask(llm, warm)
        settle(llm)
        for tokens in LENGTHS:
            for who, cold in (("disk", True), ("disk, files in memory", False)):
                asked = sorted((anew(llm, kept, tokens, cold) for _ in range(REPEATS)), key=lambda one: one.first_token)
                one = asked[REPEATS // 2]
                add(rows, (tokens, layers), who, one, plainly(kept, one.disk_bytes) if cold else "")


def anew(llm: Any, kept: Path, tokens: int, cold: bool) -> Any:
    """A conversation of which the caches' memory holds nothing."""
    engine = llm.engine
    engine.forget_prefixes(engine._executor.identity)
    engine.reap()
    engine.flush(60)
    if cold:
        leave_memory(kept)
    return ask(llm, conversation(tokens))


def device(llm: Any, prompt: list[int]) -> tuple[float, float]:
    """Milliseconds of what the device does for a first token, copies included: what chooses rows, and the rest."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        ask(llm, prompt)
        torch.cuda.synchronize()
    kernels = [event for event in seen.events() if event.device_type.name == "CUDA"]
    choosing = sum(event.device_time_total for event in kernels if event.name in CHOOSING) / 1e3
    return choosing, sum(event.device_time_total for event in kernels) / 1e3 - choosing


def shares(recompute: float, choosing: float, rest: float) -> str:
    """Where the milliseconds go in which rows are computed again."""
    host = recompute - choosing - rest
    return f", of which choosing rows {choosing:.1f}, other kernels {rest:.1f}, host {host:.1f}"


def plainly(folder: Path, size: int) -> str:
    """How fast so many bytes of the files of a folder are read with nothing else done, by one thread and by the best
    number of them."""
    files, rates = list[Path](), dict[int, float]()
    for file in sorted(folder.glob("*/*")):
        if size > 0:
            files.append(file)
            size -= file.stat().st_size
    for threads in (1, 2, 4, 8, 16):
        leave_memory(folder)
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(abs, range(100)))
            begin = time.perf_counter()
            read = sum(pool.map(lambda file: len(file.read_bytes()), files))
            rates[threads] = read / (time.perf_counter() - begin) / 2**20
    best = max(rates, key=lambda threads: rates[threads])
    return f", where as much is read plainly at {rates[1]:.0f}, with {best} threads {rates[best]:.0f}"


def add(rows: Rows, what: tuple[int, int], who: str, one: Any, link: str, more: str = "") -> None:
    """Note a request. what: tokens and layers."""
    speed = f" at {one.disk_bytes / one.transfer / 2**20:.0f} MiB/s{link}" if one.disk_bytes and one.transfer else ""
    note = (
        f"found {one.ram_rows + one.disk_rows}, recomputed {one.recomputed_rows}, {one.disk_bytes / 2**20:.1f} MiB"
        f" read{speed}; ms: queued {one.queued * 1e3:.1f}, index {one.index * 1e3:.1f},"
        f" transfer {one.transfer * 1e3:.1f}, recompute {one.recompute * 1e3:.1f}{more}"
    )
    rows.add(f"resume {what[0]} layers {what[1]}", f"ours, {who}", one.first_token * 1e6, note=note)
