"""The backend door and masks: one that sizes alone make causal is no operand any more, every other one stays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from deepinfer_compile import backend
from tests import models

SDPA = torch.nn.functional.scaled_dot_product_attention


class Seen:
    """Compiles with eager in Inductor's place and keeps the graphs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.graphs: list[GraphModule] = []
        monkeypatch.setattr(backend, "_inductor", self.keep)

    def keep(self, gm: GraphModule, example_inputs: Any, patches: Any) -> Any:
        self.graphs.append(gm)
        return gm

    def calls(self) -> list[Node]:
        return [n for gm in self.graphs for n in gm.graph.nodes if "scaled_dot_product" in str(n.target)]


def masks(calls: list[Node]) -> set[tuple[bool, bool]]:
    """(has a mask, is causal) of each attention."""
    found = set()
    for node in calls:
        given = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), node.args)) | dict(node.kwargs)
        found.add((given.get("attn_mask") is not None, bool(given.get("is_causal"))))
    return found


def run(model: Any, backend_name: Any, dynamic: bool | None, *lengths: int, **more: Any) -> None:
    compiled = torch.compile(model, backend=backend_name, dynamic=dynamic)
    for length in lengths:
        ids = torch.randint(3, models.VOCAB, (2, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = model(ids, use_cache=False, **{k: v[:, :length] for k, v in more.items()}).logits
            got = compiled(ids, use_cache=False, **{k: v[:, :length] for k, v in more.items()}).logits
        assert (got - want).abs().max() <= 4e-6 * want.abs().max()


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("llama", False),
        pytest.param("llama", True, marks=pytest.mark.slow),
        ("deepseek_v3", False),
        pytest.param("deepseek_v3", True, marks=pytest.mark.slow),
    ],
)
def test_a_prompt_without_a_mask_is_causal(name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    torch._dynamo.reset()
    run(models.make(name, num_hidden_layers=1), backend.deepinfer, dynamic, 100, 71)
    assert masks(seen.calls()) == {(False, True)}


def test_padding_stays_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    torch._dynamo.reset()
    padded = torch.ones(2, 33, dtype=torch.long)
    padded[1, :9] = 0
    run(models.make("llama", num_hidden_layers=1), backend.deepinfer, False, 33, attention_mask=padded)
    assert masks(seen.calls()) == {(True, False)}


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_window_stays_a_mask(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    torch._dynamo.reset()
    run(models.make("mistral", num_hidden_layers=1, sliding_window=8), backend.deepinfer, dynamic, 33, 18)
    assert masks(seen.calls()) == {(True, False)}


def test_a_window_that_no_row_of_fixed_length_meets_is_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    torch._dynamo.reset()
    run(models.make("mistral", num_hidden_layers=1, sliding_window=40), backend.deepinfer, False, 33)
    assert masks(seen.calls()) == {(False, True)}


def test_positions_of_the_caller_stay_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences in one row, told apart by their positions."""
    seen = Seen(monkeypatch)
    torch._dynamo.reset()
    places = torch.cat([torch.arange(20), torch.arange(13)])[None].expand(2, -1)
    run(models.make("llama", num_hidden_layers=1), backend.deepinfer, False, 33, position_ids=places)
    assert masks(seen.calls()) == {(True, False)}
