"""Kernels and the backend door on one NVIDIA GPU. `python -m tests.bench.bench_gpu SECTION ...`:

latent, experts: each launch of a kernel and the whole call, medians of replayed CUDA graphs, with the bytes that must
move over the read ceiling. `latent:tune`, `experts:tune`: the best of the legal space, ten at a time as they are found.
model:BATCH:CACHE: the V3-shaped model of two layers through torch.compile, Inductor beside ours, one decode step on
Transformers' static cache: 64 successive steps with new tokens, wall time with Python.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernel_ops import compile_launches, jit_call
from deepinfer_compile.kernels import AnySpec, Call, Case, specs
from deepinfer_compile.sweep_machine import GraphTimer
from deepinfer_compile.targets import device_limits

READ_CEILING = 4.5e12
"""Bytes a second that a read-only stream reaches on an H200."""
LATENT = ((1, 128, 8192), (1, 128, 4096), (16, 128, 4096), (64, 128, 4096), (128, 16, 4096), (128, 64, 4096))
TOKENS = (1, 16, 64, 128, 512, 4096)


def graphed(run: Callable[[], Any], repeat: int = 1) -> float:
    """Median microseconds of one run in a replayed CUDA graph of `repeat` runs; the cache of the chip is flushed."""
    return GraphTimer().repeated(run, repeat).us


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in given.items()}


def measure(spec: AnySpec, params: Any, config: Any, given: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each launch, and of all."""
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    call = jit_call(spec, params, config, tensors)
    found = {name: graphed(run) for name, run in call.launches}
    return {**found, "all": graphed(call)}


def show(what: str, config: Any, times: dict[str, float], moved: int, of: str) -> None:
    parts = "  ".join(f"{name} {us:.1f}" for name, us in times.items())
    share = moved / (times[of] * 1e-6) / READ_CEILING
    print(f"{what}: {parts} us; {of} at {share:.0%} of the read ceiling  {config}", flush=True)


def latent_case(batch: int, heads: int, keys: int, paged: bool) -> tuple[AnySpec, Any, dict[str, Any]]:
    op = ops.CACHED_LATENT_ATTENTION if paged else ops.LATENT_ATTENTION
    spec = next(s for s in specs() if s.op is op)
    case = next(c for c in spec.cases if c.name == "typical")
    params = replace(case.params, heads=heads)
    torch.set_default_device("cuda")
    given = spec.inputs(Case("", params, (1,) * batch, (keys,) * batch), torch.Generator("cuda").manual_seed(0))
    torch.set_default_device("cpu")
    return spec, params, on_gpu(given)


def latent(tune: bool) -> None:
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    for batch, heads, keys in LATENT:
        spec, params, given = latent_case(batch, heads, keys, paged=True)
        moved = batch * keys * (params.latent + params.rope) * 2
        what = f"latent B {batch} H {heads} S {keys}"
        config = spec.default(params, limits, batch)
        show(what, config, measure(spec, params, config, given), moved, "attend")
        if tune:
            search(what, spec, params, given, latent_configs(config, params, batch), moved, ("attend",))


Shapes = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]


def warm(job: tuple[str, Any, Any, Shapes]) -> str:
    """Compile a kernel into Triton's cache, without its operands. Returns what went wrong."""
    name, params, config, shapes = job
    spec = next(s for s in specs() if s.op.name == name)
    tensors = {n: torch.empty_strided(*where, dtype=dtype, device="meta") for n, (*where, dtype) in shapes.items()}
    try:
        compile_launches(spec, params, config, tensors)
    except Exception as err:  # what a config breaks is a finding here
        return f"{type(err).__name__} {str(err)[:200]}"
    return ""


