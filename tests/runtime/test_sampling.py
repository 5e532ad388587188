"""Sampling against the plainest reading of the parameters, and its independence of the batch."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.sampling import Sampler, invert, largest, nucleus_floor, score, uniform
from tests.runtime.fakes import distribution, noise


@pytest.fixture(params=["numpy", "torch"])
def kernels(request, monkeypatch):
    """Runs a test with the kernels of the CPU, and with those of every other device."""
    if request.param == "torch":
        monkeypatch.setattr("deepinfer_compile.runtime.sampling._in_numpy", lambda values: False)


def logits_of(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def request(seat: int, prompt=(0,), output=(), seed: int = 0, ends=(), **params) -> Request:
    return Request(
        id=str(seat),
        prompt=np.array(prompt, dtype=np.int64),
        params=SamplingParams(max_tokens=None, **params),
        limit=10,
        end_ids=frozenset(ends),
        eos_ids=frozenset(),
        seed=seed,
        seat=seat,
        output_ids=list(output),
    )


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    sampler = Sampler(len(requests))
    for one in requests:
        sampler.join(one)
    before = logits.clone()
    index = np.array([len(one.output_ids) for one in requests])
    tokens = sampler.sample(logits, np.array([one.seat for one in requests], dtype=np.int64), index)
    assert torch.equal(logits, before) or bool(logits.isnan().any())
    return tokens.tolist()


def test_uniform_numbers_are_the_stated_hash():
    seeds = np.array([0, 1, 2**63, 2**64 - 1, 12345], dtype=np.uint64)
    index = np.array([0, 1, 7, 100000, 3])
    assert uniform(seeds, index).tolist() == [noise(int(s), int(i)) for s, i in zip(seeds, index)]


@pytest.mark.parametrize("axis", ["seed", "index"])
def test_uniform_numbers_look_uniform(axis):
    many = np.arange(40_000)
    fixed = np.full(40_000, 3)
    seeds, index = (many, fixed) if axis == "seed" else (fixed, many)
    numbers = uniform(seeds.astype(np.uint64), index)
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    counts = np.histogram(numbers, 100, (0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 160
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("vocab", [1, 2, 97, 256, 1000])
def test_greedy_takes_the_first_of_the_largest(vocab, rows):
    logits = logits_of(rows, vocab).round()
    want = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, [request(i, temperature=0) for i in range(rows)]) == want


def test_no_rows():
    assert sample(logits_of(0, 7), []) == []


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_finite_maximum_are_marked(bad, temperature):
    logits = logits_of(4, 50)
    logits[1, 7] = bad
    logits[3] = -torch.inf
    logits[0, :40] = -torch.inf
    tokens = sample(logits, [request(i, temperature=temperature, presence_penalty=0.5) for i in range(4)])
    assert [token >= 0 for token in tokens] == [True, False, True, False]
    assert tokens[0] >= 40


PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 1e-3, 0.5, 1.0, 3.0]),
        "top_k": st.sampled_from([0, -1, 1, 2, 10, 96, 97, 5000]),
        "top_p": st.sampled_from([1.0, 0.999, 0.9, 0.3, 1e-6]),
        "min_p": st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 1.1, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.6]),
        "min_tokens": st.sampled_from([0, 3]),
    }
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_parameters_against_the_plain_reading(data):
    vocab = data.draw(st.sampled_from([97, 256, 600]))
    rows = data.draw(st.integers(1, 4))
    logits = logits_of(rows, vocab, data.draw(st.integers(0, 50)), data.draw(st.sampled_from([0.0, 0.5, 3.0, 20.0])))
    ids = st.integers(0, vocab - 1)
    requests = []
    for row in range(rows):
        params = data.draw(PARAMS)
        prompt, output = data.draw(st.lists(ids, min_size=1, max_size=9)), data.draw(st.lists(ids, max_size=9))
        ends = data.draw(st.sets(ids, max_size=3))
        requests.append(request(row, prompt, output, data.draw(st.integers(0, 2**64 - 1)), ends, **params))
    with pytest.MonkeyPatch.context() as patch:
        in_numpy = data.draw(st.booleans())
        patch.setattr("deepinfer_compile.runtime.sampling._in_numpy", lambda values: in_numpy)
        tokens = sample(logits, requests)
    for row, (one, token) in enumerate(zip(requests, tokens)):
        params = SamplingParams(
            **{**vars(one.params), "temperature": 0 if one.params.greedy else one.params.temperature}
        )
        probs = distribution(logits[row].numpy(), params, one.prompt.tolist(), one.output_ids, one.end_ids)
        if params.temperature == 0:
            assert probs[token] == pytest.approx(probs.max(), abs=1e-4)
            continue
        # The token must lie where the number falls, give or take what f32 and a cut at a tie can move.
        share = np.concatenate(([0.0], np.cumsum(probs)))
        number = noise(one.seed, len(one.output_ids))
        assert share[token] - 2e-4 <= number <= share[token + 1] + 2e-4


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    "params",
    [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"temperature": 0.5, "top_k": 6, "top_p": 0.8, "min_p": 0.02}],
)
def test_frequencies_follow_the_distribution(params):
    logits = logits_of(1, 12, seed=5, scale=1.0)
    count = 6_000
    tokens = sample(logits.expand(count, -1).contiguous(), [request(i, seed=i, **params) for i in range(count)])
    want = distribution(logits[0].numpy(), SamplingParams(**params))
    got = np.bincount(tokens, minlength=12)
    assert (got[want == 0] == 0).all()
    kept = want > 0
    assert ((got[kept] - count * want[kept]) ** 2 / (count * want[kept])).sum() < 40


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [97, 50257])
def test_a_row_does_not_depend_on_its_batch(vocab, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        logits = logits_of(6, vocab, scale=0.3)
        kinds = [{}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}, {"presence_penalty": 0.5}, {"temperature": 2.0}]
        probs = logits.softmax(-1)
        padded = torch.nn.functional.pad(probs, (0, -vocab % 256))
        requests = [request(i, seed=99 + i, logprobs=3, **kind) for i, kind in enumerate(kinds)]
        together = sample(logits, requests)
        scored = score(logits, np.arange(6), np.array(together), 3)
        p = np.array([0.5, 0.9, 0.99, 0.3, 0.1, 0.7])
        floors = nucleus_floor(padded, p)
        for row, one in enumerate(requests):
            own = logits[row : row + 1].clone()
            one.seat = 0
            assert sample(own, [one]) == [together[row]]
            assert score(own, np.arange(1), np.array([together[row]]), 3) == [scored[row]]
            assert torch.equal(nucleus_floor(padded[row : row + 1], p[row : row + 1]), floors[row : row + 1])
        numbers = np.random.default_rng(0).random((8, 6))
        for number in numbers:
            alone = [int(invert(padded[r : r + 1], number[r : r + 1])[0]) for r in range(6)]
            assert invert(padded, number).tolist() == alone
    finally:
        torch.set_num_threads(before)


def test_draws_at_the_ends_of_the_interval():
    probs = torch.zeros(4, 512)
    probs[:, [3, 300, 511]] = torch.tensor([0.25, 0.5, 0.25])
    last = 1 - 2.0**-53
    assert invert(probs, np.array([0.0, 0.25, 0.5, last])).tolist() == [3, 300, 300, 511]
    # In f32 the sum of a block may exceed the running sum of its parts: still nothing beyond the last part is drawn.
    parts = torch.rand(64, 512, generator=torch.Generator().manual_seed(1))
    parts[:, 200:] = 0
    assert invert(parts, np.full(64, last)).tolist() == [199] * 64


@pytest.mark.usefixtures("kernels")
def test_penalties_count_prompt_and_output_as_stated():
    logits = torch.zeros(3, 6)
    logits[:] = torch.tensor([2.0, -2.0, 2.0, 1.9, 1.8, -9.0])
    ask = {"prompt": [0, 1, 1], "output": [2, 2], "temperature": 0}
    # 0 is in the prompt only: repetition reaches it, presence and frequency do not.
    assert sample(logits[:1], [request(0, repetition_penalty=2.0, **ask)]) == [3]
    assert sample(logits[:1], [request(0, presence_penalty=0.15, **ask)]) == [0]
    assert sample(logits[:1], [request(0, presence_penalty=0.15, **{**ask, "output": [0, 2]})]) == [3]
    assert sample(logits[:1], [request(0, frequency_penalty=-0.1, **ask)]) == [2]
    negative = torch.tensor([[-1.0, -1.1, -3.0]])
    assert sample(negative, [request(0, prompt=[0], temperature=0, repetition_penalty=1.2)]) == [1]


def test_output_tokens_are_counted_as_they_come():
    logits = torch.tensor([[1.0, 0.9, 0.8, 0.0]] * 2)
    sampler = Sampler(2)
    requests = [request(i, prompt=[3], temperature=0, frequency_penalty=f) for i, f in enumerate([0.15, 0.0])]
    for one in requests:
        sampler.join(one)
    seats = np.arange(2)
    rows = [sampler.sample(logits, seats, np.array([i, i])).tolist() for i in range(6)]
    # Greedy on 1 - 0.15 a, 0.9 - 0.15 b, 0.8 - 0.15 c.
    assert [row[0] for row in rows] == [0, 1, 0, 2, 1, 0]
    assert {row[1] for row in rows} == {0}
    requests[0].output_ids = [row[0] for row in rows]
    sampler.join(requests[0])
    again = [sampler.sample(logits, seats, np.array([i, i])).tolist()[0] for i in range(6, 9)]
    assert Counter([*requests[0].output_ids, *again]).most_common() == [(0, 4), (1, 3), (2, 2)]


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_the_end_is_forbidden_before_min_tokens(temperature):
    logits = torch.full((1, 8), -30.0)
    logits[0, [2, 5]] = torch.tensor([30.0, 20.0])
    for count, token in ((0, 5), (1, 5), (2, 2)):
        one = request(0, output=[1] * count, ends=[2, 3], min_tokens=2, temperature=temperature)
        assert sample(logits, [one]) == [token]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("top", [0, 1, 5, 40, -1])
def test_scores_against_the_plain_formula(top):
    logits = logits_of(5, 40)
    rows, tokens = np.array([0, 2, 4]), np.array([3, 39, 0])
    log = logits.double().log_softmax(-1).numpy()
    for row, token, got in zip(rows, tokens, score(logits, rows, tokens, top)):
        order = np.argsort(-log[row])
        size = 40 if top < 0 else top
        assert got.token == token
        assert got.logprob == pytest.approx(log[row, token], abs=1e-5)
        assert order[got.rank - 1] == token
        assert got.top_ids == order[:size].tolist()
        assert got.top_logprobs == pytest.approx(log[row][order[:size]], abs=1e-5)


@pytest.mark.usefixtures("kernels")
def test_the_largest_values_in_order():
    logits = logits_of(3, 300)
    assert torch.equal(largest(logits, 7), logits.topk(7).values)
    assert torch.equal(largest(logits, 300), logits.sort(-1, descending=True).values)
    assert torch.equal(largest(logits, 1)[:, 0], logits.amax(-1))
