"""DeepSeek-V4.1 step by step against the whole sequence: 1e-5 in fp32, 1e-10 in fp64. Stale slots never show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer_compile.errors import BadModelConfig, ContextTooLong
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.attention import Past
from deepinfer_compile.models.deepseek_v41.generate import State, generate, prefill, propose, step
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41

LENGTHS = (1, 2, 15, 16, 17, 63, 64, 65, 130)
AFTER = 5
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return tiny.make(dtype=torch.float64)


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 307, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def mapped(state: State, change: object) -> State:
    """The state with every cache tensor replaced by change(kind, tensor)."""
    layers = tuple(
        Past(*(None if t is None else change(k, t) for k, t in zip(Past._fields, past)))  # type: ignore[operator]
        for past in state.layers
    )
    drafts = tuple(change("window", ring) for ring in state.drafts)  # type: ignore[operator]
    return state._replace(layers=layers, drafts=drafts)


@pytest.mark.parametrize("window", [16, 64])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_steps_after_any_prefill_are_the_whole_sequence(dtype: torch.dtype, batch: int, window: int) -> None:
    model = tiny.make(dtype=dtype, sliding_window=window)
    ids = tokens(batch, 130 + AFTER)
    whole = model(ids)
    assert whole.shape == (batch, 130 + AFTER, 307)
    for length in LENGTHS:
        logits, state = prefill(model, ids[:, :length], 130 + AFTER)
        close(logits, whole[:, length - 1])
        for p in range(length, length + AFTER):
            logits, state = step(model, ids[:, p], state)
            close(logits, whole[:, p])
        assert state.length.tolist() == [length + AFTER] * batch


def test_every_token_one_by_one_is_the_whole_sequence(model: DeepseekV41) -> None:
    ids = tokens(1, 130, seed=1)
    whole = model(ids)
    _, state = prefill(model, ids[:, :1], 130)
    for p in range(1, 130):
        logits, state = step(model, ids[:, p], state)
        close(logits, whole[:, p])


@pytest.mark.parametrize("length", LENGTHS)
def test_what_follows_never_changes_what_came_before(model: DeepseekV41, length: int) -> None:
    ids = tokens(3, 140)
    other = torch.cat((ids[:, :length], tokens(3, 140 - length, seed=7)), dim=1)
    close(model(other)[:, :length], model(ids)[:, :length])
    close(model(ids[:, :length]), model(ids)[:, :length])


def test_steps_and_prefill_leave_the_same_caches(model: DeepseekV41) -> None:
    ids = tokens(3, 37)
    _, at_once = prefill(model, ids, 40)
    _, stepped = prefill(model, ids[:, :20], 40)
    for p in range(20, 37):
        _, stepped = step(model, ids[:, p], stepped)
    assert torch.equal(at_once.recent, stepped.recent)
    for one, two in zip(at_once.layers, stepped.layers):
        for got, want in zip(one, two):
            assert (got is None) == (want is None)
            if got is not None and want is not None:
                close(got, want)
    for ring, want in zip(at_once.drafts, stepped.drafts):
        close(ring, want)


def test_entries_of_a_batch_may_be_at_different_positions(model: DeepseekV41) -> None:
    ids = tokens(2, 60)
    lengths = (13, 50)
    alone = [prefill(model, ids[b : b + 1, :n], 60)[1] for b, n in enumerate(lengths)]
    flat = [torch.utils._pytree.tree_flatten(state) for state in alone]
    joined = [torch.cat(pair) for pair in zip(flat[0][0], flat[1][0]) if pair[0] is not None]
    leaves = iter(joined)
    state = torch.utils._pytree.tree_unflatten(
        [None if leaf is None else next(leaves) for leaf in flat[0][0]], flat[0][1]
    )
    whole = model(ids)
    for i in range(6):
        logits, state = step(model, torch.stack([ids[b, n + i] for b, n in enumerate(lengths)]), state)
        for b, n in enumerate(lengths):
            close(logits[b], whole[b, n + i])


@pytest.mark.parametrize("length", [1, 7, 15, 30])
def test_slots_not_yet_written_do_not_show(model: DeepseekV41, length: int) -> None:
    ids = tokens(3, length + 4)
    _, clean = prefill(model, ids[:, :length], 64)
    dirty = mapped(clean, lambda kind, t: torch.where(t == 0, 1e6, t) if kind in ("window", "rows", "keys") else t)
    anchor = ids[:, length]
    close(propose(model, anchor, dirty).logits, propose(model, anchor, clean).logits)
    for p in range(length, length + 4):
        want, clean = step(model, ids[:, p], clean)
        got, dirty = step(model, ids[:, p], dirty)
        close(got, want)


def test_a_step_changes_nothing_of_the_state_before_it(model: DeepseekV41) -> None:
    ids = tokens(1, 9)
    _, state = prefill(model, ids, 12)
    before = mapped(state, lambda _, t: t.clone())
    first, _ = step(model, ids[:, 0], state)
    for old, new in zip(before.layers, state.layers):
        assert all(a is None or torch.equal(a, b) for a, b in zip(old, new))
    assert torch.equal(step(model, ids[:, 0], state)[0], first)


def test_generation_is_greedy(model: DeepseekV41) -> None:
    ids = tokens(3, 11)
    got = generate(model, ids, 9)
    line = ids
    for _ in range(9):
        line = torch.cat((line, model(line)[:, -1:].argmax(-1)), dim=1)
    assert torch.equal(got, line[:, 11:])


def test_too_long_a_prompt_is_refused(model: DeepseekV41) -> None:
    with pytest.raises(ContextTooLong, match="needs 9 tokens"):
        prefill(model, tokens(1, 9), 8)
    with pytest.raises(ContextTooLong, match="needs 513 tokens"):
        generate(model, tokens(1, 500), 13)


def test_drafts_read_the_window_before_the_anchor_and_each_other(model: DeepseekV41) -> None:
    ids = tokens(1, 41)
    _, state = prefill(model, ids[:, :40], 50)
    anchor = ids[:, 40]
    first = propose(model, anchor, state).logits
    # position 24 is 16 before the anchor, outside the window of 16 for every token of the block; 25 is inside for the
    # anchor alone, and the rest see it through the anchor
    for position, changed in ((24, [False] * 5), (25, [True] * 5), (39, [True] * 5)):
        rings = tuple(ring.clone() for ring in state.drafts)
        for ring in rings:
            ring[:, position % 16] += 1
        got = propose(model, anchor, state._replace(drafts=rings)).logits
        differs = [(got[0, i] - first[0, i]).abs().max().item() > 1e-9 for i in range(5)]
        assert differs == changed
    assert not torch.allclose(propose(model, (anchor + 1) % 307, state).logits, first)


def test_drafts_are_corrected_left_to_right(model: DeepseekV41) -> None:
    ids = tokens(3, 20)
    _, state = prefill(model, ids[:, :19], 30)
    assert model.mtp is not None
    got = propose(model, ids[:, 19], state)
    weight = model.mtp.markov_head.weight.clone()
    model.mtp.markov_head.weight.zero_()
    plain = propose(model, ids[:, 19], state)
    model.mtp.markov_head.weight.copy_(weight)
    assert got.tokens.shape == got.confidence.shape == (3, 5)
    before = ids[:, 19]
    for i in range(5):
        want = plain.logits[:, i] + model.mtp.markov_embed.weight[before] @ weight.t()
        close(got.logits[:, i], want)
        before = got.tokens[:, i]
        assert torch.equal(before, want.argmax(-1))
    assert bool(((got.confidence > 0) & (got.confidence < 1)).all())


def test_bf16_is_near_fp64_and_keeps_open_rows_wide(model: DeepseekV41) -> None:
    """Rounding flips some choices of experts and rows, so the mean is bounded: 0.1 where logits have deviation 1."""
    low, ids = tiny.make(dtype=torch.bfloat16), tokens(3, 40)
    logits, state = prefill(low, ids[:, :33], 40)
    lines = [logits]
    for p in range(33, 40):
        logits, state = step(low, ids[:, p], state)
        lines.append(logits)
    got = torch.stack(lines, dim=1)
    assert got.dtype == torch.float32
    assert (got - model(ids)[:, 32:]).abs().mean() < 0.1
    kinds = [None if t is None else t.dtype for t in state.layers[2]]
    assert kinds == [torch.bfloat16] * 3 + [torch.float32] * 2


def test_without_drafts_there_is_no_draft_state() -> None:
    model = tiny.make(num_nextn_predict_layers=0, dspark_target_layer_ids=())
    _, state = prefill(model, tokens(1, 5), 8)
    assert state.drafts == ()
    assert step(model, tokens(1, 1)[:, 0], state)[0].shape == (1, 307)
    with pytest.raises(BadModelConfig, match="num_nextn_predict_layers"):
        propose(model, tokens(1, 1)[:, 0], state)
