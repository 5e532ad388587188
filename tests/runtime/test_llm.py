"""LLM: prompts, texts, streams, stop strings, cancellation, threads."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
import torch

from deepinfer_compile.errors import BadOption, BadRequest, ContextTooLong, NoTokenizer, OutOfMemory
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import VOCAB, Codec, HashExecutor, Oracle, plain_stop

CODEC = Codec()
GREEDY = SamplingParams(temperature=0, max_tokens=20)
ORACLE = Oracle(eos=Codec.eos_token_ids)


def llm(executor=None, text=CODEC, **options) -> LLM:
    return LLM(executor or HashExecutor(), text, **{"memory_bytes": 10**8, "max_num_seqs": 8, **options})


def ids_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 977 + length).choices(range(VOCAB), k=length)


def clean(model: LLM) -> bool:
    return model.engine.alive == 0 and not any(model.engine.pages_used) and model.active == []


def expected_text(tokens: list[int], params: SamplingParams, stopped: bool) -> str:
    hide = stopped and not params.include_stop_str_in_output
    return CODEC.decode(tokens[:-1] if hide else tokens, params.skip_special_tokens)


def test_one_prompt_of_each_kind():
    model = llm()
    chat = [{"role": "user", "content": "hello"}]
    array, tensor = np.array([1, 2, 3]), torch.tensor([4, 5])
    for prompt, text, ids in (
        ("some text", "some text", CODEC.encode("some text")),
        (chat, None, CODEC.encode_chat(chat)),
        ([1, 2, 3], None, [1, 2, 3]),
        ((7, 8), None, [7, 8]),
        (array, None, [1, 2, 3]),
        (tensor, None, [4, 5]),
    ):
        (got,) = model.generate(prompt, GREEDY)
        want = ORACLE.run(ids, GREEDY)
        assert (got.prompt, got.prompt_token_ids, got.finished) == (text, ids, True)
        (out,) = got.outputs
        assert (out.index, out.token_ids, out.finish_reason) == (0, want.tokens, want.finish_reason)
        assert out.text == expected_text(want.tokens, GREEDY, want.finish_reason == "stop")
        assert (out.logprobs, out.cumulative_logprob, got.prompt_logprobs) == (None, None, None)
        assert out.finished
    assert clean(model)


def test_many_prompts_keep_their_order():
    model = llm()
    chat = [{"role": "user", "content": "x"}]
    prompts = ["a", [3] * 90, chat, "b" * 70, [9]] * 5
    params = [SamplingParams(seed=i, max_tokens=1 + i % 7, ignore_eos=True) for i in range(25)]
    got = model.generate(prompts, params)
    assert [len(r.outputs[0].token_ids) for r in got] == [1 + i % 7 for i in range(25)]
    assert len({r.request_id for r in got}) == 25
    for result, one in zip(got, params):
        assert result.outputs[0].token_ids == ORACLE.run(result.prompt_token_ids, one).tokens
    two = model.generate(np.array([[1, 2], [3, 4]]), GREEDY)
    assert [r.prompt_token_ids for r in two] == [[1, 2], [3, 4]]


def test_no_prompts_no_results():
    model = llm()
    assert model.generate([]) == []
    assert model.generate([], []) == []
    assert list(model.stream([])) == []


def test_without_a_tokenizer_ids_only():
    model = llm(text=None)
    (got,) = model.generate([1, 2], SamplingParams(temperature=0, max_tokens=4, logprobs=1))
    assert got.outputs[0].text == ""
    assert len(got.outputs[0].token_ids) == 4
    assert {entry.decoded_token for step in got.outputs[0].logprobs for entry in step.values()} == {None}
    for prompt in ("text", [{"role": "user", "content": "x"}]):
        with pytest.raises(NoTokenizer):
            model.generate(prompt)
    with pytest.raises(BadRequest, match="stop strings need a tokenizer"):
        model.generate([1], SamplingParams(stop="x"))
    assert clean(model)


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        ([], BadRequest, "empty"),
        ("", BadRequest, "empty"),
        ([0] * 512, ContextTooLong, "513"),
        ([VOCAB], BadRequest, str(VOCAB)),
        ([1, "a"], BadRequest, "list of int, str"),
        ([True], BadRequest, "list of bool"),
        (3, BadRequest, "int"),
        ({"prompt": "x"}, BadRequest, "dict"),
        (None, BadRequest, "NoneType"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(bad, error, says):
    executor = HashExecutor()
    model = llm(executor)
    for call in (model.generate, model.stream):
        with pytest.raises(error, match=says):
            call(["good", [1, 2], bad])
    assert executor.steps == []
    assert clean(model)


def test_params_for_all_or_for_each():
    model = llm(default_params=SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))
    assert [len(r.outputs[0].token_ids) for r in model.generate([[1], [2]])] == [3, 3]
    with pytest.raises(BadOption, match="there are 2 prompts"):
        model.generate([[1], [2]], [GREEDY])
    with pytest.raises(BadOption, match="something else"):
        model.generate([[1]], ["hot"])
    assert llm().default_params == SamplingParams()


def test_sizes_reach_the_engine():
    with pytest.raises(OutOfMemory):
        llm(memory_bytes=100)
    with pytest.raises(BadOption, match="max_num_batched_tokens"):
        llm(max_num_batched_tokens=7)
    executor = HashExecutor()
    model = llm(executor, max_model_len=100, max_num_batched_tokens=16)
    model.generate([[1] * 40] * 3, GREEDY)
    assert model.max_model_len == 100
    assert max(tokens for _, tokens in executor.steps) == 16


def test_end_ids_of_the_tokenizer_and_of_the_model():
    model = llm(eos_token_ids=(3, 4))
    got = model.generate([ids_of(9, i) for i in range(60)], SamplingParams(seed=1, max_tokens=60))
    want = Oracle(eos=(3, 4, 5, 11))
    reasons = set()
    for result in got:
        answer = want.run(result.prompt_token_ids, SamplingParams(seed=1, max_tokens=60))
        assert result.outputs[0].token_ids == answer.tokens
        assert result.outputs[0].stop_reason is None
        reasons.add(answer.tokens[-1] if answer.finish_reason == "stop" else None)
    assert {3, 4, 5, 11} <= reasons


def test_several_completions_of_one_prompt():
    model = llm()
    params = SamplingParams(n=5, seed=2**64 - 3, max_tokens=9, ignore_eos=True, prompt_logprobs=0)
    (got,) = model.generate("text", params)
    assert [out.index for out in got.outputs] == [0, 1, 2, 3, 4]
    seeds = [2**64 - 3, 2**64 - 2, 2**64 - 1, 0, 1]
    for out, seed in zip(got.outputs, seeds):
        one = SamplingParams(seed=seed, max_tokens=9, ignore_eos=True)
        assert out.token_ids == ORACLE.run(got.prompt_token_ids, one).tokens
    assert len(got.prompt_logprobs) == 4
    (free,) = model.generate("text", SamplingParams(n=4, max_tokens=9, ignore_eos=True))
    assert len({tuple(out.token_ids) for out in free.outputs}) == 4


def test_logprobs_by_token():
    model = llm()
    params = SamplingParams(seed=3, max_tokens=6, logprobs=2, prompt_logprobs=1, ignore_eos=True, temperature=3.0)
    (got,) = model.generate(ids_of(5), params)
    out = got.outputs[0]
    answer = ORACLE.run(ids_of(5), params)
    total = 0.0
    for entries, token, logits in zip(out.logprobs, out.token_ids, answer.logits, strict=True):
        log = torch.from_numpy(logits).log_softmax(-1)
        order = log.argsort(descending=True).tolist()
        assert next(iter(entries)) == token
        assert set(entries) == {token, *order[:2]}
        for ident, entry in entries.items():
            assert entry.logprob == pytest.approx(log[ident].item(), abs=1e-5)
            assert entry.rank == order.index(ident) + 1
            assert entry.decoded_token == CODEC.decode([ident], False)
        total += entries[token].logprob
    assert out.cumulative_logprob == pytest.approx(total)
    assert got.prompt_logprobs[0] is None
    assert [next(iter(entries)) for entries in got.prompt_logprobs[1:]] == ids_of(5)[1:]


def stop_cases():
    rng = random.Random(5)
    letters = "abcdefgh .é€"
    for i in range(60):
        stops = ["".join(rng.choices(letters, k=rng.choice([1, 1, 2, 2, 3]))) for _ in range(rng.randrange(1, 6))]
        yield (
            i,
            SamplingParams(
                seed=i,
                temperature=2.0,
                max_tokens=40,
                stop=[*stops, "stop", "e "],
                include_stop_str_in_output=i % 3 == 0,
                ignore_eos=i % 2 == 0,
                skip_special_tokens=i % 4 > 1,
                stop_token_ids=[60 + i % 5] if i % 5 == 0 else (),
            ),
        )


def stopped_at(tokens: list[int], params: SamplingParams, answer) -> tuple[list[int], str, object, str]:
    """Tokens, text and reasons when stop strings are looked for after each token."""
    for count in range(1, len(tokens) + 1):
        last = count == len(tokens)
        by_id = last and answer.finish_reason == "stop"
        shown = tokens[: count - 1 if by_id and not params.include_stop_str_in_output else count]
        detok = CODEC.detokenizer(params.skip_special_tokens)
        text = detok.push(shown) + (detok.flush() if last else "")
        found, cut = plain_stop(text, params.stop_strings, params.include_stop_str_in_output)
        if found is not None and not by_id:
            return tokens[:count], "stop", found, cut
        if last:
            return tokens, answer.finish_reason, answer.stop_reason, cut
    raise AssertionError("no tokens")


def test_stop_strings_end_the_text():
    model = llm()
    cases = list(stop_cases())
    got = model.generate([ids_of(8, i) for i, _ in cases], [params for _, params in cases])
    seen = set()
    for result, (_, params) in zip(got, cases):
        answer = ORACLE.run(result.prompt_token_ids, params)
        tokens, reason, why, text = stopped_at(answer.tokens, params, answer)
        out = result.outputs[0]
        assert (out.token_ids, out.finish_reason, out.stop_reason) == (tokens, reason, why)
        assert out.text == text
        seen.add((reason, type(why)))
    assert {("stop", str), ("stop", int), ("stop", type(None))} <= seen


def test_a_stop_string_counts_after_min_tokens():
    model = llm()
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    params = SamplingParams(seed=1, stop=letters, min_tokens=5, max_tokens=30, ignore_eos=True)
    for i in range(10):
        (got,) = model.generate(ids_of(4, i), params)
        tokens = ORACLE.run(ids_of(4, i), params).tokens
        texts = [CODEC.detokenizer(True).push(tokens[:count]) for count in range(31)]
        count = next(c for c in range(6, 31) if plain_stop(texts[c][len(texts[5]) :], letters, False)[0])
        assert got.outputs[0].token_ids == tokens[:count]
        assert got.outputs[0].text == texts[5] + plain_stop(texts[count][len(texts[5]) :], letters, False)[1]


class Script:
    """A model that says the same tokens to everyone, whatever the prompt of one token."""

    groups, vocab_size, max_model_len = (), VOCAB, 100
    draw, reads_hint, keep = None, False, 0

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def allocate(self, pages) -> None:
        assert pages == ()

    def step(self, inputs):
        return torch.eye(VOCAB)[[self.tokens[p] for p in inputs.position_ids[inputs.rows].tolist()]]


@pytest.mark.parametrize(
    ("tokens", "options", "text", "reason", "why"),
    [
        ([40, 41, 0], {}, "the stopa", "length", None),
        ([40, 41, 0], {"stop": "stop"}, "the ", "stop", "stop"),
        ([40, 41, 0], {"stop": "e st"}, "th", "stop", "e st"),
        ([40, 41, 0], {"stop": ["opa", "e st"], "include_stop_str_in_output": True}, "the st", "stop", "e st"),
        ([40, 41, 0], {"stop": "stop", "max_tokens": 2}, "the ", "stop", "stop"),
        ([40, 50, 0], {}, "the \ufffda", "length", None),
        ([40, 40, 50], {}, "the the \ufffd", "length", None),
        ([40, 40, 50], {"stop": "\ufffd"}, "the the ", "stop", "\ufffd"),
        ([50, 51, 0], {}, "éa", "length", None),
        ([40, 5, 0], {}, "the ", "stop", None),
        ([40, 5, 0], {"skip_special_tokens": False}, "the ", "stop", None),
        ([40, 5, 0], {"skip_special_tokens": False, "include_stop_str_in_output": True}, "the <eos>", "stop", None),
        ([40, 5, 0], {"skip_special_tokens": False, "ignore_eos": True}, "the <eos>a", "length", None),
        ([40, 5, 0], {"ignore_eos": True}, "the a", "length", None),
        ([40, 0, 1], {"stop_token_ids": [0]}, "the ", "stop", 0),
        ([40, 5, 1], {"stop_token_ids": [5]}, "the ", "stop", None),
        ([40, 5, 1], {"stop_token_ids": [5], "ignore_eos": True}, "the ", "stop", 5),
        ([5, 0, 0], {"min_tokens": 1}, "aaa", "length", None),
    ],
)
def test_endings_one_by_one(tokens, options, text, reason, why):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 3, **options})
    (got,) = llm(Script(tokens)).generate([9], params)
    out = got.outputs[0]
    assert (out.text, out.finish_reason, out.stop_reason) == (text, reason, why)
    items = list(llm(Script(tokens)).stream([9], params))
    assert "".join(item.outputs[0].text for item in items) == text
    assert items[-1].outputs[0].finish_reason == reason


def test_detokenize_off():
    (got,) = llm().generate("text", SamplingParams(detokenize=False, seed=1))
    assert got.outputs[0].text == ""


def test_the_bar_goes_to_stderr_and_only_when_asked(capsys):
    model = llm()
    for options, wanted in (({}, False), ({"progress": True}, True), ({"use_tqdm": True}, True)):
        model.generate([[1], [2]], GREEDY, **options)
        out, err = capsys.readouterr()
        assert out == ""
        assert ("2/2" in err) == wanted


def test_imports_stay_small():
    code = (
        "import sys\n"
        "from tests.runtime.fakes import HashExecutor, Codec\n"
        "from deepinfer_compile.runtime.llm import LLM\n"
        "LLM(HashExecutor(), Codec(), memory_bytes=10**8).generate('text')\n"
        "names = 'rich jinja2 transformers triton deepinfer_compile.passes deepinfer_compile.templates'\n"
        "print([name for name in names.split() if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
