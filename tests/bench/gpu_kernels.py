"""Latent attention and the expert block alone: replayed CUDA graphs with a cold cache of the chip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.functional import silu

from deepinfer_compile import ops
from deepinfer_compile.kernel_ops import jit_call
from deepinfer_compile.kernels import AnySpec, Call, Case, specs
from deepinfer_compile.sweep_machine import GraphTimer
from deepinfer_compile.targets import device_limits
from tests.bench.gpu_rows import Rows

LATENT = (
    (1, 128, 8192), (16, 128, 4096), (64, 128, 4096), (128, 128, 4096), (128, 16, 4096), (128, 64, 4096)
)  # fmt: skip
"""Requests, heads, context."""
PROMPTS = ((1, 8192, 8192), (4, 2048, 2048), (16, 512, 512), (1, 2048, 8192))
"""Requests, new tokens of each, context."""
TOKENS = (1, 16, 64, 128, 512, 4096)
STORED = ((1, 1, 8192), (1, 1, 262144), (128, 1, 8192), (1, 64, 65536), (1, 2048, 32768))
"""Requests, new tokens of each, context."""


def graphed(run: Callable[[], Any], repeat: int = 1) -> float:
    """Median microseconds of one run in a replayed CUDA graph of `repeat` runs; the cache of the chip is flushed."""
    return GraphTimer().repeated(run, repeat).us


def measure(
    spec: AnySpec, params: Any, config: Any, given: dict[str, Any], together: Sequence[str] = ()
) -> dict[str, float]:
    """Microseconds of each launch alone, of those named `together` in one graph, and of all."""
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    call = jit_call(spec, params, config, tensors)
    found = {name: graphed(run) for name, run in call.launches}
    some = [run for name, run in call.launches if name in together]
    return {**found, "together": graphed(lambda: [run() for run in some]) if some else 0.0, "all": graphed(call)}


def operands(spec: AnySpec, params: Any, new: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    """A batch over pages of 64 with a shuffled table."""
    torch.set_default_device("cuda")
    try:
        given = spec.inputs(Case("", params, new, lengths), torch.Generator("cuda").manual_seed(0))
    finally:
        torch.set_default_device("cpu")
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in given.items()}


def latent_case(heads: int, lengths: tuple[int, ...]) -> tuple[AnySpec, Any, dict[str, Any]]:
    """V3's latent attention of one new token a request."""
    spec = next(s for s in specs() if s.op is ops.CACHED_LATENT_ATTENTION)
    case = next(c for c in spec.cases if c.name == "typical")
    params = replace(case.params, heads=heads)
    return spec, params, operands(spec, params, (1,) * len(lengths), lengths)


def prompts(rows: Rows) -> None:
    """V3's latent attention of prompts, expanded and absorbed. The note has the rate of the launch that attends."""
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    found = {s.name: s for s in specs() if s.op is ops.CACHED_LATENT_ATTENTION}
    spec, old = found["latent_prefill"], found["latent_attention"]
    params, absorbed = (next(c.params for c in s.cases if c.name == "prefill") for s in (spec, old))
    for batch, new, keys in PROMPTS:
        work, counts = f"latent prompts B {batch} T {new} S {keys}", ((new,) * batch, (keys,) * batch)
        given = operands(spec, params, *counts)
        times = measure(spec, params, spec.default(params, limits, batch * new), given)
        size = spec.work(params, *counts)
        causal = batch * new * (new + 1) * params.heads * (params.nope + params.rope + params.value)
        note = f"{causal / times['attend'] / 1e6:.0f} TFLOP/s  "
        note += "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        rows.add(work, "ours", times["all"], moved=size.bytes, flops=size.flops, note=note)
        us = measure(old, absorbed, old.default(absorbed, limits, batch * new), given)["all"]
        rows.add(work, "ours, absorbed", us, moved=size.bytes, flops=size.flops)


def flashinfer(params: Any, given: dict[str, Any]) -> Callable[[], Any] | None:
    """FlashInfer's attention over the same pages with absorbed queries, None where it is not installed."""
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError:
        return None
    lengths, table = given["seq_len"], given["block_table"]
    pages = (lengths + params.page - 1) // params.page
    used = torch.arange(table.shape[1], device="cuda")[None] < pages[:, None]
    ends = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
    wrapper = BatchMLAPagedAttentionWrapper(torch.empty(1 << 27, dtype=torch.int8, device="cuda"), backend="fa3")
    wrapper.plan(
        torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"), ends, table[used].int(), lengths.int(),
        params.heads, params.latent, params.rope, params.page, True, params.scale, params.dtype, params.dtype,
    )  # fmt: skip
    queries = torch.einsum("thd,hdl->thl", given["q_nope"], given["w_uk"]).contiguous()
    cache, rope = given["latent"].split([params.latent, params.rope], -1)
    return partial(wrapper.run, queries, given["q_rope"].contiguous(), cache, rope)


