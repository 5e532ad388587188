"""What the operation `sample` means: the runtime's own sampler, away from where rounding decides."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile import ops
from deepinfer_compile.runtime.sampling import Sampler, uniform
from tests import sampled
from tests.runtime.fakes import noise
from tests.runtime.test_sampling import request

KINDS = st.tuples(
    st.sampled_from([0.0, 1e-3, 0.5, 1.0, 3.0]),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
    st.sampled_from([0, 1, 2, 10, 96, 97, 5000]),
    st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
)


def runtime_tokens(given: dict[str, torch.Tensor], seeds: list[int]) -> list[int]:
    """The sampler's tokens, each the first of its request."""
    names = ("temperature", "min_p", "top_k", "top_p")
    sampler = Sampler(len(seeds))
    for row, seed in enumerate(seeds):
        sampler.join(request(row, seed=seed, **{name: given[name][row].item() for name in names}))
    seats = np.arange(len(seeds))
    found: list[int] = sampler.sample(given["logits"], seats, np.zeros_like(seats)).tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_it_is_what_the_runtime_draws(data: st.DataObject) -> None:
    vocab = data.draw(st.sampled_from([1, 7, 97, 600]))
    kinds = data.draw(st.lists(KINDS, min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    logits = torch.randn(len(kinds), vocab, generator=generator) * data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0]))
    # hundredths: many exact ties, and no two that only rounding tells apart
    logits = (logits * 100).round() / 100
    seeds = [data.draw(st.integers(0, 2**64 - 1)) for _ in kinds]
    given = sampled.rows(logits, kinds, torch.tensor([noise(seed, 0) for seed in seeds], dtype=torch.float64))
    wanted, certain = sampled.certain(given)
    found = runtime_tokens(given, seeds)
    single = ops.SAMPLE.reference(*given.values()).tolist()
    for row in certain.nonzero()[:, 0].tolist():
        assert found[row] == single[row] == wanted[row], kinds[row]


def test_rounding_seldom_decides() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(600, 97, generator=generator) * 300).round() / 100
    kinds = [(1.0, 0.01, 40, 0.9), (3.0, 0.0, 0, 0.95), (0.5, 0.0, 10, 1.0)] * 200
    seeds = np.arange(600, dtype=np.uint64)
    given = sampled.rows(logits, kinds, torch.from_numpy(uniform(seeds, np.zeros(600, dtype=np.int64))))
    wanted, certain = sampled.certain(given)
    assert float(certain.float().mean()) > 0.97
    found = torch.tensor(runtime_tokens(given, seeds.tolist()))
    assert torch.equal(found[certain], wanted[certain])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_finite_maximum(temperature: float) -> None:
    logits = torch.zeros(5, 6)
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, 1:] = -math.inf
    given = sampled.rows(logits, [(temperature, 0.0, 0, 1.0)] * 5, torch.full((5,), 0.99))
    assert ops.SAMPLE.reference(*given.values()).tolist() == [-1, -1, -1, 0, 5 if temperature else 0]


def test_ties_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.0, 2.0, 0.0]] * 3)
    cuts = [(1.0, 0.0, 1, 1.0), (1.0, 0.0, 0, 0.3), (1.0, 1.0, 0, 1.0)]
    for number, token in ((0.0, 1), (0.499, 1), (0.501, 3), (1 - 2.0**-53, 3)):
        given = sampled.rows(logits, cuts, torch.full((3,), number, dtype=torch.float64))
        assert ops.SAMPLE.reference(*given.values()).tolist() == [token] * 3


def test_no_rows_and_shapes() -> None:
    given = sampled.rows(torch.zeros(2, 9), [(1.0, 0.0, 0, 1.0)] * 2, torch.zeros(2))
    empty = {name: t[:0] for name, t in given.items()}
    assert ops.SAMPLE.overload(*empty.values()).shape == (0,)
    fake = ops.SAMPLE.fake(*given.values())
    assert (fake.shape, fake.dtype) == ((2,), torch.int64)
