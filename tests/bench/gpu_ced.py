"""A causal encoder-decoder of published widths as a bundle: prompts with and without replay, and decode steps.

DeepSeek-V4.1's widths, 12 layers (6 below the boundary, 6 above it; every role of keys and of choices), 64 experts,
small memory tables, bf16, random weights. Caches hold bf16 too, in the mode `packed` the published bytes. `python -m
tests.bench.gpu_ced OUT` builds the bundles without a GPU, for BENCH_CED, and those of `gpu_resume`; `python -m
tests.bench.bench_gpu ced` measures them, or builds them first.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

import deepinfer_compile as dc
from deepinfer_compile.capture import capture
from deepinfer_compile.models.deepseek_v41.config import DeepseekV41Config
from deepinfer_compile.models.deepseek_v41.engram import plain_map, table_sizes
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.models.deepseek_v41.storage import KEYS, PLAIN, PUBLISHED, ROWS, WINDOW, Forms
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.prefill_work import PrefillWork
from tests.bench.gpu_bundle import target
from tests.bench.gpu_rows import READ_CEILING, Rows

KEEP = 140
"""Rows of a prompt that the decoder reads: a window, and a block of drafts with room to go back."""
PROMPT, CONTEXT, ROOM, CHUNK, STEPS = 32768, 8192, 33024, 8192, 32
BATCHES = (1, 128)
MODES = {"off": (0, PLAIN), "compact": (KEEP, PLAIN), "packed": (KEEP, PUBLISHED)}
"""Rows that are kept, and how caches hold theirs."""
SHAPE: dict[str, Any] = {
    "vocab_size": 32768,
    "num_hidden_layers": 12,
    "compress_ratios": (0, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    "kv_source_layer_ids": (1, 3, 6),
    "index_source_layer_ids": (1, 3, 6, 9),
    "candidate_source_layer_id": 6,
    "engram_layer_ids": (1,),
    "engram_vocab_size": 10000,
    "engram_compressed_vocab_size": 20000,
    "n_routed_experts": 64,
    "num_nextn_predict_layers": 0,
    "dspark_target_layer_ids": (),
}


def config(**changes: Any) -> DeepseekV41Config:
    """The shape; rows of memory tables follow from the rest."""
    shape = SHAPE | changes
    found = DeepseekV41Config(**shape, engram_num_embeddings=(0,) * len(shape["engram_layer_ids"]))
    return found.with_(engram_num_embeddings=tuple(sum(sizes) for sizes in table_sizes(found).values()))


def make(forms: Forms = PLAIN, **changes: Any) -> DeepseekV41:
    """The model in bf16, its weights on the meta device."""
    shape = config(**changes)
    with torch.device("meta"):
        model = DeepseekV41(shape, plain_map(shape), forms).eval().to(torch.bfloat16).requires_grad_(False)
    model.token_map = plain_map(shape)
    return model


def build(out: Path, targets: list[str]) -> Path:
    """The bundles without weights, and what a prompt costs. Needs no GPU."""
    out.mkdir(parents=True, exist_ok=True)
    for name, (keep, forms) in MODES.items():
        folder = out / f"{name}.bundle"
        dc.build(make(forms), folder, target=targets, weights="none", max_model_len=ROOM, keep=keep)
    work = PrefillWork(Pipeline((Canonicalize(),)).run(capture(make()))[0]).saving(PROMPT, KEEP)
    (out / "work.json").write_text(json.dumps({"off": work.whole, "compact": work.inside, "packed": work.inside}))
    return out


def save_weights(folder: Path, device: str, **changes: Any) -> None:
    """Random weights, a file a layer."""
    groups: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, weight in make(**changes).named_parameters():
        head = ".".join(name.split(".")[:2]) if name.startswith("layers.") else "rest"
        groups.setdefault(head, {})[name] = tuple(weight.shape)
    files = {group: f"{group}.safetensors" for group in groups}

    def write(group: str) -> None:
        made = {n: _drawn(n, shape, device).cpu() for n, shape in groups[group].items()}
        save_file(made, folder / files[group])

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, groups))
    index = {name: files[group] for group, names in groups.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def _drawn(name: str, shape: tuple[int, ...], device: str) -> torch.Tensor:
    weight = torch.empty(shape, dtype=torch.bfloat16, device=device)
    if len(shape) == 1 or "q_weight" in name or "k_weight" in name:
        return weight.fill_(1.0) if "norm" in name or "scale" in name or "weight" in name else weight.zero_()
    return weight.normal_(0, 0.02)


def ced(rows: Rows) -> None:
    """Microseconds of a prompt, off and compact, and of a decode step. BENCH_CED names bundles built elsewhere."""
    with tempfile.TemporaryDirectory() as name:
        given, folder = os.environ.get("BENCH_CED"), Path(name)
        bundles = Path(given) if given else build(folder / "bundles", [target()])
        begin = time.perf_counter()
        save_weights(folder, "cuda")
        print(f"weights saved in {time.perf_counter() - begin:.0f} s", flush=True)
        work = json.loads((bundles / "work.json").read_text())
        for mode in MODES:
            begin = time.perf_counter()
            llm: Any = dc.load(
                bundles / f"{mode}.bundle",
                checkpoint=folder,
                max_num_seqs=BATCHES[-1],
                max_num_batched_tokens=CHUNK,
                enable_prefix_caching=False,
            )
            print(f"{mode}: loaded in {time.perf_counter() - begin:.0f} s", flush=True)
            prompt(rows, llm, mode, work[mode])
            for batch in BATCHES if mode != "off" else ():
                decode(rows, llm, mode, batch)
            del llm
            torch.cuda.empty_cache()


def _read(engine: Any, prompts: list[list[int]], tokens: int) -> float:
    """Seconds until every prompt has a token."""
    params = dc.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests = [engine.make(str(i), p, params) for i, p in enumerate(prompts)]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for request in requests:
        engine.add(request)
    while not all(request.output_ids for request in requests):
        engine.step()
    return time.perf_counter() - begin


def _finish(engine: Any) -> None:
    while engine.alive:
        engine.step()


def prompts(count: int, length: int) -> list[list[int]]:
    """The same at every call."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, SHAPE["vocab_size"], (count, length), generator=generator).tolist()


