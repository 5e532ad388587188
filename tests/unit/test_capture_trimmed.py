"""Capture traces one layer for many: only where the many do the same, however the difference is hidden."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.replay import bind, weights_from
from tests import models
from tests.architectures import FIRST

LAYERS = 7
WIDTH = 16
ALIKE = [0, LAYERS - 1]


class Layer(nn.Module):
    """x + f(x), where f depends on the layer in a way that class, scalar attributes and shapes do not show."""

    def __init__(self, index: int, difference: str) -> None:
        super().__init__()
        self.layer_idx, self.difference = index, difference
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.held = [1.0 + (index == 3)]
        self.table = torch.tensor([1.0 + (index == 3)])
        self.register_buffer("fixed", torch.tensor([1.0 + (index == 3)]), persistent=False)
        self.closure = lambda x: x * (1.0 + (index == 3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        if self.difference == "the last asks for its index" and self.layer_idx == LAYERS - 1:
            y = y.tanh()
        if self.difference == "one asks for its index" and self.layer_idx == 3:
            y = y.tanh()
        if self.difference == "all ask for their index":
            y = y * (1.0 + self.layer_idx)
        if self.difference == "one uses another weight" and self.layer_idx == 3:
            y = self.other(self.norm(x))
        if self.difference == "a list":
            y = y * self.held[0]
        if self.difference == "a tensor":
            y = y * self.table
        if self.difference == "a buffer":
            y = y * self.fixed
        if self.difference == "a closure":
            y = self.closure(y)
        return x + y


class Model(nn.Module):
    """A decoder whose loop may treat one layer apart."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.difference = difference
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Layer(i, difference) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = start = self.embed(ids)
        for i, layer in enumerate(self.layers):
            if self.difference == "the loop" and i == 3:
                x = x * 2
            if self.difference == "a far read" and i == 3:
                x = x + start
            if self.difference == "every loop" and i:
                x = x * 2
            x = layer(x)
        if self.difference == "the number of layers":
            x = x / len(self.layers)
        if self.difference == "a deep number" and len(self.layers) > 4:
            x = x.tanh()
        return self.head(x)


TRACED: dict[str, list[int] | None] = {
    "none": ALIKE,
    "the last asks for its index": [0, LAYERS - 2, LAYERS - 1],
    "one asks for its index": [0, 3, LAYERS - 1],
    "all ask for their index": None,
    "one uses another weight": [0, 3, LAYERS - 1],
    "a list": [0, 3, LAYERS - 1],
    "a tensor": [0, 3, LAYERS - 1],
    "a buffer": [0, 3, LAYERS - 1],
    "a closure": [0, 3, LAYERS - 1],
    "the loop": None,
    "a far read": None,
    "every loop": [0, 1],
    "the number of layers": None,
    "a deep number": None,
}


@pytest.mark.parametrize("difference", TRACED)
def test_layers_that_differ_are_told_apart(difference: str) -> None:
    torch.manual_seed(0)
    model = Model(difference).eval()
    program = capture(model)
    assert program.info.get("traced_layers") == TRACED[difference]
    ids = torch.tensor([[1, 5, 3, 7, 9]])
    with torch.no_grad():
        want = model(ids)
    got = program.run({**bind(program, weights_from(model)), "input_ids": ids})
    assert torch.equal(got, want)


class Reversed(Model):
    """Calls its layers from the last to the first."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in reversed(self.layers):
            x = layer(x)
        return self.head(x)


class Twice(Model):
    """Goes through its layers twice."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("cls", [Reversed, Twice])
def test_layers_out_of_order_are_all_traced(cls: type[Model]) -> None:
    torch.manual_seed(0)
    model = cls("none").eval()
    program = capture(model)
    assert "out of order" in program.info["traced_all_because"]
    assert ("one_block_because" in program.info) == (cls is Twice)
    ids = torch.tensor([[1, 5, 3, 7, 9]])
    with torch.no_grad():
        want = model(ids)
    assert torch.equal(program.run({**bind(program, weights_from(model)), "input_ids": ids}), want)


@pytest.mark.parametrize("architecture", FIRST)
def test_models_of_today_are_trimmed(architecture: str) -> None:
    layers = 9
    types = models.make(architecture).config.to_dict().get("layer_types")
    options = {"layer_types": [types[i % 2] for i in range(layers)]} if types else {}
    model = models.make(architecture, num_hidden_layers=layers, **options)
    program = capture(model)
    assert "traced_all_because" not in program.info
    assert len(program.info["traced_layers"]) <= 4
    assert len(program.calls()) == layers + 2
