"""The training forwards against the models: 1e-4 in fp32, random weights, batch 3, odd sizes, both kinds of choice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer_compile.models.deepseek_v41 import attention, tiny
from deepinfer_compile.models.deepseek_v41.generate import prefill, propose
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained import ced_draft, ced_forward, fast, v3_forward, v3_model
from tests.trained.small import V3

CPU = torch.device("cpu")
TOLERANCE = 1e-4
SPARSE, DENSE = torch.tensor(False), torch.tensor(True)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(count: int, batch: int, length: int) -> Tensor:
    return torch.randint(0, count, (batch, length), generator=torch.Generator().manual_seed(1))


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)


def ced(model: DeepseekV41, ids: Tensor, dense: Tensor = SPARSE) -> tuple[ced_forward.Out, ced_forward.Notes]:
    tables = ced_forward.Tables(model, ids.shape[1], CPU)
    return ced_forward.run(model, ids, ced_forward.gram_rows(model, ids), tables, dense, taught=2)


@pytest.mark.parametrize("length", [2, 16, 62, 128])
@pytest.mark.parametrize("batch", [1, 3])
def test_ced_is_the_model(batch: int, length: int) -> None:
    model = tiny.make()
    ids = tokens(307, batch, length)
    out, _ = ced(model, ids)
    want = model.run(ids)
    close(out.hidden, want.hidden)
    close(out.features, want.features)


def test_dense_is_the_model_that_chooses_everything() -> None:
    ids = tokens(307, 2, 90)
    out, _ = ced(tiny.make(), ids, DENSE)
    close(out.hidden, tiny.make(index_topk=90, candidate_topk_blocks=90).run(ids).hidden)
    assert (out.hidden - ced(tiny.make(), ids)[0].hidden).abs().max() > 1e-2


@pytest.mark.parametrize("count", [1, 4, 11, 40])
def test_best_is_the_models_best_with_ties(count: int) -> None:
    drawn = torch.randn(3, 7, 33, generator=torch.Generator().manual_seed(0))
    scores = torch.where(drawn < 0.5, 0.0, drawn) - torch.where(drawn < -1, 1.0, 0.0)
    scores[0, 0] = -0.0
    allowed = drawn.roll(1, -1) > -0.3
    allowed[1, 1] = False
    assert torch.equal(ced_forward.best(scores, allowed, count), attention.best(scores, allowed, count))


def test_notes_count_every_choice_and_no_divergence_is_negative() -> None:
    model = tiny.make()
    _, notes = ced(model, tokens(307, 3, 64))
    assert [int(load.sum()) for load in notes.loads.values()] == [3 * 64 * 3] * 10
    assert len(notes.index) == 4
    assert all(value > 0 for value in notes.index)


def test_divergence_is_zero_where_scores_are_the_attentions() -> None:
    queries, keys = torch.randn(2, 1, 8, 6), torch.randn(2, 5 + 4, 6)
    sight = torch.ones(8, 9, dtype=torch.bool).tril()
    scores = (queries[:, 0] * 6**-0.5) @ keys[:, 5:].transpose(1, 2)
    assert ced_forward.teach(scores, queries, keys, sight, torch.zeros(1)).abs() < 1e-6
    assert ced_forward.teach(-scores, queries, keys, sight, torch.zeros(1)) > 1e-2


@torch.enable_grad()
def test_indexers_and_the_rest_do_not_teach_each_other() -> None:
    model = tiny.make()
    for p in model.parameters():
        p.requires_grad_()
    ids = tokens(307, 2, 64)
    out, notes = ced(model, ids)

    def reached(value: Tensor) -> set[str]:
        model.zero_grad(set_to_none=True)
        value.backward(retain_graph=True)
        return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}

    assert all(".indexer." in name for name in reached(torch.stack(notes.index).sum()))
    assert len(reached(torch.stack(notes.index).sum())) == 2 * 4 + 2 * 3
    assert not any(".indexer." in name for name in reached(out.hidden.square().sum()))


@pytest.mark.parametrize("anchors", [[1], [3, 17, 40]])
def test_drafts_are_the_models(anchors: list[int]) -> None:
    model = tiny.make()
    assert model.mtp is not None
    for at in anchors:
        ids = tokens(307, 3, 64)
        _, state = prefill(model, ids[:, :at], 64)
        want = propose(model, ids[:, at], state)
        ids[:, at + 1 : at + 6] = want.tokens
        others = torch.tensor([*(a for a in anchors if a < at), at])
        out, _ = ced(model, ids)
        tables = ced_draft.DraftTables(model.mtp, 64, CPU)
        made, _ = ced_draft.drafts(model, ids, out.features, others, tables)
        close(made.logits[:, -1], want.logits)
        close(made.sure[:, -1].sigmoid(), want.confidence)


def test_draft_losses_by_hand() -> None:
    model = tiny.make()
    assert model.mtp is not None
    tables = ced_draft.DraftTables(model.mtp, 32, CPU)
    ids, at = tokens(9, 2, 32), torch.tensor([4, 20])
    likely = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
    likely[0, 6] = (likely[0, 6] + 1) % 9
    likely[1, 22] = (likely[1, 22] + 1) % 9
    want = torch.stack([likely[:, a : a + 5] for a in at.tolist()], dim=1)
    logits = 50.0 * torch.nn.functional.one_hot(want, 9).float()
    logits[1, 1, 1] = logits[1, 1, 1].roll(1)
    made = ced_draft.Drafts(logits, torch.zeros(2, 2, 5))
    nats, doubt, accepted, accepted_new = ced_draft.losses(made, ids, likely, at, tables, judged=1, prompt=10)
    assert nats < 1e-6
    torch.testing.assert_close(doubt, torch.tensor(2.0).log())
    assert accepted == (3 + 5) / 2, "the text left the model's most likely line at the third slot: it still counts"
    assert accepted_new == (5 + 1) / 2


def test_v3_is_the_model() -> None:
    model = v3_model.build(101, **V3)
    for name, bias in model.named_buffers():
        if name.endswith("bias"):
            bias.copy_(0.2 * torch.randn(bias.shape))
    for length, batch in ((1, 1), (33, 3)):
        ids = tokens(101, batch, length + 1)
        angles = v3_forward.angles_of(model, length, CPU)
        hidden, loads = v3_forward.run(model, ids[:, :-1], angles)
        close(model.main.lm_head(hidden), model.main(ids[:, :-1], use_cache=False).logits)
        made = model.main.lm_head(v3_forward.ahead(model, hidden, ids[:, 1:], angles, loads))
        close(made, v3_model.ahead(model, hidden, ids[:, 1:]))
        assert [int(load.sum()) for load in loads.values()] == [batch * length * 4] * 3


def test_biases_move_only_where_load_strays() -> None:
    bias = torch.zeros(4)
    fast.move_bias(bias, torch.tensor([10.0, 8.0, 1.0, 21.0]), 0.5)
    assert bias.tolist() == [0.0, 0.0, 0.5, -0.5]
