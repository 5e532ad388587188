"""A decoder whose upper half reads keys of the lower one becomes a bundle that reads prompts with the lower half."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer_compile
from deepinfer_compile.builder import compile_model
from deepinfer_compile.ops import CACHED_ATTENTION, SHARED_ATTENTION
from deepinfer_compile.settings import BuildSettings
from tests.e2e.parity import bundle_tokens, prompts
from tests.yoco_model import VOCAB, Form, make_yoco

COUNT = 12
LENGTHS = (1, 5, 70, 3, 33, 1)
FORMS = {"one list": Form(), "two lists": Form(one_list=False)}


def eager_tokens(model: Any, prompt: list[int], count: int = COUNT) -> list[int]:
    """Greedy tokens, the whole sequence read anew for each."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


@functools.cache
def wanted(name: str, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    model = make_yoco(FORMS[name])
    return [eager_tokens(model, p) for p in prompts(VOCAB, lengths)]


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("replay", ["off", "auto"])
@pytest.mark.parametrize("name", FORMS)
def test_generation(name: str, replay: str, native: bool, tmp_path: Path) -> None:
    """Ragged prompts, read in chunks of 16 tokens, alone, three at a time and all together, are continued as by eager."""
    deepinfer_compile.build(make_yoco(FORMS[name]), tmp_path / "b", native=native, replay=replay)
    llm = deepinfer_compile.load(
        tmp_path / "b", native=native, max_model_len=128, max_num_batched_tokens=16, max_num_seqs=4
    )
    given = prompts(VOCAB, LENGTHS)
    assert bundle_tokens(llm, given, COUNT) == wanted(name)
    assert bundle_tokens(llm, given[:1], COUNT) == wanted(name)[:1]
    assert bundle_tokens(llm, given[2:5], COUNT) == wanted(name)[2:5]
