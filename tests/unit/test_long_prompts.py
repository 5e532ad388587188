"""Matchers run pieces of graph on numbers; long prompts of fixed length make these pieces large."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_compile import backend, match_moe
from tests import models


def ops_of(monkeypatch: pytest.MonkeyPatch, tokens: int) -> dict[str, int]:
    """Operations that are raised in a prompt of a model with wide experts; Inductor is left out."""
    monkeypatch.setattr(backend, "_inductor", lambda gm, example_inputs, patches: gm)
    torch._dynamo.reset()
    model = models.make("deepseek_v3", moe_intermediate_size=256)
    model.config._experts_implementation = "grouped_mm"
    before = dict(backend.counters)
    compiled: Any = torch.compile(model, backend=backend.deepinfer, dynamic=False)
    ids = torch.randint(3, models.VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want, got = model(ids, use_cache=False).logits, compiled(ids, use_cache=False).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    return {name: count - before.get(name, 0) for name, count in backend.counters.items()}


def test_an_activation_is_tried_on_a_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the choice of experts fit under the limit, those of the activation between the products do not."""
    plain = ops_of(monkeypatch, 96)
    monkeypatch.setattr(match_moe, "LIMIT_ELEMENTS", 96 * 4 * 128)
    assert ops_of(monkeypatch, 96) == plain
    assert plain["op: experts"] == 2


def test_what_is_too_large_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match_moe, "LIMIT_ELEMENTS", 96 * 4)
    assert ops_of(monkeypatch, 96).get("op: experts", 0) == 0
