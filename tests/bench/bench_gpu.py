"""The GPU table: kernels, the backend door and a bundle beside what a user would otherwise run.

`python -m tests.bench.bench_gpu --out DIR` measures what DIR does not hold yet, a process a section, and prints the
table. `... SECTION ...` measures these sections and prints their rows: latent, prompts, experts, stored, ced,
resume[:LAYERS], decode:BATCH:CACHE[:WHO ...], prefill:TOKENS[:WHO ...], generate:BATCH[:WHO ...], bundle[:BATCH ...].
`... --table DIR` prints the table of what DIR holds.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.bench import gpu_bundle, gpu_ced, gpu_kernels, gpu_model, gpu_resume
from tests.bench.gpu_rows import Rows, table

SECTIONS = (
    "decode:64:4096",
    "decode:16:16384",
    "decode:16:4096",
    "decode:1:4096",
    "prefill:8192",
    "prefill:2048",
    "generate:64",
    "bundle:1:16:64",
    "latent",
    "prompts",
    "experts",
    "stored",
    "ced",
    "resume",
    "resume:40",
)
GOALS = {
    "decode B 64 cache 4096": 6200.0,
    "decode B 16 cache 16384": 3700.0,
    "decode B 16 cache 4096": 3300.0,
    "decode B 1 cache 4096": 850.0,
    "prefill 8192": 48000.0,
    "prefill 2048": 13800.0,
    "latent B 128 H 16 S 4096": 1.05 * 154.7,
    "latent B 1 H 128 S 8192": 1.05 * 27.2,
    "latent B 128 H 64 S 4096": 288.4,
    "latent B 64 H 128 S 4096": 274.7,
    "latent B 128 H 128 S 4096": 534.1,
    "latent B 16 H 128 S 4096": 86.0,
    "experts T 1": 205.0,
    "experts T 4096": 8000.0,
}
"""Microseconds."""


def run(section: str, rows: Rows, built: Any = None) -> Any:
    """Measure one section. Returns the model if one was made, for the next section."""
    name, *rest = section.split(":")
    if name in ("decode", "prefill", "generate", "bundle") and built is None:
        built = gpu_model.build()
    if name == "decode":
        gpu_model.decode(rows, built, int(rest[0]), int(rest[1]), rest[2:])
    elif name == "prefill":
        gpu_model.prefill(rows, built, int(rest[0]), rest[1:])
    elif name == "generate":
        gpu_model.generate(rows, built, int(rest[0]), rest[1:])
    elif name == "bundle":
        gpu_bundle.bundle(rows, built, [int(n) for n in rest] or [1, 16, 64])
    elif name == "latent":
        gpu_kernels.latent(rows)
    elif name == "prompts":
        gpu_kernels.prompts(rows)
    elif name == "experts":
        gpu_kernels.experts(rows)
    elif name == "stored":
        gpu_kernels.stored(rows)
    elif name == "ced":
        gpu_ced.ced(rows)
    elif name == "resume":
        gpu_resume.resume(rows, *map(int, rest))
    else:
        raise SystemExit(f"no section {name!r}; there are {', '.join(SECTIONS)}")
    return built


def about() -> dict[str, Any]:
    """What the figures were made with."""
    import transformers
    import triton

    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "transformers": transformers.__version__,
    }


def into(folder: Path, sections: list[str]) -> None:
    """Measure the sections that the folder does not hold, each in a process of its own, which gives memory back."""
    folder.mkdir(parents=True, exist_ok=True)
    for section in sections:
        path = folder / f"{section.replace(':', '-')}.json"
        if not path.exists():
            subprocess.run([sys.executable, "-m", "tests.bench.bench_gpu", "--into", str(path), section], check=False)


def main(arguments: list[str]) -> None:
    option = arguments.pop(0) if arguments and arguments[0].startswith("--") else ""
    folder = Path(arguments.pop(0)) if option else None
    if option == "--table" and folder is not None:
        print(table(folder, GOALS))
        return
    if option == "--out" and folder is not None:
        into(folder, arguments or list(SECTIONS))
        print(table(folder, GOALS))
        return
    print(about(), flush=True)
    built, rows = None, Rows()
    for section in arguments:
        built = run(section, rows, built)
    if option == "--into" and folder is not None:
        rows.save(folder, about())


if __name__ == "__main__":
    main(sys.argv[1:])
