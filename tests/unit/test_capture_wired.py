"""Layers that read from layers far below are traced once a kind, and wired as the whole model wires them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.replay import bind, weights_from

LAYERS, WIDTH = 12, 16
SOURCES = (1, 5, 6)
Held = tuple[Tensor, Tensor] | None


class Layer(nn.Module):
    """Sources make two tensors of one shape, others read those of the last source, in an order that may differ."""

    def __init__(self, source: bool, swapped: bool) -> None:
        super().__init__()
        self.source, self.swapped = source, swapped
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH) if source else None
        self.b = nn.Linear(WIDTH, WIDTH) if source else None

    def forward(self, x: Tensor, held: Held) -> tuple[Tensor, Held]:
        if self.a is not None and self.b is not None:
            held = self.a(x).tanh(), self.b(x).sin()
        if held is not None and not self.source:
            first, second = held[::-1] if self.swapped else held
            x = x * first + second
        return x + self.linear(x), held


class Model(nn.Module):
    """`swapped`: layers that read the second tensor first. `scaled`: numbers written in code, which are constants.

    `late`: what comes behind the layers reads one of them. `odd`: what one layer does depends on what is not its own.
    """

    def __init__(self, swapped: tuple[int, ...] = (), scaled: bool = False, late: bool = False, odd: str = "") -> None:
        super().__init__()
        self.scaled, self.late, self.odd = scaled, late, odd
        self.embed = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Layer(i in SOURCES, i in swapped) for i in range(LAYERS))
        self.head = nn.Linear(WIDTH, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = early = self.embed(ids)
        held = None
        for i, layer in enumerate(self.layers):
            if self.odd == "a far read" and i == 9:
                x = x + early
            if self.odd == "the loop" and i == 9:
                x = x * 2
            x, held = layer(x, held)
            early = x if i == 3 else early
            if self.odd == "a cast that changes nothing" and held is not None:
                held = held[0].float(), held[1]
        if self.odd == "the number of layers" and len(self.layers) > 8:
            x = x.tanh()
        if self.scaled:
            x = x * torch.tensor([1.5 + i for i in range(WIDTH)], device=x.device)
            x = x + torch.arange(x.shape[1], device=x.device).unsqueeze(-1)
        assert held is not None
        return self.head(x + held[0] if self.late else x)


def check(model: Model) -> list[int]:
    """Which layers were traced; the program must give what the model gives, bit by bit."""
    program = capture(model)
    ids = torch.tensor([[1, 5, 3, 7, 9]])
    with torch.no_grad():
        want = model(ids)
    assert torch.equal(program.run({**bind(program, weights_from(model)), "input_ids": ids}), want)
    assert len(program.calls()) == LAYERS + 2
    traced: list[int] = program.info.get("traced_layers", list(range(LAYERS)))
    return traced


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("swapped", [(), (3, 9), (2, 3, 4), tuple(range(2, LAYERS))])
def test_all_layers_are_wired_as_in_the_model(swapped: tuple[int, ...], late: bool) -> None:
    torch.manual_seed(len(swapped))
    assert len(check(Model(swapped, late=late).eval())) <= 6


@pytest.mark.parametrize("odd", ["a far read", "the loop", "a cast that changes nothing", "the number of layers"])
def test_what_cannot_be_shown_by_few_layers_is_traced_in_all(odd: str) -> None:
    torch.manual_seed(0)
    model = Model(odd=odd).eval()
    assert len(check(model)) == LAYERS
    assert "traced_all_because" in capture(model).info


def test_a_model_on_the_meta_device_keeps_the_numbers_of_its_code() -> None:
    torch.manual_seed(0)
    model = Model(scaled=True).eval()
    with torch.device("meta"):
        empty = Model(scaled=True).eval()
    program = Pipeline((Canonicalize(),)).run(capture(empty))[0]
    assert all(p.is_meta for p in empty.parameters())
    constants = [r.value for r in program.weights.values() if r.value is not None]
    assert any(c.tolist() == [1.5 + i for i in range(WIDTH)] for c in constants)
    ids = torch.tensor([[1, 5, 3, 7, 9]])
    with torch.no_grad():
        want = model(ids)
    assert torch.equal(program.run({**bind(program, weights_from(model)), "input_ids": ids}), want)
