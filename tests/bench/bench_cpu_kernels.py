"""Native CPU kernels against what torch offers, on this machine.

`python -m tests.bench.bench_cpu_kernels [float32|bfloat16] [linears attention experts latent]`. Contestants of a row
take turns, a cell is the median over the turns with the lower and upper quartile, and every row has its own read
ceiling (a sum over the same bytes), because the bandwidth of a shared machine drifts by a factor of two within minutes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cpu_library import isa, load

HIDDEN, INNER, KV, VOCAB, LAYERS = 576, 1536, 192, 49152, 30  # SmolLM2-135M
HEADS, KV_HEADS, HEAD = 9, 3, 64
EXPERTS, WIDE, NARROW, TOP = 64, 2048, 1024, 8
Contestants = dict[str, Callable[[], object]]


def quartiles(contestants: Contestants, turns: int) -> dict[str, tuple[float, float, float]]:
    """Seconds (lower quartile, median, upper quartile) of each, all taking turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(-1, turns):
        for name, run in contestants.items():
            begin = time.perf_counter()
            run()
            if turn >= 0:
                times[name].append(time.perf_counter() - begin)
    ordered = {name: sorted(ts) for name, ts in times.items()}
    return {name: (ts[turns // 4], ts[turns // 2], ts[3 * turns // 4]) for name, ts in ordered.items()}


def row(title: str, contestants: Contestants, turns: int, bytes_read: int, unit: str, amount: float) -> None:
    """One line: `amount` of `unit` a second for each contestant, bandwidth of the first and of the ceiling."""
    found = quartiles(contestants, turns)
    ceiling = found.pop("read")
    cells = [f"{name} {amount / t[1]:.4g} ({amount / t[2]:.4g}-{amount / t[0]:.4g})" for name, t in found.items()]
    ours = next(iter(found.values()))[1]
    bandwidth = f"{bytes_read / ours / 1e9:.1f} of {bytes_read / ceiling[1] / 1e9:.1f} GB/s"
    print(f"| {title} | {' | '.join(cells)} {unit} | {bandwidth} = {ceiling[1] / ours:.0%} |", flush=True)


def read(*tensors: Tensor) -> Callable[[], None]:
    """A pass over the bytes of the tensors, each a few megabytes or more."""
    views = [t.view(torch.float32) for t in tensors]

    def run() -> None:
        for view in views:
            view.sum()

    return run


def bench_linears(dtype: torch.dtype) -> None:
    ops = torch.ops.deepinfer_cpu
    shapes = [(HIDDEN, HIDDEN), (KV, HIDDEN), (KV, HIDDEN), (HIDDEN, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN)]
    shapes.append((HIDDEN, INNER))
    layers = [[torch.randn(n, k).mul_(0.02).to(dtype) for n, k in shapes] for _ in range(LAYERS)]
    head = torch.randn(VOCAB, HIDDEN).mul_(0.02).to(dtype)
    weights = [w for layer in layers for w in layer] + [head]
    fused = torch.compile(lambda x, w: (x * w).sum(-1), dynamic=False)
    none = [None] * 3

    def one_by_one(linear: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        for layer in layers:
            for w in layer:
                linear(y if w.shape[1] == INNER else x, w)
        linear(x, head)

    def grouped(x: Tensor, y: Tensor) -> None:
        for q, k, v, o, gate, up, down in layers:
            ops.linears(x, [q, k, v], none)
            ops.linear(x, o, None)
            ops.linears(x, [gate, up], none[:2])
            ops.linear(y, down, None)
        ops.linear(x, head, None)

    for rows in (1, 2, 4, 8, 16, 32, 64, 512):
        x, y = torch.randn(rows, HIDDEN).to(dtype), torch.randn(rows, INNER).to(dtype)
        run: Contestants = {
            "ours": lambda x=x, y=y: grouped(x, y),
            "F.linear": lambda x=x, y=y: one_by_one(F.linear, x, y),
        }
        if rows == 1:
            run["Inductor (x*W).sum"] = lambda x=x, y=y: one_by_one(fused, x, y)
        run["read"] = read(*weights)
        size = sum(w.numel() * w.element_size() for w in weights)
        row(f"linears, {rows} rows", run, 21 if rows < 64 else 7, size, "tokens/s", rows)


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

        def ours(caches=caches, q=q, k=k, meta=meta) -> None:  # type: ignore[no-untyped-def]
            for kv in caches:
                attend(q, k, k, kv, *meta, 0.125, 0, 0.0, None)

        def eager(dense=dense, q=q) -> None:  # type: ignore[no-untyped-def]
            for keys, values in dense:
                F.scaled_dot_product_attention(q[:, :, None], keys, values, enable_gqa=True)

        size = sum(kv.numel() * kv.element_size() for kv in caches)
        title = f"attention of {LAYERS} layers, {requests} x {context}"
        row(title, {"ours": ours, "SDPA": eager, "read": read(*caches)}, 15, size, "tokens/s", requests)
    for tokens, heads, kv_heads, width in ((512, HEADS, KV_HEADS, HEAD), (512, 32, 8, 128)):
        q, k = torch.randn(tokens, heads, width).to(dtype), torch.randn(tokens, kv_heads, width).to(dtype)
        kv = torch.zeros(tokens // 64, 2, 64, kv_heads, width).to(dtype)
        meta = [torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int(), torch.arange(tokens // 64).int()[None]]
        meta.append(torch.arange(tokens))
        turned = [t.transpose(0, 1)[None] for t in (q, k)]
        run: Contestants = {
            "ours": lambda q=q, k=k, kv=kv, meta=meta: attend(q, k, k, kv, *meta, 0.125, 0, 0.0, None),
            "SDPA": lambda t=turned: F.scaled_dot_product_attention(*t, t[1], is_causal=True, enable_gqa=True),
            "read": read(kv),
        }
        row(f"prefill {tokens} tokens, {heads}/{kv_heads} heads of {width}", run, 31, kv.nbytes, "calls/s", 1)


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

        def flat(x=x, ids=ids, weights=weights) -> Tensor:  # type: ignore[no-untyped-def]
            return experts(x, ids, weights, w13, w2, None, None, "silu", 0.0, 0.0, False, False)

        def turned(x=x, ids=ids, weights=weights) -> Tensor:  # type: ignore[no-untyped-def]
            return experts(x, ids, weights, t13, t2, None, None, "silu", 0.0, 0.0, True, True)

        run: Contestants = {
            "ours": flat,
            "ours transposed": turned,
            "eager": lambda x=x, ids=ids, weights=weights: eager_experts(x, ids, weights, w13, w2),
            "read": read(w13[:hit], w2[:hit]),
        }
        row(f"experts, {tokens} tokens, {hit} hit", run, 21 if tokens < 64 else 5, size, "tokens/s", tokens)


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

        def eager(q=q, cache=cache, requests=requests, new=new) -> None:  # type: ignore[no-untyped-def]
            rows = cache.view(requests, -1, latent + rope)
            both = F.linear(rows[..., :latent], kv_b.view(-1, latent)).view(requests, -1, heads, nope + value)
            keys = torch.cat([both[..., :nope], rows[:, :, None, latent:].expand(-1, -1, heads, -1)], -1)
            query = torch.cat(q, -1).view(requests, new, heads, -1)
            turned = [t.transpose(1, 2) for t in (query, keys, both[..., nope:])]
            F.scaled_dot_product_attention(*turned, is_causal=new > 1)

        run: Contestants = {
            form: lambda form=form, a=(*q, *k, w_uk, w_uv, cache, *meta): attend(*a, 0.07, form)
            for form in (("absorbed", "expanded") if new == 1 else ("expanded", "absorbed"))
        }
        run |= {"eager expansion": eager, "read": read(cache, kv_b)}
        title = f"latent attention, {requests} x {context}, {new} new"
        row(title, run, 15, cache.nbytes + kv_b.nbytes, "tokens/s", tokens)


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
