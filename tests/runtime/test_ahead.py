"""Steps that start before the last one's tokens are known: the same tokens, and as many steps as were worth it."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from deepinfer_compile.errors import BadLogits
from deepinfer_compile.runtime.batch import StepInput
from deepinfer_compile.runtime.drawing import KernelDraw
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import VOCAB, HashExecutor, Oracle
from tests.runtime.test_drawing import Kernel
from tests.runtime.test_engine import EOS, assert_right, drive, engine, prompt_of, random_params


class Flight:
    def __init__(self, owner: Flying, logits: torch.Tensor, turn: int) -> None:
        self.owner, self.logits, self.turn = owner, logits, turn

    def tokens(self) -> np.ndarray:
        return self.owner.turns[self.turn].copy()


class Flying(HashExecutor):
    """Runs steps when they start, as a device does in the order of its queue. following: how many steps followed."""

    def __init__(self, **sizes) -> None:
        super().__init__(**sizes)
        self.draw = KernelDraw(Kernel())
        self.following = 0
        self.turns = [np.zeros(0, dtype=np.int64)] * 2  # tokens of the last two steps, older ones are lost
        self.last = np.zeros(0, dtype=np.int64)

    def start(self, inputs: StepInput, numbers, *, following: bool = False) -> Flight | None:
        if len(inputs.input_ids) != len(inputs.seq_len):
            return None
        if following:
            self.following += 1
            assert len(self.last) == len(inputs.input_ids)
            inputs = replace(inputs, input_ids=torch.from_numpy(self.last.clip(min=0)))
        logits = self.step(inputs)
        self.last = self.draw(logits, numbers)
        turn = len(self.steps) % 2
        self.turns[turn] = self.last
        return Flight(self, logits, turn)


def plain_params(rng: random.Random) -> SamplingParams:
    """Nothing that takes the host."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.randrange(2**63),
        top_k=rng.choice([0, 9]),
        max_tokens=rng.choice([1, 2, 20, 90]),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=rng.sample(range(VOCAB), rng.choice([0, 2])),
    )


@pytest.mark.parametrize("seed", range(4))
def test_mixed_requests_with_cancellations(seed: int) -> None:
    """Tight pages, windows, ends of every kind, in a crowd that changes."""
    rng = random.Random(seed)
    executor = Flying()
    target = engine(executor, max_num_seqs=6, max_num_batched_tokens=160, memory_bytes=60_000)
    params = [random_params(rng) if rng.random() < 0.1 else plain_params(rng) for _ in range(120)]
    requests = [target.make(str(i), prompt_of(rng.choice([1, 63, 64, 130, 300]), i), p) for i, p in enumerate(params)]
    waiting = list(requests)
    while waiting or target.alive:
        for _ in range(rng.randrange(9) if rng.random() < 0.05 else 0):
            if waiting:
                target.add(waiting.pop(0))
        if rng.random() < 0.02:
            target.cancel(rng.choice(requests).id)
        target.step()
    assert target.pages_used == (0, 0, 0)
    assert executor.following > 100
    for request in requests:
        assert_right(request, Oracle(eos=EOS))


@pytest.mark.parametrize("batch", [1, 3])
def test_all_but_the_first_steps_of_a_quiet_batch_follow(batch: int) -> None:
    executor = Flying()
    target = engine(executor, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [target.make(str(i), prompt_of(40 + 9 * i, i), params) for i in range(batch)]
    drive(target, requests)
    for request in requests:
        assert_right(request, Oracle(eos=EOS))
    # the prompts' step, the first that decodes, and then no row too many
    assert executor.following == 198
    assert len(executor.steps) == 200


def test_a_request_that_ends_unforeseen_costs_one_row() -> None:
    oracle = Oracle(eos=EOS)
    prompt, other = prompt_of(30), prompt_of(31, 1)
    free = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    stop = next(t for i, t in enumerate(oracle.run(prompt, free).tokens) if i > 5)
    ends = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    executor = Flying()
    target = engine(executor, max_num_seqs=2)
    requests = [target.make("ends", prompt, ends), target.make("goes on", other, free)]
    drive(target, requests)
    for request in requests:
        assert_right(request, oracle)
    rows = sum(count for count, _ in executor.steps)
    assert rows == sum(len(request.output_ids) for request in requests) + 1


def test_a_new_request_waits_for_one_step() -> None:
    executor = Flying()
    target = engine(executor, max_num_seqs=2)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    first, second = (target.make(str(i), prompt_of(20, i), params) for i in range(2))
    target.add(first)
    for _ in range(5):
        target.step()
    target.add(second)
    target.step()
    assert not second.output_ids
    target.step()
    assert len(second.output_ids) == 1
    drive(target, [])
    for request in (first, second):
        assert_right(request, Oracle(eos=EOS))


def test_a_row_without_a_finite_maximum_ends_alone_under_way() -> None:
    oracle = Oracle(eos=EOS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    bad_prompt = prompt_of(9)
    poison = oracle.run(bad_prompt, params).tokens[4]
    prompts = (prompt_of(11, i) for i in range(99))
    good_prompt = next(p for p in prompts if poison not in oracle.run(p, params).tokens)
    executor = Flying()
    executor.poison = poison
    target = engine(executor, max_num_seqs=2)
    bad, good = target.make("bad", bad_prompt, params), target.make("good", good_prompt, params)
    drive(target, [bad, good])
    assert isinstance(bad.error, BadLogits)
    assert bad.output_ids == oracle.run(bad_prompt, params).tokens[: len(bad.output_ids)]
    assert_right(good, oracle)


def test_a_step_that_fails_under_way_starts_everyone_over() -> None:
    executor = Flying()
    target = engine(executor, max_num_seqs=2)
    params = SamplingParams(temperature=0.8, max_tokens=30, ignore_eos=True, seed=4)
    requests = [target.make(str(i), prompt_of(20, i), params) for i in range(2)]
    for request in requests:
        target.add(request)
    for _ in range(6):
        target.step()
    executor.fail = RuntimeError("lost")
    with pytest.raises(RuntimeError, match="lost"):
        target.step()
    drive(target, [])
    for request in requests:
        assert_right(request, Oracle(eos=EOS))
