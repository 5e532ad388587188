"""Compiles configurations into Triton's cache, one job a line, so that a compiler that aborts or hangs takes only its
own process with it. A job is a JSON object

    {"kernel": name, "op": name, "params": {...}, "config": {...}, "operands": {name: [shape, strides, dtype], ...}}

and its answer {"reason": text}, empty where all went well. No operand is allocated: they are on the meta device.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from deepinfer_compile import render
from deepinfer_compile.kernel_ops import compile_launches
from deepinfer_compile.kernels import specs

MOST = 300
"""Characters of a reason."""


def reason_of(err: Exception) -> str:
    """What the compiler or the interpreter says in one line, with the kind of error."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return f"{type(err).__name__}: {lines[-1] if lines else 'no message'}"[:MOST]


def answer(job: dict[str, Any]) -> dict[str, str]:
    """What a job gives."""
    spec = next(s for s in specs() if (s.name, s.op.name) == (job["kernel"], job["op"]))
    params = spec.params(**{name: render.decode(item) for name, item in job["params"].items()})
    config = spec.config(**{name: render.decode(item) for name, item in job["config"].items()})
    operands = {
        name: torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device="meta")
        for name, (shape, strides, dtype) in job["operands"].items()
    }
    try:
        compile_launches(spec, params, config, operands)
    except Exception as err:  # the compiler raises many unrelated types; each becomes the reason of a rejection
        return {"reason": reason_of(err)}
    return {"reason": ""}


def main() -> None:
    """Answer jobs from stdin until it ends. What libraries print must not mix with the answers."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
