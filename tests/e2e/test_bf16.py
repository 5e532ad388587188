"""bf16: logits over 64 forced steps are at most 1.25x as far from fp32 as eager bf16's own.

Eight sequences are measured together: one changed choice of an expert moves a maximum as much as all rounding does, so
a single sequence would compare luck.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer_compile as dc
from tests import models
from tests.e2e.forced import forced_logits, open_bundle

PROMPT, STEPS, SEQUENCES = 21, 64, 8
FAST = ("llama", "deepseek_v3")


def eager(model: Any, sequences: list[list[int]]) -> Tensor:
    with torch.no_grad():
        return torch.cat([model(torch.tensor([s]), use_cache=False).logits[0, PROMPT - 1 :].float() for s in sequences])


def check(name: str, folder: Path, native: bool) -> None:
    bf16 = models.make(name, dtype=torch.bfloat16)
    wide = copy.deepcopy(bf16).float()
    gen = torch.Generator().manual_seed(3)
    sequences = [torch.randint(3, models.VOCAB, (PROMPT + STEPS,), generator=gen).tolist() for _ in range(SEQUENCES)]
    truth, own = eager(wide, sequences), eager(bf16, sequences)
    dc.build(bf16, folder, native=native)
    executor = open_bundle(folder, native)
    got = torch.cat([forced_logits(executor, s, PROMPT) for s in sequences])
    assert got.shape == truth.shape
    ours, theirs = got - truth, own - truth
    print(f"{name}: max {ours.abs().max():.2e} / {theirs.abs().max():.2e}, rms {ours.std():.2e} / {theirs.std():.2e}")
    assert ours.abs().max() <= 1.25 * theirs.abs().max()
    assert ours.pow(2).mean().sqrt() <= 1.25 * theirs.pow(2).mean().sqrt()


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in models.CONFIGS])
def test_graph_programs(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / "b", native=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.CONFIGS)
def test_native_programs(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / "b", native=True)
