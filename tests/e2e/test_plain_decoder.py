"""A decoder written in plain PyTorch, no library class anywhere, becomes a bundle that generates what it generates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer_compile
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import default
from tests.e2e.parity import bundle_tokens, prompts
from tests.plain_model import VOCAB, make_plain

COUNT = 32


def pipeline() -> Pipeline:
    """The preset, with the raising of spelled-out attention if the preset does not hold it."""
    preset = default()
    if any(p.name == RaiseAttention.name for p in preset.passes):
        return preset
    return preset.insert(p=RaiseAttention(), after="canonicalize")


def eager_tokens(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens, the whole sequence read anew for each."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(COUNT):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["loop", "einsum"])
def test_generation(form: str, native: bool, tmp_path: Path) -> None:
    model = make_plain(form)
    deepinfer_compile.build(model, tmp_path / "b", native=native, pipeline=pipeline())
    llm = deepinfer_compile.load(
        tmp_path / "b", native=native, max_model_len=256, max_num_batched_tokens=48, max_num_seqs=8
    )
    given = prompts(VOCAB, (1, 5, 17, 70, 3))
    got = bundle_tokens(llm, given, COUNT)
    assert got == [eager_tokens(model, p) for p in given]
    assert bundle_tokens(llm, given[2:3], COUNT) == got[2:3]
