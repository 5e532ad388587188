"""The V3-shaped model of two layers (one dense, one of experts) with random weights, decoding on a static cache."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from deepinfer_compile.backend import counters, deepinfer, executed

STEPS = 64


def build(vocabulary: int = 32768) -> Any:
    """DeepSeek-V3's published widths, bf16, on the GPU."""
    import transformers

    config = transformers.DeepseekV3Config(
        vocab_size=vocabulary, num_hidden_layers=2, first_k_dense_replace=1, max_position_embeddings=32768
    )
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
        for buffer in model.buffers():
            if buffer.dtype.is_floating_point:
                buffer.zero_()
    model.model.rotary_emb = type(model.model.rotary_emb)(config, device="cuda")
    return model


class Decode:
    """Steps at the end of a static cache that holds random latents."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        from transformers import StaticCache

        self.model, self.batch, self.at = model, batch, length
        self.cache = StaticCache(config=model.config, max_cache_len=length + STEPS)
        with torch.no_grad():
            model(torch.randint(3, 1000, (batch, 2), device="cuda"), past_key_values=self.cache, use_cache=True)
            for layer in self.cache.layers:
                layer.keys.normal_()
                layer.values.normal_()
        self.lengths = [layer.cumulative_length for layer in self.cache.layers if hasattr(layer, "cumulative_length")]
        self.tokens = torch.randint(3, 1000, (STEPS, batch, 1), device="cuda")
        self.places = torch.arange(length, length + STEPS, device="cuda").view(STEPS, 1, 1).expand(STEPS, batch, 1)
        self.places = self.places.contiguous()

    def step(self, run: Any, i: int) -> Any:
        for held in self.lengths:
            held.fill_(self.at + i)
        with torch.no_grad():
            return run(
                self.tokens[i], past_key_values=self.cache, use_cache=True, position_ids=self.places[i],
                cache_position=self.places[i, 0],
            ).logits  # fmt: skip


def model(batch: int, length: int, names: list[str]) -> None:
    """Print milliseconds a step of each contestant, after comparing the logits of the last step."""
    built = build()
    runs = {
        "eager": built,
        "inductor": torch.compile(built),
        "deepinfer": torch.compile(built, backend=deepinfer),
        "graphs": torch.compile(built, backend=deepinfer, mode="reduce-overhead"),
    }
    wanted = names or ["inductor", "deepinfer"]
    decode = Decode(built, batch, length)
    for i in range(STEPS):  # every contestant meets the rows that the steps before have written
        last = decode.step(built, i).float()
    for name in wanted:
        torch._dynamo.reset()
        begin = time.perf_counter()
        for i in range(3):
            decode.step(runs[name], i)
        torch.cuda.synchronize()
        compiled = time.perf_counter() - begin
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(STEPS):
                made = decode.step(runs[name], i)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / STEPS * 1e3)
        error = (made.float() - last).abs().max() / last.abs().max()
        print(
            f"model B {batch} cache {length} {name}: {statistics.median(times):.3f} ms a step, "
            f"compiled in {compiled:.0f} s, logits differ from eager by {float(error):.2e} of the largest",
            flush=True,
        )
        if name in ("deepinfer", "graphs"):
            print(f"  {dict(counters)} {dict(executed)}", flush=True)
