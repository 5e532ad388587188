"""torch.compile(model, backend="deepinfer"): eager's results, dialect ops inside, and a stated reason where it steps
aside."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepinfer_compile.backend import counters
from tests import models


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    counters.clear()


def test_llama_equals_eager_and_is_raised() -> None:
    model = models.make("llama", num_hidden_layers=1)
    compiled = torch.compile(model, backend="deepinfer")
    for batch, length in ((1, 9), (3, 14)):
        ids = torch.randint(3, models.VOCAB, (batch, length))
        with torch.no_grad():
            want = model(ids, use_cache=False).logits
            got = compiled(ids, use_cache=False).logits
        assert (got - want).abs().max() < 2e-6
    assert counters["raised"] >= 1
    assert counters["op: rms_norm"] >= 3


def test_under_autograd_it_steps_aside_and_says_so() -> None:
    layer = nn.Linear(5, 7)
    compiled = torch.compile(layer, backend="deepinfer")
    x = torch.randn(3, 5)
    compiled(x).sum().backward()
    want = torch.autograd.grad(layer(x).sum(), layer.weight)[0]
    assert torch.allclose(layer.weight.grad, want)
    assert counters["left: autograd is recording"] == 1


def test_unknown_options_are_errors() -> None:
    compiled = torch.compile(nn.Linear(2, 2), backend="deepinfer", options={"fusion": True})
    with pytest.raises(Exception, match="fusion"):
        compiled(torch.zeros(1, 2))
