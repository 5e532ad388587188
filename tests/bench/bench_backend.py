"""torch.compile(model, backend="deepinfer") beside backend="inductor" and eager: the median step on this CPU, fp32.

`python -m tests.bench.bench_backend [NAME ...]`: four layers of width 768 of every architecture (or of those named), a
decode step at position 200 of a static cache of 256 (without windows, whose caches move at every step), and a
forward of 128 tokens. `... latent`: DeepSeek-V3, two layers, 16 heads and its own widths, decoding on a static cache of
2048, at batch 1 and 4. The contestants take turns in one process, so that what else the machine does meets all of them.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.backend import deepinfer
from tests import models

ROUNDS = 15
WIDE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
MOE: dict[str, Any] = {"moe_intermediate_size": 384}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 12,
    "kv_lora_rank": 192,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 48,
}
WHOLE: dict[str, Any] = {"layer_types": ["full_attention"] * 4}
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 64},
    "gemma": {"head_dim": 64, "query_pre_attn_scalar": 64, **WHOLE},
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 768},
    "qwen3_moe": {**MOE, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4},
    "olmoe": {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 384},
    "gpt_oss": {
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "intermediate_size": 384,
        **WHOLE,
    },
    "glm4_moe": {**MOE, "head_dim": 64, "n_routed_experts": 16, "num_experts_per_tok": 4},
    "deepseek_v2": {**MOE, **LATENT, "q_lora_rank": None},
    "deepseek_v3": {**MOE, **LATENT},
}
PUBLISHED: dict[str, Any] = {
    "hidden_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 4096,
}


def contestants(model: Any) -> dict[str, Any]:
    return {"eager": model, "inductor": torch.compile(model), "deepinfer": torch.compile(model, backend=deepinfer)}


def decode(model: Any, batch: int, length: int, at: int) -> Callable[[Any], Any]:
    """One decode step on a static cache whose first `at` rows are taken."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=length)
    ids = torch.randint(3, models.VOCAB, (batch, at))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]
    place, token = torch.full((batch, 1), at), ids[:, :1]

    def step(run: Any) -> Tensor:
        for held in lengths:
            held.fill_(at)
        logits: Tensor = run(token, past_key_values=cache, use_cache=True, position_ids=place).logits
        return logits

    return step


def prefill(batch: int, length: int) -> Callable[[Any], Any]:
    ids = torch.randint(3, models.VOCAB, (batch, length))
    return lambda run: run(ids, use_cache=False).logits


def measure(runs: dict[str, Any], step: Callable[[Any], Any]) -> dict[str, float]:
    """Median milliseconds of each contestant, taking turns; their results are compared first."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    with torch.no_grad():
        results = {name: step(run) for name, run in runs.items()}
        for result in results.values():
            torch.testing.assert_close(result, results["eager"], rtol=0, atol=1e-4)
        for _ in range(ROUNDS):
            for name, run in runs.items():
                begin = time.perf_counter()
                step(run)
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) * 1e3 for name, times in seconds.items()}


def report(what: str, times: dict[str, float]) -> None:
    columns = "  ".join(f"{name} {ms:8.2f} ms" for name, ms in times.items())
    print(f"{what:28s} {columns}  {times['inductor'] / times['deepinfer']:.2f}x Inductor", flush=True)


def main(names: list[str]) -> None:
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, fp32")
    if names == ["latent"]:
        model = models.make("deepseek_v3", **PUBLISHED)
        for batch in (1, 4):
            torch._dynamo.reset()
            report(f"deepseek_v3 2048 batch {batch}", measure(contestants(model), decode(model, batch, 2048, 1900)))
        return
    for name in names or list(models.CONFIGS):
        model = models.make(name, **{**WIDE, **CHANGES.get(name, {})})
        torch._dynamo.reset()
        report(f"{name} decode", measure(contestants(model), decode(model, 1, 256, 200)))
        torch._dynamo.reset()
        report(f"{name} 128 tokens", measure(contestants(model), prefill(1, 128)))


if __name__ == "__main__":
    main(sys.argv[1:])