def prompt(rows: Rows, llm: Any, mode: str, flops: int) -> None:
    """One prompt, read in chunks; the first reading is not counted."""
    times = []
    for _ in range(4):
        times.append(_read(llm.engine, prompts(1, PROMPT), 1))
        _finish(llm.engine)
    us = statistics.median(times[1:]) * 1e6
    note = f"{PROMPT / us * 1e6:.0f} tokens/s, {flops / us / 1e6:.0f} TFLOP/s"
    rows.add(f"ced prompt of {PROMPT}", f"ours, {mode}", us, flops=flops, note=note)


def decode(rows: Rows, llm: Any, mode: str, batch: int) -> None:
    """Steps of one token each behind prompts of CONTEXT tokens."""
    engine, times = llm.engine, []
    # the first requests go on while the last are read
    read = _read(engine, prompts(batch, CONTEXT), 2 * batch + STEPS + 60)
    for _ in range(STEPS):
        begin = time.perf_counter()
        engine.step()
        times.append((time.perf_counter() - begin) * 1e6)
    assert engine.alive == batch
    us, moved = statistics.median(times[4:]), moved_bytes(batch, MODES[mode][1])
    note = f"{us * READ_CEILING / 1e6 / moved:.2f} x the floor, {launches(engine)} launches a step, "
    note += f"prompts read at {batch * CONTEXT / read:.0f} tokens/s"
    rows.add(f"ced decode B {batch} context {CONTEXT}", f"ours, {mode}", us, moved=moved, note=note)
    _finish(engine)


def launches(engine: Any) -> int:
    """Kernels that the device runs in one step."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        engine.step()
        torch.cuda.synchronize()
    return sum("Mem" not in event.name for event in seen.events() if event.device_type.name == "CUDA")


def moved_bytes(batch: int, forms: Forms) -> int:
    """What a step must read: weights but tables, experts that even routing hits, windows, chosen rows, index keys."""
    shape, total = config(), 0
    hit = 1 - (1 - shape.num_experts_per_tok / shape.n_routed_experts) ** batch
    for name, weight in make().named_parameters():
        share = hit if ".experts." in name else 0.0 if name.endswith("embed.weight") else 1.0
        total += int(weight.numel() * share) * 2
    window, row, key = shape.head_dim * 2, shape.head_dim * 2, shape.index_head_dim * 2
    if forms is PUBLISHED:
        window, row, key = WINDOW.nbytes(shape.head_dim), ROWS.nbytes(shape.head_dim), KEYS.nbytes(shape.index_head_dim)
    reads = shape.index_topk * sum(r > 0 for r in shape.compress_ratios) * row
    reads += shape.sliding_window * shape.num_hidden_layers * window
    keys = sum(CONTEXT // shape.compress_ratios[i] for i in shape.index_source_layer_ids)
    return total + batch * (reads + keys * key)


if __name__ == "__main__":
    from tests.bench import gpu_resume

    chips = sys.argv[2:] or ["nvidia-sm90"]
    made = build(Path(sys.argv[1]), chips)
    for layers in gpu_resume.LAYERS:
        gpu_resume.build(made / gpu_resume.name_of(layers), chips, layers)
