"""DeepSeek-V4.1, drafted: blocks of any drafter give the tokens of plain greedy decoding, fp64, over 256 tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from deepinfer_compile.errors import ContextTooLong
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.draft import Draft
from deepinfer_compile.models.deepseek_v41.generate import (
    Drafting,
    State,
    accept,
    generate,
    prefill,
    propose,
    speculate,
    step,
    verify,
)
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41

EXACT = tiny.make(dtype=torch.float64).requires_grad_(False)
PROMPT, COUNT = 11, 256


@pytest.fixture(scope="module", autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 307, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def plain() -> Tensor:
    found = generate(EXACT, tokens(3, PROMPT), COUNT)
    assert all(len(set(line.tolist())) > 20 for line in found)  # no short loop
    return found


def knowing(plain: Tensor, right: float, size: int = 5) -> Drafting:
    """Drafts the plain continuation, each token wrong with probability 1 - right."""
    generator = torch.Generator().manual_seed(1)
    padded = torch.cat((plain, torch.zeros(len(plain), size + 1, dtype=torch.int64)), dim=1)

    def drafted(model: DeepseekV41, anchor: Tensor, state: State) -> Draft:
        at = (state.length - PROMPT).unsqueeze(1) + 1 + torch.arange(size)
        ids = padded.gather(1, at)
        lost = torch.rand(ids.shape, generator=generator) >= right
        return Draft(torch.where(lost, (ids + 1) % 307, ids), torch.empty(0), torch.empty(0))

    return drafted


def test_the_draft_layers_blocks_give_the_plain_tokens(plain: Tensor) -> None:
    got, rounds = speculate(EXACT, tokens(3, PROMPT), COUNT)
    assert torch.equal(got, plain)
    assert COUNT / 6 <= rounds <= COUNT


@pytest.mark.parametrize(("right", "most"), [(1.0, 43), (0.75, 160)])
def test_blocks_of_any_drafter_give_the_plain_tokens(plain: Tensor, right: float, most: int) -> None:
    got, rounds = speculate(EXACT, tokens(3, PROMPT), COUNT, knowing(plain, right))
    assert torch.equal(got, plain)
    assert 43 <= rounds <= most


def test_drafts_after_verified_tokens_are_those_after_steps() -> None:
    ids = tokens(2, 40)
    _, state = prefill(EXACT, ids[:, :30], 60)
    _, pending = verify(EXACT, ids[:, 30:37], state)
    got = propose(EXACT, ids[:, 35], accept(pending, torch.tensor([5, 5])))
    for p in range(30, 35):
        _, state = step(EXACT, ids[:, p], state)
    want = propose(EXACT, ids[:, 35], state)
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-10, atol=1e-10)


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ContextTooLong, match="needs 513 tokens"):
        speculate(EXACT, tokens(1, 500), 13)
