"""The step loop against a model that notices every wrong page, and an oracle that has none."""

from __future__ import annotations

import random
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.errors import BadLogits, BadOption, BadRequest, ContextTooLong, OutOfMemory
from deepinfer_compile.runtime.batch import CacheGroup
from deepinfer_compile.runtime.engine import Engine, EngineOptions
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import FULL, GROUPS, NARROW, VOCAB, WIDE, HashExecutor, Oracle

PLENTY = 10**9
EOS = (5, 11)


def engine(executor=None, **options) -> Engine:
    options = {"memory_bytes": PLENTY, **options}
    return Engine(executor or HashExecutor(), EngineOptions(**options), eos_token_ids=EOS)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(VOCAB), k=length)


def drive(target: Engine, requests) -> None:
    for request in requests:
        target.add(request)
    while target.alive:
        target.step()
    assert target.pages_used == (0,) * len(target.scheduler.pages.groups)


def assert_right(request, oracle: Oracle) -> None:
    want = oracle.run(request.prompt.tolist(), request.params, request.seed, request.output_ids)
    if request.finish_reason == "abort":
        assert request.output_ids == want.tokens[: len(request.output_ids)]
        return
    assert request.output_ids == want.tokens
    assert (request.finish_reason, request.stop_reason) == (want.finish_reason, want.stop_reason)
    assert [update.tokens for update in request.sink if update.finished] == [len(want.tokens)]


def random_params(rng: random.Random) -> SamplingParams:
    greedy = rng.random() < 0.4
    return SamplingParams(
        temperature=0.0 if greedy else rng.choice([0.3, 1.0, 2.0]),
        top_k=rng.choice([0, 0, -1, 1, 5, 200]),
        top_p=rng.choice([1.0, 1.0, 0.5, 0.9]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(2**63),
        presence_penalty=rng.choice([0.0, 0.0, 0.7]),
        frequency_penalty=rng.choice([0.0, 0.0, -0.4]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 0, 2])),
        ignore_eos=rng.random() < 0.3,
        min_tokens=(low := rng.choice([0, 0, 3])),
        max_tokens=low + rng.choice([1, 2, 8, 20, 40]),
        logprobs=rng.choice([None, None, None, 0, 3]),
        prompt_logprobs=rng.choice([None] * 8 + [1]),
    )


