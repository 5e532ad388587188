"""Positions come from the input: rows that start anywhere in a sequence get what the whole sequence gives them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import NotRowwise
from deepinfer_compile.graph import is_op
from deepinfer_compile.passes.bind_positions import BindPositions
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from tests.architectures import FIRST
from tests.golden_text import check_golden
from tests.passes.harness import check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on
from tests.plain_model import make_plain

IDS = torch.randint(0, 40, (1, 17), generator=torch.Generator().manual_seed(1))
Encode = Callable[["Encoded", Tensor], Tensor]


def learned(m: Encoded, x: Tensor) -> Tensor:
    return x + m.learned(torch.arange(x.shape[1], device=x.device))


def learned_with_offset(m: Encoded, x: Tensor) -> Tensor:
    return x + m.learned(torch.arange(2, x.shape[1] + 2)[None].expand(x.shape[0], -1))


def angle(m: Encoded, x: Tensor) -> Tensor:
    return x * torch.outer(torch.arange(x.shape[1], dtype=torch.float32), m.rates).cos().repeat(1, 2)


def sliced_table(m: Encoded, x: Tensor) -> Tensor:
    return x + m.table[: x.shape[1]]


def deep_table(m: Encoded, x: Tensor) -> Tensor:
    return x + m.table[None, None, :, :][:, :, 1 : x.shape[1] + 1][:, 0]


def computed_table(m: Encoded, x: Tensor) -> Tensor:
    return x * torch.outer(torch.arange(32).float(), m.rates)[: x.shape[1]].sin().repeat(1, 2)


def complex_table(m: Encoded, x: Tensor) -> Tensor:
    z = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(z * m.turns[: x.shape[1]]).flatten(-2)


def sliced_rows(m: Encoded, x: Tensor) -> Tensor:
    return x[:, : m.table[: x.shape[1]].shape[0]] + m.learned(torch.arange(x.shape[1]))


WAYS = (learned, learned_with_offset, angle, sliced_table, deep_table, computed_table, complex_table, sliced_rows)
REFUSED: dict[str, tuple[Encode, str, str]] = {
    "scale by length": (lambda m, x: x * x.shape[1], "aten.mul", "the number of packed tokens as a value"),
    "last row": (lambda m, x: x + x[:, x.shape[1] - 1 :], "aten.slice", "the number of packed tokens as a value"),
    "backwards": (
        lambda m, x: x + m.learned(torch.arange(x.shape[1] - 1, -1, -1)),
        "aten.arange",
        "the number of packed tokens as a value",
    ),
    "filled": (lambda m, x: x + torch.full((1,), x.shape[1]), "aten.full", "the number of packed tokens as a value"),
}


class Encoded(nn.Module):
    """Token embeddings with positions worked in by `way`, then a linear: every token on its own."""

    table: Tensor
    rates: Tensor
    turns: Tensor

    def __init__(self, way: Encode) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embedding = nn.Embedding(40, 8)
        self.learned = nn.Embedding(34, 8)
        self.head = nn.Linear(8, 40)
        self.register_buffer("table", torch.randn(33, 8))
        self.register_buffer("rates", torch.tensor([1.0, 0.3, 0.1, 0.03]), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones(32, 4), torch.randn(32, 4)), persistent=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.way(self, self.embedding(input_ids)))


def bound(model: nn.Module) -> tuple[Program, Program]:
    before, _ = go_on(capture(model), Canonicalize())
    after, records = go_on(before, BindPositions(), BindPositions())
    assert records[0].count("applied") >= 1
    assert records[1].count("applied") == 0
    return before, after


def run_at(program: Program, model: nn.Module, ids: Tensor, positions: Tensor) -> Tensor:
    given = {"input_ids": ids, "position_ids": positions}
    found: Tensor = program.run({**bind(program, weights_from(model)), **given})
    return found


@pytest.mark.parametrize("name", FIRST)
def test_architectures_take_positions_already(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, BindPositions())
    assert records[0].count("applied") == 0
    check_equal(after, model)


@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_rows_anywhere_equal_the_whole_sequence(way: Encode) -> None:
    model = Encoded(way)
    _, after = bound(model)
    assert [n.name for n in after.inputs()] == ["input_ids", "position_ids"]
    with torch.no_grad():
        want = model(IDS)
    assert torch.equal(run_at(after, model, IDS, torch.arange(17)[None]), want)
    assert torch.equal(run_at(after, model, IDS[:, 5:], torch.arange(5, 17)[None]), want[:, 5:])
    two = torch.tensor([[16, 0, 7]])
    assert torch.allclose(run_at(after, model, IDS[:, two[0]], two), want[:, two[0]], atol=1e-6)


def test_more_packed_tokens_than_the_table_has_rows() -> None:
    """Forty requests of one token each at position 3: the table has 33 rows."""
    model = Encoded(sliced_table)
    _, after = bound(model)
    ids = torch.full((1, 40), 7)
    got = run_at(after, model, ids, torch.full((1, 40), 3))
    with torch.no_grad():
        assert torch.allclose(got[0, 39], model(ids[:, :4])[0, 3], atol=1e-6)


def test_table_that_crosses_into_layers() -> None:
    """The plain decoder slices its complex table in front of the layers, once."""
    model = make_plain(layers=2)
    before, _ = go_on(capture(model), Canonicalize())
    after, records = go_on(before, BindPositions())
    assert counts(records[0]) == {"prefix": 1}
    assert any(is_op(n, torch.ops.aten.index_select.default) for n in after.blocks["prefix"].graph.nodes)
    with torch.no_grad():
        want = model(IDS)
    assert torch.allclose(run_at(after, model, IDS, torch.arange(17)[None]), want, atol=1e-5)


class LayeredPositions(nn.Module):
    """Every layer makes its own positions and slices a table that it was handed whole."""

    table: Tensor

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.linear(x) + table[: x.shape[1]] + torch.arange(x.shape[1])[None, :, None] / 10

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(40, 8)
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))
        self.register_buffer("table", torch.randn(33, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x, table = self.embedding(input_ids), self.table * 2
        for layer in self.layers:
            x = layer(x, table)
        return x


def test_every_call_of_a_layer_gets_the_positions() -> None:
    model = LayeredPositions()
    _, after = bound(model)
    assert len([n for n in after.skeleton.graph.nodes if n.name == "position_ids"]) == 1
    with torch.no_grad():
        want = model(IDS)
    assert torch.allclose(run_at(after, model, IDS[:, 5:], torch.arange(5, 17)[None]), want[:, 5:], atol=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_length_as_a_value_is_refused(case: str) -> None:
    way, target, reason = REFUSED[case]
    before, _ = go_on(capture(Encoded(way)), Canonicalize())
    with pytest.raises(NotRowwise, match=reason) as caught:
        go_on(before, BindPositions())
    assert str(caught.value.values["target"]).startswith(target)
    assert "test_bind_positions.py" in caught.value.where


def test_bisection_caps_the_pass() -> None:
    before, _ = go_on(capture(Encoded(learned)), Canonicalize())
    with pytest.raises(NotRowwise, match=r"aten\.arange"):
        go_on(before, BindPositions(), limits={"bind-positions": 0})


def test_golden() -> None:
    before, after = bound(Encoded(sliced_rows))
    check_golden("bind_positions", before_and_after(before, after, "prefix"))
