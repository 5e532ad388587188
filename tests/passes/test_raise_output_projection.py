"""Only the wanted rows reach the vocabulary matrix, in models that select them and in models that do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import is_op, tensor
from deepinfer_compile.ops import OUTPUT_PROJECTION
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_output_projection import RaiseOutputProjection
from deepinfer_compile.pipeline import Record
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, logits_of, weights_from
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, reasons
from tests.plain_model import VOCAB, make_plain

IDS = torch.randint(0, 40, (11,), generator=torch.Generator().manual_seed(1)).tolist()


class Plain(nn.Module):
    """Embedding, one mixing layer of none, and a head of a given kind: input_ids [1, T] -> logits of all tokens."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.embedding = nn.Embedding(40, 12)
        self.mix = nn.Linear(12, 12)
        self.head = nn.Linear(12, 40, bias=kind == "bias")

    def forward(self, input_ids: Tensor) -> Any:
        x = torch.tanh(self.mix(self.embedding(input_ids)))
        if self.kind == "flat":
            return self.head(x[0])
        if self.kind == "softcap":
            return 3.0 * torch.tanh(self.head(x).float() / 3.0)
        if self.kind == "tied":
            return x @ self.embedding.weight.T
        if self.kind == "relu":
            return torch.relu(x) + self.head(x)[..., :12]
        if self.kind == "pair":
            return self.head(x), x
        return self.head(x)


class WithRows(Plain):
    """The same with rows that the model selects itself: logits [1, N, V]."""

    def forward(self, input_ids: Tensor, rows: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embedding(input_ids)))
        if self.kind == "early":
            return self.head(torch.relu(x[:, rows]))
        return self.head(x)[:, rows] if self.kind == "late" else self.head(x.index_select(1, rows))


def raised(model: nn.Module) -> tuple[Program, Program, list[Record]]:
    before, _ = go_on(capture(model), Canonicalize())
    after, records = go_on(before, RaiseOutputProjection(), RaiseOutputProjection())
    assert records[1].count("applied") == 0
    return before, after, records


def eager(model: nn.Module, rows: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([IDS]))
    return logits.reshape(len(IDS), -1)[list(rows)]


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseOutputProjection(), RaiseOutputProjection())
    assert counts(records[0]) == {"suffix": 1}
    assert not reasons(records[0])
    assert records[1].count("applied") == 0
    assert not any("index" in str(n.target) or "linear" in str(n.target) for n in after.blocks["suffix"].graph.nodes)
    check_equal(after, model)


def test_softcap_of_an_architecture_stays_behind_it() -> None:
    model = models.make("gemma", final_logit_softcapping=5.0)
    before, _ = go_on(capture(model), Canonicalize())
    after, records = go_on(before, RaiseOutputProjection())
    assert counts(records[0]) == {"suffix": 1}
    assert any("tanh" in str(n.target) for n in after.blocks["suffix"].graph.nodes)
    check_equal(after, model)


@pytest.mark.parametrize("kind", ["", "bias", "flat", "softcap", "tied"])
def test_selection_is_inserted(kind: str) -> None:
    """A model that gives all logits gets the input `rows`, and its linear sees these rows only."""
    model = Plain(kind)
    before, after, records = raised(model)
    assert "rows" not in [n.name for n in before.inputs()]
    assert [n.name for n in after.inputs()] == ["input_ids", "rows"]
    assert records[0].count("applied") == 1
    ops = [n for gm in after.blocks.values() for n in gm.graph.nodes if is_op(n, OUTPUT_PROJECTION.overload)]
    assert len(ops) == 1
    out = next(n for n in after.skeleton.graph.nodes if n.op == "output").args[0]
    rows_size = tensor(next(n for n in after.inputs() if n.name == "rows")).shape[0]
    assert str(tensor(out).shape[0]) == str(rows_size)  # type: ignore[arg-type]
    bound = bind(after, weights_from(model))
    for rows in ((0,), (10, 3, 3), tuple(range(11)), ()):
        chosen = torch.tensor(rows, dtype=torch.int64)
        got = after.run({**bound, "input_ids": torch.tensor([IDS]), "rows": chosen})
        assert torch.allclose(got, eager(model, rows), atol=1e-6)


@pytest.mark.parametrize("kind", ["late", "direct"])
def test_selection_on_either_side_is_part_of_the_op(kind: str) -> None:
    model = WithRows(kind)
    _, after, records = raised(model)
    assert records[0].count("applied") == 1
    assert not any("index" in str(n.target) for gm in after.blocks.values() for n in gm.graph.nodes)
    got = logits_of(after, weights_from(model), IDS, (4, 0))
    with torch.no_grad():
        assert torch.allclose(got, model(torch.tensor([IDS]), torch.tensor([4, 0]))[0], atol=1e-6)


def test_plain_decoder() -> None:
    model = make_plain(layers=2)
    _, after, records = raised(model)
    assert records[0].count("applied") == 1
    with torch.no_grad():
        want = model(torch.tensor([IDS]))[0, [0, 7]]
    got = logits_of(after, weights_from(model), IDS, (0, 7))
    assert got.shape == (2, VOCAB)
    assert torch.allclose(got, want, atol=1e-5)


def test_early_selection_is_left_where_it_is() -> None:
    """The rows are picked before other work on them, which is cheaper still."""
    model = WithRows("early")
    _, after, records = raised(model)
    assert reasons(records[0]) == ["the rows are selected before other work on them"]
    assert [r.reason for r in records[0].remarks if r.kind == "applied"] == ["one sequence has no batch dimension"]
    got = logits_of(after, weights_from(model), IDS, (4, 0))
    with torch.no_grad():
        assert torch.allclose(got, model(torch.tensor([IDS]), torch.tensor([4, 0]))[0], atol=1e-6)


def test_result_without_a_linear_is_selected_late_and_said_so() -> None:
    model = Plain("relu")
    _, after, records = raised(model)
    assert reasons(records[0]) == ["the result comes of aten.add.Tensor, not of a linear"]
    assert torch.allclose(logits_of(after, weights_from(model), IDS, (4, 0)), eager(model, (4, 0)), atol=1e-6)


def test_several_results_are_left_alone() -> None:
    _, after, records = raised(Plain("pair"))
    assert records[0].count("applied") == 0
    assert reasons(records[0]) == ["the program's result is not the one output of a block"]
    assert [n.name for n in after.inputs()] == ["input_ids"]


def test_bisection_caps_the_pass() -> None:
    _, before = canonical("llama")
    _, records = go_on(before, RaiseOutputProjection(), limits={"raise-output-projection": 0})
    assert records[0].count("applied") == 0


def test_golden() -> None:
    before, after, _ = raised(Plain("softcap"))
    check_golden("raise_output_projection", before_and_after(before, after, "prefix"))