@pytest.mark.parametrize("total", [1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_thousands_of_mixed_requests_with_cancellations(total):
    rng = random.Random(7)
    executor = HashExecutor()
    target = engine(executor, max_num_seqs=16, max_num_batched_tokens=160, memory_bytes=60_000)
    requests, waiting = [], []
    for i in range(total):
        length = rng.choice([1, 2, 9, 63, 64, 65, 130, rng.randrange(1, 300)])
        made = target.make(str(i), prompt_of(length, i), random_params(rng), streaming=rng.random() < 0.5)
        requests.append(made)
        waiting.append(made)
    cancelled = set()
    while waiting or target.alive:
        for _ in range(rng.randrange(4)):
            if waiting:
                target.add(waiting.pop(0))
        if rng.random() < 0.2:
            victim = rng.choice(requests[: total + 20 - len(waiting)][-60:]).id
            cancelled.add(victim)
            target.cancel(victim)
        target.step()
    assert target.pages_used == (0, 0, 0)
    assert target.scheduler.preemptions > 0
    oracle = Oracle(eos=EOS)
    for request in requests:
        assert_right(request, oracle)
    aborted = {request.id for request in requests if request.finish_reason == "abort"}
    assert aborted <= cancelled
    assert 0.04 * total < len(aborted) < 0.4 * total
    assert all(r.finish_reason and r.seat == -1 for r in requests), "a request was lost"
    assert sum(len([u for u in r.sink if u.finished]) for r in requests) == total
    assert max(tokens for _, tokens in executor.steps) == 160
    assert max(count for count, _ in executor.steps) == 16


@pytest.mark.parametrize("chunk", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129, 200])
def test_chunks_of_a_prompt(chunk, length):
    target = engine(max_num_seqs=1, max_num_batched_tokens=chunk)
    request = target.make("0", prompt_of(length), SamplingParams(temperature=0, max_tokens=70, ignore_eos=True))
    drive(target, [request])
    assert_right(request, Oracle(eos=EOS))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("groups", [(FULL,), (NARROW,), (WIDE,), GROUPS, (CacheGroup("one", 1, 8),), ()])
def test_batches_over_kinds_of_cache_groups(groups, batch):
    target = engine(HashExecutor(groups), max_num_seqs=8, max_num_batched_tokens=65)
    params = SamplingParams(temperature=0, max_tokens=150)
    requests = [target.make(str(i), prompt_of(100 + 7 * i, i), params) for i in range(batch)]
    drive(target, requests)
    for request in requests:
        assert_right(request, Oracle(groups, eos=EOS))


def test_chunks_are_mixed_with_decoding():
    executor = HashExecutor()
    target = engine(executor, max_num_seqs=4, max_num_batched_tokens=50)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    early = target.make("0", prompt_of(10), params)
    late = target.make("1", prompt_of(120), params)
    target.add(early)
    target.step()
    target.add(late)
    target.step()
    assert executor.steps[-1] == (2, 50)
    assert (len(early.output_ids), len(late.output_ids)) == (2, 0)
    drive(target, [])
    for request in (early, late):
        assert_right(request, Oracle(eos=EOS))


def tight_bytes(requests: float) -> int:
    """Memory for so many full requests of 256 tokens in one group of FULL."""
    return int(requests * 4 * FULL.bytes_per_page)


@pytest.mark.parametrize("room", [1, 1.5, 2.25, 3])
def test_preempted_requests_give_the_same_tokens(room):
    executor = HashExecutor((FULL,), max_model_len=256)
    target = engine(executor, max_num_seqs=8, max_num_batched_tokens=64, memory_bytes=tight_bytes(room))
    requests = [
        target.make(
            str(i),
            prompt_of(30 + i, i),
            SamplingParams(
                seed=i, max_tokens=190, ignore_eos=True, frequency_penalty=0.2, logprobs=1, prompt_logprobs=0
            ),
        )
        for i in range(8)
    ]
    drive(target, requests)
    assert target.scheduler.preemptions > 0
    for request in requests:
        assert_right(request, Oracle((FULL,), max_model_len=256, eos=EOS))
        assert len(request.logprobs) == 190
        assert len(request.prompt_logprobs) == len(request.prompt) - 1


def test_the_oldest_request_is_never_preempted():
    target = engine(HashExecutor((FULL,), max_model_len=256), max_num_seqs=4, memory_bytes=tight_bytes(1))
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [target.make(str(i), prompt_of(50, i), params) for i in range(4)]
    for request in requests:
        target.add(request)
    ended = []
    while target.alive:
        target.step()
        ended += [r.id for r in requests if r.finish_reason and r.id not in ended]
    assert ended == ["0", "1", "2", "3"]


@pytest.mark.parametrize("params", [{}, {"top_p": 0.8}, {"top_k": 7, "temperature": 1.7}, {"min_p": 0.1}])
def test_same_seed_same_tokens_alone_or_in_a_batch(params):
    def one(seed: int, target: Engine, name: str):
        return target.make(name, prompt_of(40), SamplingParams(seed=seed, max_tokens=25, **params))

    alone = engine(max_num_seqs=1)
    first = [one(seed, alone, str(seed)) for seed in range(5)]
    drive(alone, first)
    crowd = engine(max_num_seqs=16, max_num_batched_tokens=33)
    rng = random.Random(3)
    others = [crowd.make(f"x{i}", prompt_of(20 + i, i), random_params(rng)) for i in range(20)]
    second = [one(seed, crowd, str(seed)) for seed in range(5)]
    mixed = [*second, *others]
    rng.shuffle(mixed)
    drive(crowd, mixed)
    assert [r.output_ids for r in first] == [r.output_ids for r in second]
    assert len({tuple(r.output_ids) for r in first}) == 5


def test_without_a_seed_each_request_draws_its_own():
    target = engine()
    requests = [target.make(str(i), prompt_of(5), SamplingParams(max_tokens=12, ignore_eos=True)) for i in range(4)]
    drive(target, requests)
    assert len({tuple(r.output_ids) for r in requests}) == 4


def test_requests_that_cannot_run_are_refused():
    target = engine(max_model_len=64)
    with pytest.raises(BadRequest, match=r"request r .*empty"):
        target.make("r", [], SamplingParams())
    with pytest.raises(ContextTooLong, match=r"request r needs 65 tokens.*loaded for 64"):
        target.make("r", prompt_of(64), SamplingParams())
    with pytest.raises(ContextTooLong, match="70 tokens"):
        target.make("r", prompt_of(60), SamplingParams(min_tokens=10))
    for wrong in (-1, VOCAB, 2**63, 2**80, -(2**70)):
        with pytest.raises(BadRequest, match=f"prompt holds {wrong}"):
            target.make("r", [1, wrong], SamplingParams())
    with pytest.raises(BadRequest, match=f"stop_token_ids holds {VOCAB}"):
        target.make("r", [1], SamplingParams(stop_token_ids=[VOCAB]))
    assert target.alive == 0


def test_the_context_length_ends_a_request():
    target = engine(max_model_len=64, max_num_seqs=2)
    requests = [
        target.make("0", prompt_of(63), SamplingParams(temperature=0, ignore_eos=True, max_tokens=None)),
        target.make("1", prompt_of(40), SamplingParams(temperature=0, ignore_eos=True, max_tokens=1000)),
    ]
    drive(target, requests)
    assert [(len(r.output_ids), r.finish_reason) for r in requests] == [(1, "length"), (24, "length")]
    for request in requests:
        assert_right(request, Oracle(max_model_len=64, eos=EOS))


def test_cancelled_while_waiting_reading_and_writing():
    target = engine(max_num_seqs=2, max_num_batched_tokens=50)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    requests = [target.make(str(i), prompt_of(n, i), params) for i, n in enumerate([20, 200, 20])]
    for request in requests:
        target.add(request)
    target.step()
    target.step()
    assert len(requests[0].output_ids) == 2
    assert target.scheduler.running == 2
    for request in requests:
        target.cancel(request.id)
    target.cancel("unknown")
    target.step()
    assert [r.finish_reason for r in requests] == ["abort"] * 3
    assert [len(r.output_ids) for r in requests] == [2, 0, 0]
    assert [len(r.sink) for r in requests] == [1, 1, 1]
    assert (target.alive, target.pages_used) == (0, (0, 0, 0))
    target.cancel("0")
    target.step()
    assert len(requests[0].sink) == 1


def test_cancelled_before_it_is_taken_up():
    target = engine()
    request = target.make("0", [1], SamplingParams())
    target.add(request)
    target.cancel("0")
    target.reap()
    assert (request.finish_reason, target.alive) == ("abort", 0)


def test_nan_logits_end_only_the_request_they_belong_to():
    executor = HashExecutor()
    executor.poison = 90
    target = engine(executor, max_num_seqs=4)
    clean = [p for i in range(20) if 90 not in (p := prompt_of(12, i))]
    params = [SamplingParams(temperature=t, seed=1, max_tokens=6, frequency_penalty=f) for t, f in ((0, 0), (1, 0.1))]
    good = [target.make(f"g{i}", clean[i], params[i]) for i in range(2)]
    bad = [target.make(f"b{i}", [*clean[2 + i], 90], params[i]) for i in range(2)]
    drive(target, [*good, *bad])
    for request in bad:
        assert isinstance(request.error, BadLogits)
        assert f"request {request.id}" in str(request.error)
        assert f"position {len(request.prompt) - 1}" in str(request.error)
        assert request.output_ids == []
    for request in good:
        want = Oracle(eos=EOS).run(request.prompt.tolist(), request.params)
        assert 90 not in want.tokens[:-1]
        assert request.output_ids == want.tokens


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_failing_step_loses_no_request(after):
    executor = HashExecutor()
    target = engine(executor, max_num_seqs=3, max_num_batched_tokens=40)
    requests = [target.make(str(i), prompt_of(30 + i, i), SamplingParams(seed=i, max_tokens=20)) for i in range(6)]
    for request in requests:
        target.add(request)
    for _ in range(after):
        target.step()
    executor.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        target.step()
    assert target.pages_used == (0, 0, 0)
    executor.allocate(executor.pages)
    drive(target, [])
    for request in requests:
        assert_right(request, Oracle(eos=EOS))


def test_sizes_are_checked():
    with pytest.raises(BadOption, match="max_num_batched_tokens"):
        engine(max_num_seqs=64, max_num_batched_tokens=63)
    with pytest.raises(BadOption, match=r"max_model_len.*built for 512"):
        engine(max_model_len=513)
    for name in ("max_num_seqs", "max_num_batched_tokens", "memory_bytes", "max_model_len", "backtrack"):
        with pytest.raises(BadOption, match=name):
            EngineOptions(**{name: -1})
    with pytest.raises(OutOfMemory, match="8 pages of full x 1,000"):
        engine(memory_bytes=5000)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_mix_of_sizes_gives_the_oracle_tokens(data):
    groups = tuple(data.draw(st.sampled_from([GROUPS, (FULL,), (NARROW, WIDE)])))
    limit = data.draw(st.integers(66, 300))
    seats = data.draw(st.integers(1, 6))
    executor = HashExecutor(groups, max_model_len=limit)
    target = engine(
        executor,
        max_num_seqs=seats,
        max_num_batched_tokens=seats + data.draw(st.integers(0, 140)),
        memory_bytes=data.draw(st.integers(9_000, 30_000)),
        backtrack=data.draw(st.sampled_from([0, 5])),
    )
    rng = random.Random(data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.integers(1, limit - 4), min_size=1, max_size=8))
    requests = [target.make(str(i), prompt_of(n, i), random_params(rng)) for i, n in enumerate(lengths)]
    drive(target, requests)
    for request in requests:
        assert_right(request, Oracle(groups, max_model_len=limit, eos=EOS))


def test_host_work_of_a_step_is_under_a_millisecond():
    class Still:
        groups, vocab_size, max_model_len = GROUPS, 4096, 4096
        draw, reads_hint, keep = None, False, 0

        def allocate(self, pages) -> None:
            self.logits = torch.randn(64, self.vocab_size, generator=torch.Generator().manual_seed(0))

        def step(self, inputs) -> torch.Tensor:
            return self.logits

    target = Engine(Still(), EngineOptions(memory_bytes=PLENTY, max_num_batched_tokens=64 * 32))
    params = SamplingParams(temperature=0, max_tokens=400)
    for i in range(64):
        target.add(target.make(str(i), [1] * 32, params))
    target.step()
    times = []
    for _ in range(300):
        begin = time.perf_counter()
        target.step()
        times.append(time.perf_counter() - begin)
    assert target.alive == 64
    assert sorted(times)[100] < 1e-3
