"""Time and memory of the build of a model of published widths that has no weights, for numbers of layers and experts.

`OMP_NUM_THREADS=1 python -m tests.bench.bench_build [LAYERSxEXPERTS ...]`, by default 8x64 40x384 80x384:
DeepSeek-V4.1's configuration on the meta device, its roles of layers spread over that many, each in a process of its
own. Seconds are of CPU time; memory is the largest that was resident, with Python and torch.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import deepinfer_compile as dc
from deepinfer_compile.capture import capture
from deepinfer_compile.models import own

KEEP = 140


def roles(layers: int) -> dict[str, Any]:
    """Configuration keys that give that many layers, eight at least, every role that the released 40 have."""
    half = layers // 2
    sources = (*range(2, half, 6), half)
    return {
        "num_hidden_layers": layers,
        "compress_ratios": (0,) * 2 + (2,) * (half - 2) + (1,) * (layers - half),
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": (*sources, *range(half + 4, layers, 4)),
        "candidate_source_layer_id": half,
        "engram_layer_ids": (1, max(i for i in sources if i <= 14 and i < half)),
        "dspark_target_layer_ids": tuple(range(layers - 3, layers)),
    }


def measure(layers: int, experts: int, folder: Path) -> dict[str, float]:
    """Build in this process."""
    torch.set_num_threads(1)
    model = own.deepseek_v41({"model_type": "deepseek_v41", "n_routed_experts": experts, **roles(layers)}).model
    begin = time.process_time()
    program = capture(model)
    captured = time.process_time()
    dc.build(model, folder / "b", weights="none", native=False, keep=KEEP)
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    traced = len(program.info["traced_layers"])
    return {"traced": traced, "capture": captured - begin, "build": done - captured, "mib": peak}


def main(wanted: list[str]) -> None:
    """Print a line for each size."""
    print(f"{'layers':>8} {'experts':>8} {'traced':>8} {'capture s':>10} {'build s':>8} {'MiB':>6}")
    for size in wanted or ["8x64", "40x384", "80x384"]:
        layers, experts = map(int, size.split("x"))
        command = [sys.executable, "-m", "tests.bench.bench_build", "--one", str(layers), str(experts)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        numbers = f"{found['traced']:>8} {found['capture']:>10.1f} {found['build']:>8.1f} {found['mib']:>6.0f}"
        print(f"{layers:>8} {experts:>8} {numbers}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        with tempfile.TemporaryDirectory() as made:
            print(json.dumps(measure(int(sys.argv[2]), int(sys.argv[3]), Path(made))))
    else:
        main(sys.argv[1:])
