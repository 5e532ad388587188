"""LongRoPE and dynamic NTK: frequencies follow each request's own length, never a stranger's."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import deepinfer_compile
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.replay import logits_of, weights_from
from tests import models
from tests.e2e.parity import bundle_tokens, prompts

FORMS: dict[str, dict[str, Any]] = {
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.1 * i for i in range(8)],
            "long_factor": [2.0 + 0.5 * i for i in range(8)],
            "original_max_position_embeddings": 24,
        },
        "max_position_embeddings": 256,
        "original_max_position_embeddings": 24,
    },
    "dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 24,
    },
}


def build(form: str) -> Any:
    """A tiny model; skips, the refusal checked, where Transformers has one table of frequencies for all tokens."""
    model = models.make("phi" if form == "longrope" else "llama", **FORMS[form])
    if form == "dynamic" and "inv_freq_expanded" in variables(model.model.rotary_emb):
        with pytest.raises(UnsupportedConstruct, match="newer Transformers"):
            capture(model)
        pytest.skip("this Transformers has one table of frequencies for all tokens; the refusal was checked")
    return model


def variables(module: Any) -> tuple[str, ...]:
    """Names of the local variables of a module's forward."""
    return inspect.unwrap(type(module).forward).__code__.co_varnames


def cached_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of eager calls on one cache. (Phi-3's own `generate` computes the cache anew where the short table
    ends, in some versions of Transformers.)"""
    cache, ids, out = DynamicCache(config=model.config), torch.tensor([prompt]), list[int]()
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids, past_key_values=cache, use_cache=True).logits[:, -1:]
            ids = logits.argmax(-1)
            out.append(int(ids))
    return out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("length", [9, 24, 25, 60])
def test_one_sequence_equals_eager(form: str, length: int) -> None:
    model = build(form)
    program = capture(model)
    ids = torch.randint(3, models.VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    with torch.no_grad():
        want = build(form)(torch.tensor([ids]), use_cache=False).logits[0, [0, length - 1]]
    got = logits_of(program, weights_from(model), ids, [0, length - 1])
    assert (got - want).abs().max() < 2e-6


@pytest.mark.parametrize("form", FORMS)
def test_strangers_do_not_change_each_other(form: str, tmp_path: Path) -> None:
    model = build(form)
    deepinfer_compile.build(model, tmp_path / "b", native=False, max_model_len=None if form == "longrope" else 24)
    llm = deepinfer_compile.load(tmp_path / "b", native=False)
    given = prompts(lengths=(3, 70, 20) if form == "longrope" else (3, 9, 5))
    count = 12
    together = bundle_tokens(llm, given, count)
    assert together == [bundle_tokens(llm, [p], count)[0] for p in given]
    assert together == [cached_tokens(build(form), p, count) for p in given]