def search(what: str, spec: AnySpec, params: Any, given: Any, configs: Any, moved: int, of: tuple[str, ...]) -> None:
    """Print the best configs by each of some launches."""
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    shapes: Shapes = {n: (tuple(t.shape), tuple(t.stride()), t.dtype) for n, t in tensors.items()}
    begin = time.perf_counter()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        broken = list(pool.map(warm, [(spec.op.name, params, c, shapes) for c in configs], chunksize=1))
    print(f"{what}: {len(configs)} configs compiled in {time.perf_counter() - begin:.0f} s", flush=True)
    found: dict[str, list[tuple[float, str]]] = {name: [] for name in of}
    for config, wrong in zip(configs, broken):
        if wrong:
            print(f"  {config}: {wrong}", flush=True)
            continue
        for name, run in jit_call(spec, params, config, tensors).launches:
            run()
            if name in of:
                found[name].append((graphed(run), str(config)))
    for name, times in found.items():
        for us, text in sorted(times)[:4]:
            print(f"  {name} {us:8.1f} us {moved / us / 1e-6 / READ_CEILING:.0%} {text}", flush=True)


def experts(sizes: list[int], tune: bool) -> None:
    limits = device_limits(torch.device("cuda", 0))
    assert limits is not None
    torch.manual_seed(0)
    w13 = torch.empty(256, 4096, 7168, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    w2 = torch.empty(256, 7168, 2048, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)
    spec = next(s for s in specs() if s.op is ops.EXPERTS)
    for tokens in sizes or TOKENS:
        x = torch.randn(tokens, 7168, dtype=torch.bfloat16, device="cuda")
        ids = torch.rand(tokens, 256, device="cuda").topk(8).indices.to(torch.int32)
        weights = torch.rand(tokens, 8, device="cuda")
        values = (x, ids, weights, w13, w2, None, None, "silu", 0.0, 0.0, False, False)
        given = dict(zip((a.name for a in ops.EXPERTS.overload._schema.arguments), values))
        params = spec.bind(Call(ops.EXPERTS, given, "decode"))
        hit = len(ids.unique())
        moved = hit * 3 * 7168 * 2048 * 2
        config = spec.default(params, limits, tokens)
        what = f"experts T {tokens} ({hit} hit)"
        show(what, config, measure(spec, params, config, given), moved, "all")
        if tokens >= 512:
            print(f"  {6 * tokens * 8 * 7168 * 2048 / 1e12:.3f} TFLOP")
        if tune:
            search(what, spec, params, given, expert_configs(config, tokens), moved, ("up", "down"))


def expert_configs(base: Any, tokens: int) -> list[Any]:
    """What is worth trying around a config: the two products are tuned at once, each with the same tile."""
    m = (16,) if tokens <= 128 else (16, 32) if tokens <= 512 else (64, 128)
    n = (32, 64, 128) if tokens <= 512 else (64, 128)
    k = (64, 128, 256) if tokens <= 512 else (32, 64, 128)
    found = []
    for block_m, wide, deep, warps, stages in product(m, n, k, (4, 8), (2, 3, 4)):
        if (2 * wide + block_m) * deep * 2 * stages <= 227 * 1024 and not (warps == 8 and tokens <= 64):
            up = {"up_n": wide, "up_k": deep, "up_warps": warps, "up_stages": stages}
            down = {"down_n": 2 * wide, "down_k": deep, "down_warps": warps, "down_stages": stages}
            found.append(replace(base, block_m=block_m, **up, **down))
    return found


def latent_configs(base: Any, params: Any, batch: int) -> list[Any]:
    """What is worth trying for attend."""
    found = []
    for m, n, pieces, warps, stages in product((16, 32, 64), (32, 64), (1, 2, 4, 8, 16, 32), (4, 8), (1, 2, 3)):
        if m > params.heads or (m + n * stages) * 576 * 2 > 225 * 1024 or (m == 64 and warps == 4):
            continue
        programs = batch * params.heads // m * pieces
        if 64 <= programs <= 600:
            found.append(replace(base, block_m=m, block_n=n, pieces=pieces, num_warps=warps, num_stages=stages))
    return found


def main(sections: list[str]) -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for section in sections:
        name, *rest = section.split(":")
        if name == "latent":
            latent(rest == ["tune"])
        elif name == "experts":
            experts([int(n) for n in rest if n != "tune"], "tune" in rest)
        elif name == "model":
            from tests.bench.gpu_model import model

            model(int(rest[0]), int(rest[1]), rest[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
