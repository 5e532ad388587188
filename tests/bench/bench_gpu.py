"""Kernels and the backend door on one NVIDIA GPU. `python -m tests.bench.bench_gpu SECTION ...`:

latent, experts: each launch of a kernel and the whole call, medians of replayed CUDA graphs, with the bytes that must
move over the read ceiling. `latent:tune`, `experts:tune`: the best of the legal space, ten at a time as they are found.
model:BATCH:CACHE: the V3-shaped model of two layers through torch.compile, Inductor beside ours, one decode step on
Transformers' static cache: 64 successive steps with new tokens, wall time with Python.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from deepinfer_compile import ops
from deepinfer_compile.kernel_ops import jit_launches
from deepinfer_compile.kernels import AnySpec, Case, specs
from deepinfer_compile.targets import device_limits

READ_CEILING = 4.5e12
"""Bytes a second that a read-only stream reaches on an H200."""
LATENT = ((1, 128, 8192), (1, 128, 4096), (16, 128, 4096), (64, 128, 4096), (128, 16, 4096), (128, 64, 4096))
TOKENS = (1, 16, 64, 128, 512, 4096)


def graphed(run: Callable[[], Any], repeat: int = 1) -> float:
    """Median microseconds of one run in a replayed CUDA graph of `repeat` runs; the cache of the chip is flushed."""
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeat):
            run()
    flush = torch.empty(1 << 28, dtype=torch.int8, device="cuda")
    times = []
    for _ in range(15):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / repeat)
    return statistics.median(times)


def on_gpu(given: dict[str, Any]) -> dict[str, Any]:
    return {name: t.cuda() if isinstance(t, torch.Tensor) else t for name, t in given.items()}


def measure(spec: AnySpec, params: Any, config: Any, given: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each launch, and of all."""
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    launches = jit_launches(spec, params, config, tensors)

    def everything() -> None:
        for _, run in launches:
            run()

    found = {name: graphed(run) for name, run in launches}
    return {**found, "all": graphed(everything)}


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
            search(
                what,
                spec,
                params,
                given,
                limits,
                moved,
                "attend",
                ("block_m", "block_n", "pieces", "num_warps", "num_stages"),
            )


def search(what: str, spec: AnySpec, params: Any, given: Any, limits: Any, moved: int, of: str, fields: Any) -> None:
    """Print the five best configs by one launch, trying one of each choice of `fields`."""
    seen, found = set(), []
    tensors = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    for config in spec.space(params, limits):
        key = tuple(getattr(config, f) for f in fields)
        if key in seen:
            continue
        seen.add(key)
        try:
            launches = dict(jit_launches(spec, params, config, tensors))
            for name, run in launches.items():
                run()
                if name == of:
                    break
            found.append((graphed(launches[of]), str(dict(zip(fields, key)))))
        except Exception as err:  # what a config breaks is a finding here
            found.append((1e9, f"{key} {type(err).__name__} {str(err)[:80]}"))
    found.sort()
    for us, text in found[:5]:
        print(f"  {us:8.1f} us {moved / us / 1e-6 / READ_CEILING:.0%} {text}", flush=True)
    print(f"  {len(found)} tried, {sum(us == 1e9 for us, _ in found)} failed", flush=True)


def main(sections: list[str]) -> None:
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    for section in sections:
        name, *rest = section.split(":")
        if name == "latent":
            latent(rest == ["tune"])
        elif name == "model":
            from tests.bench.gpu_model import model

            model(int(rest[0]), int(rest[1]), rest[2:])


if __name__ == "__main__":
    main(sys.argv[1:])
