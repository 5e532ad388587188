"""Greedy generation of a bundle against eager Transformers, token for token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import deepinfer_compile
from deepinfer_compile import LLM, SamplingParams
from tests.models import VOCAB

LENGTHS = (1, 5, 17, 40, 70, 3, 2, 100)


def prompts(vocab: int = VOCAB, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    """Ragged random prompts."""
    return [torch.randint(3, vocab, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def eager_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What Transformers generates greedily, end-of-sequence ignored."""
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[0, len(prompt) :].tolist()


def bundle_tokens(llm: LLM, given: list[list[int]], count: int) -> list[list[int]]:
    """What the bundle generates greedily for all prompts in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    return [list(o.outputs[0].token_ids) for o in llm.generate(given, params)]


def check_parity(model: Any, folder: Path, *, native: bool, count: int = 128, **build: Any) -> None:
    """Build, load, generate: one batch equals eager, and a request alone equals itself beside a longer stranger."""
    deepinfer_compile.build(model, folder, native=native, **build)
    llm = deepinfer_compile.load(folder, native=native, max_model_len=512, max_num_batched_tokens=96)
    given = prompts()
    got = bundle_tokens(llm, given, count)
    want = [eager_tokens(model, p, count) for p in given]
    assert got == want
    stranger = prompts(lengths=(300,))[0]
    assert bundle_tokens(llm, [given[2]], count) == [got[2]]
    assert bundle_tokens(llm, [stranger, given[2]], count)[1] == got[2]
