"""Streams, cancellation, interruption and threads."""

from __future__ import annotations

import threading

import pytest

from deepinfer_compile.errors import BadLogits
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import HashExecutor
from tests.runtime.test_llm import CODEC, GREEDY, ORACLE, clean, ids_of, llm, stop_cases


def joined(items):
    """The items of a stream put together, by request and completion."""
    whole = {}
    for item in items:
        (out,) = item.outputs
        key = (item.request_id, out.index)
        tokens, text, logprobs, ends = whole.get(key, ([], "", [], []))
        assert not ends, "an item after the last"
        ends = [(out.finish_reason, out.stop_reason)] if out.finished else []
        whole[key] = (tokens + out.token_ids, text + out.text, logprobs + (out.logprobs or []), ends)
    return whole


def test_a_stream_adds_up_to_what_generate_gives():
    cases = list(stop_cases())
    cases += [(i, SamplingParams(seed=i, logprobs=1, n=1 + i % 3, max_tokens=12)) for i in range(60, 70)]
    prompts, params = [ids_of(8, i) for i, _ in cases], [params for _, params in cases]
    whole = llm().generate(prompts, params)
    model = llm()
    stream = model.stream(prompts, params)
    items = list(stream)
    got = joined(items)
    assert stream.request_ids == [str(i) for i in range(len(prompts))]
    for ident, result in zip(stream.request_ids, whole):
        for out in result.outputs:
            want = (out.token_ids, out.text, out.logprobs or [], [(out.finish_reason, out.stop_reason)])
            assert got.pop((ident, out.index)) == want
        assert [item.finished for item in items if item.request_id == ident][-1]
        assert sum(item.finished for item in items if item.request_id == ident) == 1
    assert not got
    assert clean(model)


def test_a_stream_comes_token_by_token():
    executor = HashExecutor()
    model = llm(executor)
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True, prompt_logprobs=0, logprobs=0)
    stream = model.stream(ids_of(30), params)
    assert executor.steps == []
    first = next(stream)
    assert len(executor.steps) == 1
    assert len(first.prompt_logprobs) == 30
    rest = list(stream)
    assert [len(item.outputs[0].token_ids) for item in (first, *rest)] == [1] * 6
    assert [item.prompt_logprobs for item in rest] == [None] * 5
    sums = [item.outputs[0].cumulative_logprob for item in (first, *rest)]
    assert sums == sorted(sums, reverse=True)
    with pytest.raises(StopIteration):
        next(stream)


def test_streams_side_by_side_in_one_thread():
    model = llm()
    params = SamplingParams(seed=1, max_tokens=15, ignore_eos=True)
    prompts = [ids_of(20, i) for i in range(3)]
    streams = [model.stream(prompt, params) for prompt in prompts]
    items = [[next(stream)] for stream in streams]
    (direct,) = model.generate(prompts[0], params)
    for got, stream in zip(items, streams):
        got.extend(stream)
    for got, prompt in zip(items, prompts):
        ((tokens, _, _, _),) = joined(got).values()
        assert tokens == ORACLE.run(prompt, params).tokens
    assert direct.outputs[0].token_ids == ORACLE.run(prompts[0], params).tokens
    assert clean(model)


def test_closing_a_stream_frees_its_pages():
    model = llm()
    with model.stream([[1] * 100, [2] * 100], GREEDY) as stream:
        next(stream)
        assert any(model.engine.pages_used)
    assert clean(model)
    assert list(stream) == []
    stream.close()
    dropped = model.stream([3] * 100, GREEDY)
    next(dropped)
    del dropped
    assert model.active == []
    model.generate([4], GREEDY)
    assert clean(model)


def test_cancelling_one_request_of_a_stream():
    model = llm()
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    stream = model.stream([[1], [2]], params)
    first, second = stream.request_ids
    items = [next(stream) for _ in range(4)]
    assert model.active == [first, second]
    model.cancel(second)
    items += stream
    got = joined(items)
    assert got[first, 0][3] == [("length", None)]
    assert got[second, 0][3] == [("abort", None)]
    assert got[first, 0][0] == ORACLE.run([1], params).tokens
    assert got[second, 0][0] == ORACLE.run([2], params).tokens[: len(got[second, 0][0])]
    assert clean(model)


class Hooked(HashExecutor):
    """Calls `hook` with the number of the step before each step."""

    def __init__(self, hook) -> None:
        super().__init__()
        self.hook = hook

    def step(self, inputs):
        self.hook(len(self.steps))
        return super().step(inputs)


def in_a_thread(action) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


@pytest.mark.parametrize("all_of_them", [False, True])
def test_cancelling_from_another_thread(all_of_them):
    def hook(step: int) -> None:
        if step == 3:
            victims = [None] if all_of_them else [model.active[1], model.active[11]]
            in_a_thread(lambda: [model.cancel(victim) for victim in victims])

    model = llm(Hooked(hook))
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    got = model.generate([ids_of(5, i) for i in range(12)], params)
    reasons = [r.outputs[0].finish_reason for r in got]
    assert reasons == ["abort" if all_of_them or i in (1, 11) else "length" for i in range(12)]
    for result in got:
        out, want = result.outputs[0], ORACLE.run(result.prompt_token_ids, params).tokens
        assert out.token_ids == want[: len(out.token_ids)]
        assert out.text == CODEC.decode(out.token_ids, True)
        assert out.finish_reason == "length" or len(out.token_ids) < 10
    assert got[11].outputs[0].token_ids == []
    assert clean(model)


def test_an_interruption_cancels_the_call():
    def hook(step: int) -> None:
        if step == 2 and not interrupted:
            interrupted.append(step)
            raise KeyboardInterrupt

    interrupted: list[int] = []
    model = llm(Hooked(hook))
    with pytest.raises(KeyboardInterrupt):
        model.generate([[1] * 70] * 12, GREEDY)
    assert clean(model)
    (got,) = model.generate([1] * 70, GREEDY)
    assert got.outputs[0].token_ids == ORACLE.run([1] * 70, GREEDY).tokens


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_logits_name_the_request(streaming):
    executor = HashExecutor()
    executor.poison = 90
    model = llm(executor)
    prompts = [[1, 2], [3, 90], [4, 5]]
    with pytest.raises(BadLogits, match="request 1"):
        list(model.stream(prompts, GREEDY)) if streaming else model.generate(prompts, GREEDY)
    assert clean(model)


def test_threads_share_the_batch():
    executor = HashExecutor()
    model = llm(executor, max_num_seqs=16)
    wrong: list[str] = []

    def work(name: int) -> None:
        params = SamplingParams(seed=name, max_tokens=12)
        prompts = [ids_of(20 + i, name) for i in range(12)]
        if name % 2:
            got = [tokens for tokens, *_ in joined(model.stream(prompts, params)).values()]
            got.sort()
        else:
            got = sorted(r.outputs[0].token_ids for r in model.generate(prompts, params))
        if got != sorted(ORACLE.run(prompt, params).tokens for prompt in prompts):
            wrong.append(f"thread {name}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert wrong == []
    assert clean(model)
    assert max(count for count, _ in executor.steps) == 16


def test_closing_from_another_thread_ends_the_iteration():
    model = llm(Hooked(lambda step: in_a_thread(closer) if step == 3 else None))
    stream = model.stream([1], SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    late: list[threading.Thread] = []

    def closer() -> None:
        late.append(threading.Thread(target=stream.close))
        late[0].start()

    assert len(list(stream)) <= 5
    late[0].join(10)
    assert clean(model)
