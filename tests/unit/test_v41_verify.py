"""DeepSeek-V4.1, several tokens at once: verified logits are the whole sequence's, rejected tokens leave no trace.

Caches are compared with those of a prompt of the kept tokens, run alone; 1e-5 in fp32, 1e-10 in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deepinfer_compile.errors import BadRequest, ContextTooLong
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.attention import Past
from deepinfer_compile.models.deepseek_v41.generate import (
    State,
    accept,
    prefill,
    step,
    verify,
)
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.unit.test_v41_capture import SHORT

ROOM = 120
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
MODELS = {dtype: tiny.make(dtype=dtype).requires_grad_(False) for dtype in TOLERANCE}
EXACT = MODELS[torch.float64]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 307, (batch, length), generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, want: Tensor) -> None:
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def leaves(state: State) -> list[Tensor]:
    """Every tensor of a state."""
    return [*state[:2], *(t for past in state.layers for t in past if t is not None), *state.drafts]


def entry(state: State, b: int) -> list[Tensor]:
    return [t[b : b + 1] for t in leaves(state)]


def same_as_prompts(model: DeepseekV41, state: State, lines: list[Tensor], room: int = ROOM) -> None:
    """The state is, entry by entry, the one after the prompt `lines[b]` alone."""
    for b, line in enumerate(lines):
        _, want = prefill(model, line.unsqueeze(0), room)
        for one, two in zip(entry(state, b), leaves(want)):
            if one.dtype == torch.int64:
                assert torch.equal(one, two)
            else:
                close(one, two)


# -- prompts of different lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("lengths", [(1, 40, 17), (2, 3), (16, 15, 31, 40), (40,), (7,)])
def test_prompts_of_different_lengths_are_each_prompt_alone(dtype: torch.dtype, lengths: tuple[int, ...]) -> None:
    model, ids = MODELS[dtype], tokens(len(lengths), 40)
    logits, state = prefill(model, ids, ROOM, torch.tensor(lengths))
    assert state.length.tolist() == list(lengths)
    lines = [ids[b, :n] for b, n in enumerate(lengths)]
    same_as_prompts(model, state, lines)
    for b, line in enumerate(lines):
        close(logits[b], prefill(model, line.unsqueeze(0), ROOM)[0][0])
    after = tokens(len(lengths), 3, seed=5)
    for i in range(3):
        logits, state = step(model, after[:, i], state)
        for b, line in enumerate(lines):
            close(logits[b], model(torch.cat((line, after[b, : i + 1])).unsqueeze(0))[0, -1])


def test_padding_of_a_prompt_leaves_no_trace() -> None:
    lengths = torch.tensor([3, 20])
    ids, other = tokens(2, 20), tokens(2, 20, seed=9)
    other[0, :3], other[1] = ids[0, :3], ids[1]
    one, two = prefill(EXACT, ids, ROOM, lengths), prefill(EXACT, other, ROOM, lengths)
    assert torch.equal(one[0], two[0])
    assert all(torch.equal(a, b) for a, b in zip(leaves(one[1]), leaves(two[1])))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 21), (-1, 5)])
def test_lengths_outside_the_batch_are_refused(lengths: tuple[int, ...]) -> None:
    with pytest.raises(BadRequest, match="length"):
        prefill(EXACT, tokens(2, 20), ROOM, torch.tensor(lengths))
    with pytest.raises(ContextTooLong):
        prefill(EXACT, tokens(2, 20), 19, torch.tensor([1, 1]))


# -- verification and rollback ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("count", [1, 2, 6, 17, 40])  # 17 and 40: more than a window
@pytest.mark.parametrize("length", [1, 16, 33])
def test_verified_logits_are_the_whole_sequences(dtype: torch.dtype, count: int, length: int) -> None:
    model, ids = MODELS[dtype], tokens(3, length + count)
    _, state = prefill(model, ids[:, :length], ROOM)
    logits, pending = verify(model, ids[:, length:], state)
    close(logits, model(ids)[:, length:])
    same_as_prompts(model, accept(pending, torch.tensor([count] * 3)), list(ids))


Round = tuple[int, list[int], list[int]]


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[Round]]:
    """Prompt lengths, and rounds of (tokens verified, of which real, of which kept) for each entry."""
    lengths = draw(st.lists(st.integers(1, 36), min_size=1, max_size=3))
    rounds = []
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.sampled_from((1, 2, 3, 5, 6, 6, 6, 9, 18)))
        real = [draw(st.integers(0, count)) for _ in lengths]
        rounds.append((count, real, [draw(st.integers(0, n)) for n in real]))
    return lengths, rounds


def replayed(dtype: torch.dtype, lengths: list[int], rounds: list[Round]) -> None:
    model = MODELS[dtype]
    line, wrong = tokens(len(lengths), ROOM), tokens(len(lengths), ROOM, seed=3)
    _, state = prefill(model, line[:, : max(lengths)], ROOM, torch.tensor(lengths))
    at = list(lengths)
    for count, real, kept in rounds:
        block = wrong[:, :count].clone()
        for b, number in enumerate(kept):
            block[b, :number] = line[b, at[b] : at[b] + number]
        before = [t.clone() for t in leaves(state)]
        logits, pending = verify(model, block, state, torch.tensor(real))
        assert all(torch.equal(old, now) for old, now in zip(before, leaves(state)))
        after = accept(pending, torch.tensor(kept))
        for b in range(len(lengths)):
            whole = model(torch.cat((line[b, : at[b]], block[b])).unsqueeze(0))[0, at[b] :]
            close(logits[b, : real[b]], whole[: real[b]])
            assert bool(logits[b, real[b] :].isnan().all())
            if kept[b] == 0:
                assert all(torch.equal(old, now) for old, now in zip(entry(state, b), entry(after, b)))
            at[b] += kept[b]
        state = after
    same_as_prompts(model, state, [line[b, :n] for b, n in enumerate(at)])


@settings(max_examples=8, deadline=None, derandomize=True)
@given(histories())
def test_rejected_tokens_leave_no_trace(history: tuple[list[int], list[Round]]) -> None:
    with torch.no_grad():
        replayed(torch.float32, *history)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, derandomize=True)
@given(histories())
def test_rejected_tokens_leave_no_trace_in_many_histories(history: tuple[list[int], list[Round]]) -> None:
    with torch.no_grad():
        replayed(torch.float64, *history)


def test_padding_is_never_kept() -> None:
    ids = tokens(2, 30)
    _, state = prefill(EXACT, ids[:, :20], ROOM)
    _, pending = verify(EXACT, ids[:, 20:26], state, torch.tensor([2, 6]))
    same_as_prompts(EXACT, accept(pending, torch.tensor([6, 6])), [ids[0, :22], ids[1, :26]])


def test_padding_may_lie_above_the_capacity() -> None:
    ids = tokens(1, 22)
    _, state = prefill(EXACT, ids[:, :19], 20)
    logits, pending = verify(EXACT, ids[:, 19:22], state)
    close(logits[:, :1], EXACT(ids[:, :20])[:, -1:])
    same_as_prompts(EXACT, accept(pending, torch.tensor([1])), [ids[0, :20]], room=20)


@pytest.mark.parametrize("length", [1, 7, 15, 30])
def test_slots_not_yet_written_do_not_show(length: int) -> None:
    ids = tokens(3, length + 5)
    _, clean = prefill(EXACT, ids[:, :length], 64)

    def dirty(past: Past) -> Past:
        return past._replace(
            window=torch.where(past.window == 0, 1e6, past.window),
            rows=None if past.rows is None else torch.where(past.rows == 0, 1e6, past.rows),
            keys=None if past.keys is None else torch.where(past.keys == 0, 1e6, past.keys),
        )

    got, _ = verify(EXACT, ids[:, length:], clean._replace(layers=tuple(dirty(past) for past in clean.layers)))
    close(got, verify(EXACT, ids[:, length:], clean)[0])


class Verify(nn.Module):
    """Some tokens at once and what is kept of them as a module, for export."""

    def __init__(self, model: DeepseekV41) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, state: State, kept: Tensor) -> tuple[Tensor, State]:
        logits, pending = verify(self.model, tokens, state)
        return logits, accept(pending, kept)


def test_one_graph_verifies_any_number_of_tokens_at_any_position() -> None:
    model = tiny.make(dtype=torch.float64, **SHORT).requires_grad_(False)
    ids = torch.randint(0, 307, (3, 40))
    _, state = prefill(model, ids[:, :1], 40)
    fixed = torch.utils._pytree.tree_map(lambda _: None, state)
    shapes = ({1: torch.export.Dim("count", min=1, max=64)}, fixed, None)
    example = (ids[:, :4].contiguous(), state, torch.tensor([0, 1, 4]))
    graph = torch.export.export(Verify(model), example, dynamic_shapes=shapes, strict=False).module()
    whole, at = model(ids), 1
    for count, kept in ((1, 1), (6, 2), (3, 3), (20, 18), (5, 0), (9, 9)):
        logits, state = graph(ids[:, at : at + count], state, torch.tensor([kept] * 3))
        torch.testing.assert_close(logits, whole[:, at : at + count], rtol=1e-10, atol=1e-10)
        at += kept
    _, want = prefill(model, ids[:, :at], 40)
    torch.testing.assert_close(state, want, rtol=1e-10, atol=1e-10)
