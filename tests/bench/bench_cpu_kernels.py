"""Native CPU kernels against what torch offers, on this machine.

`python -m tests.bench.bench_cpu_kernels [float32|bfloat16] [linears attention experts latent]`. Contestants of a row
take turns, and each of their calls is timed by itself. A cell is the sum over the calls of a low quantile (a tenth) of
its times, and in brackets of the median: other processes that take a core away for some milliseconds hit the median of
a busy machine, hardly the tenth. Every row has its own read ceiling (a sum over the same bytes, timed alike), because
the bandwidth of a shared machine drifts by a factor of two within minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu_library import isa, load

HIDDEN, INNER, KV, VOCAB, LAYERS = 576, 1536, 192, 49152, 30  # SmolLM2-135M
HEADS, KV_HEADS, HEAD = 9, 3, 64
EXPERTS, WIDE, NARROW, TOP = 64, 2048, 1024, 8
PATIENCE_S = 30.0  # for the repetitions of one row
Calls = list[Callable[[], object]]
Contestants = dict[str, Calls]


def measure(contestants: Contestants, turns: int) -> dict[str, tuple[float, float]]:
    """Seconds of each: all its calls at their lower tenth, and at their median."""
    times = {name: torch.zeros(turns, len(calls), dtype=torch.float64) for name, calls in contestants.items()}
    for turn in range(-1, turns):
        for name, calls in contestants.items():
            for i, call in enumerate(calls):
                begin = time.perf_counter()
                call()
                times[name][turn, i] = time.perf_counter() - begin
    ordered = {name: ts.sort(0).values.sum(1) for name, ts in times.items()}
    return {name: (float(ts[turns // 10]), float(ts[turns // 2])) for name, ts in ordered.items()}


def row(title: str, contestants: Contestants, turns: int, bytes_read: int, unit: str, amount: float) -> None:
    """One line: `amount` of `unit` a second for each contestant, bandwidth of the first and of the ceiling."""
    found = measure(contestants, turns)
    ceiling = found.pop("read")[0]
    cells = [f"{name} {amount / low:.4g} ({amount / middle:.4g})" for name, (low, middle) in found.items()]
    ours = next(iter(found.values()))[0]
    bandwidth = f"{bytes_read / ours / 1e9:.1f} of {bytes_read / ceiling / 1e9:.1f} GB/s"
    print(f"| {title} | {' | '.join(cells)} {unit} | {bandwidth} = {ceiling / ours:.0%} |", flush=True)


def read(*tensors: Tensor) -> Calls:
    """A pass over the bytes of the tensors."""
    return [t.view(torch.float32).sum for t in tensors]


def bench_linears(dtype: torch.dtype) -> None:
    ops = torch.ops.deepinfer_cpu
    shapes = [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN)]
    shapes.append((HIDDEN, INNER))
    layers = [[torch.randn(n, k).mul_(0.02).to(dtype) for n, k in shapes] for _ in range(LAYERS)]
    head = torch.randn(VOCAB, HIDDEN).mul_(0.02).to(dtype)
    weights = [w for layer in layers for w in layer] + [head]
    fused = torch.compile(lambda x, w: (x * w).sum(-1), dynamic=False)
    none = [None] * 3

    def one_by_one(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> Calls:
        return [partial(linear, y if w.shape[1] == INNER else x, w) for w in weights]

    def grouped(x: Tensor, y: Tensor) -> Calls:
        calls: Calls = []
        for q, k, v, o, gate, up, down in layers:
            calls += [partial(ops.linears, x, [q, k, v], none), partial(ops.linear, x, o, None)]
            calls += [partial(ops.linears, x, [gate, up], none[:2]), partial(ops.linear, y, down, None)]
        return [*calls, partial(ops.linear, x, head, None)]

    for rows in (1, 2, 4, 8, 16, 32, 64, 512):
        x, y = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, INNER).to(dtype)
        run: Contestants = {"ours": grouped(x, y), "F.linear": one_by_one(F.linear, x, y)}
        if rows == 1:
            run["Inductor (x*W).sum"] = one_by_one(fused, x, y)
        run["read"] = read(*weights)
        size = sum(w.numel() * w.element_size() for w in weights)
        row(f"linears, {rows} rows", run, 31 if rows < 64 else 11, size, "tokens/s", rows)


def bench_attention(dtype: torch.dtype) -> None:
    attend = torch.ops.deepinfer_cpu.cached_attention
    for requests, context in ((1, 512), (8, 512), (1, 8192)):
        pages = context // 64
        caches = [torch.randn(requests * pages, 2, 64, KV_HEADS, HEAD).to(dtype) for _ in range(LAYERS)]
        dense = [torch.randn(2, requests, KV_HEADS, context, HEAD).to(dtype) for _ in range(LAYERS)]
        table = torch.randperm(requests * pages).view(requests, pages).int()
        q, k = torch.randn(requests, HEADS, HEAD).to(dtype), torch.randn(requests, KV_HEADS, HEAD).to(dtype)
        meta = [torch.arange(requests + 1).int(), torch.full((requests,), context).int(), table]
        meta.append(table[:, -1].long() * 64 + 63)

        sdpa = partial(F.scaled_dot_product_attention, q[:, :, None], enable_gqa=True)
        run: Contestants = {
            "ours": [partial(attend, q, k, k, kv, *meta, 0.125, 0, 0.0, None) for kv in caches],
            "SDPA": [partial(sdpa, keys, values) for keys, values in dense],
            "read": read(*caches),
        }
        size = sum(kv.numel() * kv.element_size() for kv in caches)
        row(f"attention of {LAYERS} layers, {requests} x {context}", run, 21, size, "tokens/s", requests)
    for tokens, heads, kv_heads, width in ((512, HEADS, KV_HEADS, HEAD), (512, 32, 8, 128)):
        q, k = torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, kv_heads, width).to(dtype)
        kv = torch.zeros(tokens // 64, 2, 64, kv_heads, width).to(dtype)
        meta = [torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), torch.arange(tokens // 64).int()[None]]
        meta.append(torch.arange(tokens))
        turned = [t.transpose(0, 1)[None] for t in (q, k)]
        sdpa = partial(F.scaled_dot_product_attention, *turned, turned[1], is_causal=True, enable_gqa=True)
        ours = partial(attend, q, k, k, kv, *meta, 0.125, 0, 0.0, None)
        run = {"ours": [ours], "SDPA": [sdpa], "read": read(kv)}
        row(f"prefill {tokens} tokens, {heads}/{kv_heads} heads of {width}", run, 61, kv.nbytes, "calls/s", 1)


def eager_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in ids.unique().tolist():
        token, place = (ids == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w13[e]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, w2[e])
        out.index_add_(0, token, y * weights[token, place, None].to(y.dtype))
    return out


def bench_experts(dtype: torch.dtype) -> None:
    experts = torch.ops.deepinfer_cpu.experts
    w13, w2 = torch.randn(EXPERTS, 2 * NARROW, WIDE).to(dtype), torch.randn(EXPERTS, WIDE, NARROW).to(dtype)
    w13.mul_(0.02), w2.mul_(0.02)
    t13, t2 = w13.view(EXPERTS, WIDE, 2 * NARROW), w2.view(EXPERTS, NARROW, WIDE)
    for tokens in (1, 8, 64, 512):
        x, weights = torch.randn(tokens, WIDE).to(dtype), torch.rand(tokens, TOP)
        ids = torch.rand(tokens, EXPERTS).argsort(1)[:, :TOP].int()
        hit = ids.unique().numel()
        size = hit * (w13[0].nbytes + w2[0].nbytes)

        flat = partial(experts, x, ids, weights, w13, w2, None, None, "silu", 0.0, 0.0, False, False)
        turned = partial(experts, x, ids, weights, t13, t2, None, None, "silu", 0.0, 0.0, True, True)
        run: Contestants = {
            "ours": [flat],
            "ours transposed": [turned],
            "eager": [partial(eager_experts, x, ids, weights, w13, w2)],
            "read": read(*(w[e] for w in (w13, w2) for e in range(hit))),
        }
        row(f"experts, {tokens} tokens, {hit} hit", run, 51 if tokens < 64 else 11, size, "tokens/s", tokens)


def eager_latent(q: list[Tensor], rows: Tensor, kv_b: Tensor, new: int) -> None:
    """Attention over keys and values expanded from rows [R, context, latent + rope], as Transformers does it."""
    heads, latent = kv_b.shape[0], kv_b.shape[2]
    nope = q[0].shape[2]
    both = F.linear(rows[..., :latent], kv_b.view(-1, latent)).view(*rows.shape[:2], heads, -1)
    keys = torch.cat([both[..., :nope], rows[:, :, None, latent:].expand(-1, -1, heads, -1)], -1)
    query = torch.cat(q, -1).view(rows.shape[0], new, heads, -1)
    F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, keys, both[..., nope:])), is_causal=new > 1)


def bench_latent(dtype: torch.dtype) -> None:
    attend = torch.ops.deepinfer_cpu.cached_latent_attention
    heads, nope, rope, latent, value = 16, 128, 64, 512, 128
    kv_b = torch.randn(heads, nope + value, latent).mul_(0.05).to(dtype)
    w_uk, w_uv = kv_b[:, :nope], kv_b[:, nope:].transpose(1, 2)
    for requests, new, context in ((1, 1, 2048), (8, 1, 2048), (1, 512, 512)):
        pages, tokens = context // 64, requests * new
        cache = torch.randn(requests * pages, 64, latent + rope).to(dtype)
        table = torch.randperm(requests * pages).view(requests, pages).int()
        last = torch.arange(context - new, context)
        slot = (table[:, last // 64].long() * 64 + last % 64).flatten()
        meta = [torch.arange(requests + 1).int() * new, torch.full((requests,), context).int(), table, slot]
        q = [torch.randn(tokens, heads, w).to(dtype) for w in (nope, rope)]
        k = [torch.randn(tokens, w).to(dtype) for w in (latent, rope)]

        forms = ("absorbed", "expanded") if new == 1 else ("expanded", "absorbed")
        run: Contestants = {f: [partial(attend, *q, *k, w_uk, w_uv, cache, *meta, 0.07, f)] for f in forms}
        run["eager expansion"] = [partial(eager_latent, q, cache.view(requests, -1, latent + rope), kv_b, new)]
        run["read"] = read(cache, kv_b)
        title = f"latent attention, {requests} x {context}, {new} new"
        row(title, run, 31, cache.nbytes + kv_b.nbytes, "tokens/s", tokens)


def main(arguments: list[str]) -> None:
    load()
    dtypes = [torch.bfloat16 if a == "bfloat16" else torch.float32 for a in arguments if "float" in a]
    parts = {"linears": bench_linears, "attention": bench_attention, "experts": bench_experts, "latent": bench_latent}
    for dtype in dtypes or [torch.float32, torch.bfloat16]:
        print(f"{isa()}, {torch.get_num_threads()} threads, torch {torch.__version__}, {dtype}", flush=True)
        for name, part in parts.items():
            if name in arguments or not set(arguments) & set(parts):
                part(dtype)


if __name__ == "__main__":
    main(sys.argv[1:])
