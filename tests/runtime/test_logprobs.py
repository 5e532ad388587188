"""Log-probabilities of outputs and prompts, whatever the chunks they were read in."""

from __future__ import annotations

import numpy as np
import pytest

from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import VOCAB, HashExecutor, Oracle
from tests.runtime.test_engine import EOS, assert_right, drive, engine, prompt_of


def natural_log(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


@pytest.mark.parametrize("chunk", [1, 7, 300])
def test_logprobs_are_those_of_the_raw_distribution(chunk):
    target = engine(max_num_seqs=1, max_num_batched_tokens=chunk)
    params = SamplingParams(temperature=0.7, seed=4, top_k=3, presence_penalty=1.5, max_tokens=9, logprobs=4)
    prompt = prompt_of(70)
    requests = [
        target.make("0", prompt, params),
        target.make("1", prompt, SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=2)),
        target.make("2", prompt, SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)),
    ]
    drive(target, requests)
    for request in requests:
        want = Oracle(eos=EOS).run(prompt, request.params)
        pairs = list(zip(request.logprobs, want.logits, want.tokens)) if request.params.logprobs else []
        if request.params.prompt_logprobs is not None:
            assert len(request.prompt_logprobs) == len(prompt) - 1
            pairs += list(zip(request.prompt_logprobs, want.prompt_logits, prompt[1:]))
        assert pairs
        for got, logits, token in pairs:
            log = natural_log(logits)
            top = {4: 4, 2: 2, -1: VOCAB}[request.params.prompt_logprobs or request.params.logprobs]
            assert got.token == token
            assert got.logprob == pytest.approx(log[token], abs=1e-5)
            assert got.rank == 1 + (log > log[token]).sum()
            assert got.top_ids == np.argsort(-log, kind="stable")[:top].tolist()
            assert got.top_logprobs == pytest.approx(np.sort(log)[::-1][:top], abs=1e-5)
    assert requests[0].prompt_logprobs == []


def test_prompt_logprobs_of_many_long_prompts_are_read_in_small_pieces():
    executor = HashExecutor()
    target = engine(executor, max_num_seqs=8, max_num_batched_tokens=2048)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    requests = [target.make(str(i), prompt_of(400, i), params) for i in range(4)]
    plain = target.make("plain", prompt_of(400), SamplingParams(temperature=0, max_tokens=2))
    drive(target, [*requests, plain])
    assert max(tokens for _, tokens in executor.steps) <= 256 + 400 + 5
    for request in requests:
        assert_right(request, Oracle(eos=EOS))
        assert [s.token for s in request.prompt_logprobs] == request.prompt[1:].tolist()
