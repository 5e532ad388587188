"""bf16: logits over 64 forced steps are at most 1.25x as far from fp32 as eager bf16's own."""

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

PROMPT, STEPS = 21, 64
FAST = ("llama", "deepseek_v3")


def eager(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0, PROMPT - 1 :].float()


def check(name: str, folder: Path, native: bool) -> None:
    bf16 = models.make(name, dtype=torch.bfloat16)
    wide = copy.deepcopy(bf16).float()
    ids = torch.randint(3, models.VOCAB, (PROMPT + STEPS,), generator=torch.Generator().manual_seed(3)).tolist()
    truth, own = eager(wide, ids), eager(bf16, ids)
    dc.build(bf16, folder, native=native)
    got = forced_logits(open_bundle(folder, native), ids, PROMPT)
    assert got.shape == truth.shape
    ours, theirs = got - truth, own - truth
    assert ours.abs().max() <= 1.25 * theirs.abs().max()
    assert ours.pow(2).mean().sqrt() <= 1.25 * theirs.pow(2).mean().sqrt()


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in models.CONFIGS])
def test_graph_programs(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / "b", native=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", models.CONFIGS)
def test_native_programs(name: str, tmp_path: Path) -> None:
    check(name, tmp_path / "b", native=True)
