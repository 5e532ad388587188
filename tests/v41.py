"""A short DeepSeek-V4.1 form with every role once: a window, pooled rows and a reader, the boundary, a new choice."""

from __future__ import annotations

import functools
from typing import Any

import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program

SHORT: dict[str, Any] = {
    "num_hidden_layers": 5,
    "compress_ratios": (0, 2, 2, 1, 1),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 4),
    "candidate_source_layer_id": 3,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (3, 4),
    "hc_sinkhorn_iters": 3,
}


def make(dtype: torch.dtype = torch.float32, **changes: Any) -> DeepseekV41:
    """The model, the same at every call."""
    return tiny.make(dtype=dtype, **{**SHORT, **changes}).requires_grad_(False)


@functools.cache
def canonical(dtype: torch.dtype = torch.float32) -> tuple[DeepseekV41, Program]:
    """The model and its canonical program."""
    model = make(dtype)
    return model, Pipeline((Canonicalize(),)).run(capture(model))[0]


def eager_tokens(model: DeepseekV41, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens, the whole sequence again for each."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
