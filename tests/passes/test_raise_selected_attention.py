"""Masks of chosen rows become lists, over block borders, with the same logits; masks of another meaning stay."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import argument, is_op, target_name
from deepinfer_compile.models.deepseek_v41.attention import Attention, Shared
from deepinfer_compile.ops import SELECT_ROWS, SELECTED_ATTENTION
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_selected_attention import RaiseSelectedAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import models, v41
from tests.passes.stages import canonical, go_on, reasons

READS = (SELECTED_ATTENTION.overload,)
READERS = (2, 3, 5, 6)


def nodes(program: Program, *targets: Any) -> list[Any]:
    return [n for gm in program.blocks.values() for n in gm.graph.nodes if is_op(n, *targets)]


@pytest.mark.parametrize(
    "dtype", [torch.float64, *(pytest.param(t, marks=pytest.mark.slow) for t in (torch.float32, torch.bfloat16))]
)
def test_the_logits_are_the_same(dtype: torch.dtype) -> None:
    model, before = v41.canonical(dtype)
    after, records = go_on(before, RaiseSelectedAttention())
    assert [r.reason for r in records[0].remarks] == ["5 attentions over latents, 3 choices of rows as lists"]
    kinds = Counter(target_name(n) for n in nodes(after, SELECT_ROWS.overload, SELECTED_ATTENTION.overload))
    assert kinds == {"deepinfer.select_rows": 3, "deepinfer.selected_attention": 5}
    assert not [n for gm in after.blocks.values() for n in gm.graph.nodes if "argsort" in target_name_of(n)]
    limits = [[argument(n, k) for k in ("ratio", "top", "block", "blocks")] for n in nodes(after, SELECT_ROWS.overload)]
    assert limits == [[2, 11, 1, 0], [1, 11, 5, 4], [1, 11, 5, 0]]
    assert {argument(n, "window") for n in nodes(after, SELECTED_ATTENTION.overload)} == {16}
    weights = weights_from(model)
    for length in (1, 2, 3, 40, 130):
        ids = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        want, got = (logits_of(p, weights, ids, range(length)) for p in (before, after))
        tolerance = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_readers_of_unlike_rows_are_told_apart() -> None:
    """Layers of both sides are one block: masks of rows look alike, lists of rows of one and of two tokens do not."""
    model = v41.make(
        num_hidden_layers=7,
        compress_ratios=(0, 2, 2, 2, 1, 1, 1),
        kv_source_layer_ids=(1, 4),
        index_source_layer_ids=(1, 4),
        candidate_source_layer_id=4,
        num_nextn_predict_layers=0,
    )
    before = Pipeline((Canonicalize(),)).run(capture(model))[0]
    assert [c.target for c in before.calls() if c.meta["layer"] in READERS] == ["layer2"] * 4
    after, records = go_on(before, RaiseSelectedAttention())
    assert [r.kind for r in records[0].remarks] == ["applied"]
    readers = [str(c.target) for c in after.calls() if c.meta["layer"] in READERS]
    attending = [[argument(n, "ratio") for n in after.blocks[r].graph.nodes if is_op(n, *READS)] for r in readers]
    assert attending == [[2], [2], [1], [1]]
    weights, ids = weights_from(model), list(range(7, 77))
    want, got = (logits_of(p, weights, ids, range(70)) for p in (before, after))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)


def target_name_of(node: Any) -> str:
    return target_name(node) if node.op == "call_function" else ""


def changed(monkeypatch: pytest.MonkeyPatch, name: str) -> Program:
    """The program of a model that means something else by one of its masks."""
    whole = getattr(Attention, name)

    def attend(self: Attention, q: Tensor, at: Tensor, latents: Tensor, visible: Tensor, shared: Any) -> Tensor:
        age = at.unsqueeze(2) - at.unsqueeze(1)
        out: Tensor = whole(self, q, at, latents, visible & (age % 3 != 2), shared)
        return out

    def publish(self: Attention, rows: Tensor, keys: Tensor, numbers: Tensor, dtype: torch.dtype) -> Shared:
        found: Shared = whole(self, rows, keys, torch.where(numbers > 3, numbers + 1, numbers), dtype)
        return found

    def choose(self: Attention, x: Tensor, low: Tensor, at: Tensor, shared: Any) -> Any:
        made = whole(self, x, low, at, shared)
        if made is None:
            return made
        return made._replace(rows=made.rows + made.chosen.sum() * 0)

    other = {"attend": attend, "_publish": publish, "_choose": choose}[name]
    monkeypatch.setattr(Attention, name, other)
    return Pipeline((Canonicalize(),)).run(capture(v41.make()))[0]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("attend", "no window", marks=pytest.mark.slow),
        pytest.param("_publish", "not numbered by the tokens that complete them", marks=pytest.mark.slow),
        pytest.param("_choose", "reads a mask of chosen rows, too", marks=pytest.mark.slow),
    ],
)
def test_masks_of_another_meaning_stay(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = changed(monkeypatch, name)
    after, records = go_on(before, RaiseSelectedAttention())
    assert [reason in r for r in reasons(records[0])] == [True]
    assert not nodes(after, SELECT_ROWS.overload, SELECTED_ATTENTION.overload)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_other_architectures_have_none(name: str) -> None:
    assert name in models.CONFIGS
    _, records = go_on(canonical(name)[1], RaiseSelectedAttention())
    assert not records[0].remarks