def latent(rows: Rows) -> None:
    """Attention over the latents alone (`attend` and `merge`), whole contexts and contexts of S/4 to S."""
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    for batch, heads, keys in LATENT:
        drawn = torch.randint(keys // 4, keys + 1, (batch,), generator=torch.Generator().manual_seed(1)).tolist()
        for which, lengths in (("", [keys] * batch), (" of S/4 to S", drawn)):
            spec, params, given = latent_case(heads, tuple(lengths))
            # the peer does not project, so pieces of a single request are not joined there either
            config = spec.default(params, limits, batch)
            config = replace(config, block_t=max(16, config.block_t))
            times = measure(spec, params, config, given, ("attend", "merge"))
            row = params.latent + params.rope
            moved, flops = sum(lengths) * row * 2, 2.0 * sum(lengths) * heads * (row + params.latent)
            us = times.pop("together")
            note = "  ".join(f"{name} {found:.1f}" for name, found in times.items())
            if (peer := flashinfer(params, given)) is not None:
                work = f"latent B {batch} H {heads} S {keys}{which}"
                rows.add(work, "FlashInfer fa3", graphed(peer), moved=moved, flops=flops)
            rows.add(f"latent B {batch} H {heads} S {keys}{which}", "ours", us, moved=moved, flops=flops, note=note)


def grouped(x: Any, ids: Any, weights: Any, w13: Any, w2: Any) -> Any:
    """The expert block with torch's grouped product: sort, two products, weight, sum."""
    taken, flat = ids.shape[1], ids.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(w13.shape[0], dtype=torch.int32, device=x.device)  # bincount cannot be captured
    ends = counts.scatter_add_(0, flat.long(), torch.ones_like(flat)).cumsum(0).to(torch.int32)
    made = torch._grouped_mm(x[order // taken], w13.transpose(1, 2), offs=ends)
    gate, up = made.chunk(2, -1)
    made = torch._grouped_mm(silu(gate) * up, w2.transpose(1, 2), offs=ends)
    made = made * weights.flatten()[order, None].to(made.dtype)
    return torch.zeros_like(x).index_add_(0, order // taken, made)


def experts(rows: Rows) -> None:
    """256 experts, 7168 -> 2048, top-8, sort and sum included."""
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    torch.manual_seed(0)
    w13 = torch.empty(256, 4096, 7168, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    w2 = torch.empty(256, 7168, 2048, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    spec = next(s for s in specs() if s.op is ops.EXPERTS)
    for tokens in TOKENS:
        x = torch.randn(tokens, 7168, dtype=torch.bfloat16, device="cuda")
        ids = torch.rand(tokens, 256, device="cuda").topk(8).indices.to(torch.int32)
        weights = torch.rand(tokens, 8, device="cuda")
        values = (x, ids, weights, w13, w2, None, None, "silu", 0.0, 0.0, False, False)
        given = dict(zip((a.name for a in ops.EXPERTS.overload._schema.arguments), values))
        params = spec.bind(Call(ops.EXPERTS, given, "decode"))
        hit = len(ids.unique())
        work, sizes = f"experts T {tokens}", {"moved": hit * 3 * 7168 * 2048 * 2, "flops": 48.0 * tokens * 7168 * 2048}
        rows.add(work, "torch._grouped_mm", graphed(partial(grouped, x, ids, weights, w13, w2)), **sizes)
        times = measure(spec, params, spec.default(params, limits, tokens), given)
        del times["together"]
        note = f"{hit} hit  " + "  ".join(f"{name} {us:.1f}" for name, us in times.items())
        rows.add(work, "ours", times["all"], note=note, **sizes)


def stored(rows: Rows) -> None:
    """Choice of rows and attention over them at DeepSeek-V4.1's widths, two tokens a row, with caches of bf16 and of
    the published bytes."""
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    forms = {
        "cached_selected_attention": {"form": (8, 32, 1), "rows_form": (4, 16, 0), "bytes_align": 16},
        "cached_select_rows": {"form": (4, 32, 1), "bytes_align": 4},
    }
    for spec in (s for s in specs() if s.op.name in forms):
        usual = next(c.params for c in spec.cases if c.name == "typical")
        page = {"rows_page": 32} if hasattr(usual, "rows_page") else {"page": 32, "ratio": 2}
        for batch, new, keys in STORED:
            counts = ((new,) * batch, (keys,) * batch)
            for who, changes in (("bf16", {}), ("bytes", forms[spec.op.name])):
                several = {"queries": 4} if hasattr(usual, "queries") and new > 1 else {}
                params = replace(usual, **page, **changes, **several)
                given = operands(spec, params, *counts)
                times = measure(spec, params, spec.default(params, limits, batch * new), given)
                size = spec.work(params, *counts)
                note = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
                work = f"{spec.name} B {batch} T {new} S {keys}"
                rows.add(work, f"ours, {who}", times["all"], moved=size.bytes, flops=size.flops, note=note)
