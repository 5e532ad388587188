"""The V3-shaped model of two layers (one dense, one of experts) with random weights, decoding on a static cache."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from deepinfer_compile.backend import counters, deepinfer, executed
from tests.bench.gpu_rows import Rows

STEPS = 64
LONGEST, NEW = 1000, 128
"""Of `generate`: tokens of the longest prompt, and new ones."""


def config(vocabulary: int = 32768) -> Any:
    """DeepSeek-V3's published widths, two layers."""
    import transformers

    found = transformers.DeepseekV3Config(
        vocab_size=vocabulary, num_hidden_layers=2, first_k_dense_replace=1, max_position_embeddings=32768
    )
    found._experts_implementation = "grouped_mm"
    return found


def build() -> Any:
    """The model on the GPU, bf16, with random weights."""
    import transformers

    torch.manual_seed(0)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0) if "norm" in name else weight.normal_(0, 0.02)
        for buffer in model.buffers():
            if buffer.dtype.is_floating_point:
                buffer.zero_()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config, device="cuda")
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


def moved_bytes(model: Any, batch: int, length: int, hit: int) -> int:
    """What a decode step must read: every weight but the embedding, of experts those hit, and the latents."""
    total = 0
    for name, weight in model.named_parameters():
        share = hit / weight.shape[0] if ".experts." in name else 0 if "embed_tokens" in name else 1
        total += int(weight.numel() * share) * weight.element_size()
    config = model.config
    row = config.kv_lora_rank + config.qk_rope_head_dim
    return total + batch * length * row * 2 * int(config.num_hidden_layers)


class Hits:
    """How many experts the last call of a model read."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self.hook = model.model.layers[-1].mlp.experts.register_forward_pre_hook(self._note)

    def _note(self, module: Any, args: tuple[Any, ...]) -> None:
        self.count = len(args[1].unique())


def contestants(built: Any) -> dict[str, Any]:
    """What a user may call in place of the model."""
    return {
        "eager": built,
        "Inductor": torch.compile(built),
        "ours": torch.compile(built, backend=deepinfer),
        "ours, CUDA graphs": torch.compile(built, backend=deepinfer, mode="reduce-overhead"),
    }


def decode(rows: Rows, built: Any, batch: int, length: int, names: Sequence[str]) -> None:
    """Microseconds a step of each contestant, wall time with Python, after comparing the logits of the last step."""
    state = Decode(built, batch, length)
    hits = Hits(built)
    for i in range(STEPS):  # every contestant meets the rows that the steps before have written
        last = state.step(built, i).float()
    hits.hook.remove()
    moved = moved_bytes(built, batch, length, hits.count)
    runs = contestants(built)
    for name in names or ("Inductor", "ours", "ours, CUDA graphs"):
        torch._dynamo.reset()
        begin = time.perf_counter()
        for i in range(3):
            state.step(runs[name], i)
        torch.cuda.synchronize()
        compiled = time.perf_counter() - begin
        times = []
        for _ in range(3 if name.startswith("ours") else 1):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for i in range(STEPS):
                made = state.step(runs[name], i)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) / STEPS * 1e6)
        error = float((made.float() - last).abs().max() / last.abs().max())
        note = f"compiled in {compiled:.0f} s, {hits.count} experts hit, off eager by {error:.1e} of the largest logit"
        rows.add(f"decode B {batch} cache {length}", name, statistics.median(times), moved=moved, note=note)
        if name.startswith("ours"):
            print(f"  {dict(counters)} {dict(executed)}", flush=True)


def generate(rows: Rows, built: Any, batch: int, names: Sequence[str]) -> None:
    """Microseconds a new token of `model.generate`, prompts included: left-padded ones of 17 to 1000 tokens, a static
    cache of 4096, greedy. The first call, which compiles, is not counted."""
    from transformers import CompileConfig, StaticCache

    lengths = torch.linspace(17, LONGEST, batch).round().int().tolist()
    ids = torch.randint(3, 1000, (batch, LONGEST), device="cuda")
    mask = torch.stack([torch.arange(LONGEST, device="cuda") >= LONGEST - n for n in lengths]).long()
    ways = {"Inductor": {"backend": "inductor"}, "ours": {"backend": deepinfer}}
    made: dict[str, Any] = {}
    for name in names or ways:
        torch._dynamo.reset()
        built.__dict__.pop("_compiled_call", None)
        how = {"attention_mask": mask, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        how["compile_config"] = CompileConfig(mode="default", fullgraph=False, **ways[name])
        for count in (8, NEW, NEW):
            cache = StaticCache(config=built.config, max_cache_len=4096)
            torch.cuda.synchronize()
            begin = time.perf_counter()
            made[name] = built.generate(ids, past_key_values=cache, max_new_tokens=count, min_new_tokens=count, **how)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - begin
        other = made.get("Inductor")
        same = "" if other is None or name == "Inductor" else f"{_alike(made[name], other)} tokens as Inductor's, "
        if name == "ours":
            same += f"{dict(executed)}"
        rows.add(f"generate B {batch}, {NEW} tokens", name, seconds / NEW * 1e6, note=same)


def _alike(one: torch.Tensor, other: torch.Tensor) -> str:
    fresh = (one == other)[:, LONGEST:]
    return f"{int(fresh.sum())} of {fresh.numel()}"


def prefill(rows: Rows, built: Any, tokens: int, names: Sequence[str]) -> None:
    """Microseconds of reading a prompt without a cache, logits of the last row only."""
    ids = torch.randint(3, 1000, (1, tokens), device="cuda")
    runs = contestants(built)
    flops = prefill_flops(built, tokens)
    with torch.no_grad():
        last = built(ids, use_cache=False, logits_to_keep=1).logits.float()
        for name in names or ("eager", "Inductor", "ours"):
            torch._dynamo.reset()
            times = []
            for _ in range(9):
                torch.cuda.synchronize()
                begin = time.perf_counter()
                made = runs[name](ids, use_cache=False, logits_to_keep=1).logits
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begin) * 1e6)
            error = float((made.float() - last).abs().max() / last.abs().max())
            note = f"off eager by {error:.1e} of the largest logit"
            rows.add(f"prefill {tokens}", name, statistics.median(times[2:]), flops=flops, note=note)
            if name.startswith("ours"):
                print(f"  {dict(counters)} {dict(executed)}", flush=True)


def prefill_flops(model: Any, tokens: int) -> float:
    """Products of a prompt: linear layers, experts taken, and attention expanded and causal."""
    config, total = model.config, 0.0
    for name, weight in model.named_parameters():
        share = config.num_experts_per_tok / weight.shape[0] if ".experts." in name else 1.0
        if weight.dim() > 1 and "embed_tokens" not in name and "lm_head" not in name:
            total += 2 * tokens * weight.numel() * share
    width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    return total + config.num_hidden_layers * config.num_attention_heads * width * float(tokens) ** 2
