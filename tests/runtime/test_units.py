"""Requests that one rank reads and another decodes, against an oracle that knows neither; rooms that are too small."""

from __future__ import annotations

import random

import pytest

from deepinfer_compile.errors import BadLogits, BadRequest, RankLost
from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.mail import LOST, Message
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.units import OFFER, ROWS
from tests.runtime.fakes import GROUPS, VOCAB, Codec, HashExecutor, Oracle
from tests.runtime.test_engine import EOS, assert_right, prompt_of, random_params
from tests.runtime.units import Units

ORACLE = Oracle(eos=EOS)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PAGE = [PAGE_SIZE * 2 * 8] * len(GROUPS)
"""Bytes of a page of `HashExecutor`, of each group."""


def queue(units: Units, rank: int, count: int, seed: int = 0) -> list[Request]:
    """Random requests of a rank."""
    rng = random.Random(seed * 100 + rank)
    engine = units.prompts[rank]
    made = [
        engine.make(str(i), prompt_of(rng.choice((1, 2, 63, 64, 65, 130, 200, 300)), i), random_params(rng))
        for i in range(count)
    ]
    for request in made:
        engine.add(request)
    return made


@pytest.mark.parametrize("seed", range(3))
def test_two_ranks_that_read_and_two_that_decode(seed: int) -> None:
    """Rows are of three cache groups, two of which have windows; sampling, penalties, ends by ids."""
    units = Units(2, 2, eos=EOS, max_num_seqs=6, max_num_batched_tokens=100)
    given = [request for rank in (0, 1) for request in queue(units, rank, 9, seed)]
    units.run()
    for request in given:
        assert_right(request, ORACLE)
    assert {kind for kind, *_ in units.sent()} == {OFFER, ROWS}, "something was cancelled"


def test_requests_go_to_the_rank_that_has_the_fewest() -> None:
    units = Units(1, 3, max_num_seqs=6, max_num_batched_tokens=512)
    given = [units.prompts[0].make(str(i), prompt_of(20 + i), GREEDY) for i in range(6)]
    for request in given:
        units.prompts[0].add(request)
    units.run()
    assert sorted(peer for kind, peer, _ in units.sent() if kind == ROWS) == [1, 1, 2, 2, 3, 3]
    for request in given:
        assert_right(request, Oracle())


def test_where_there_is_no_seat_requests_wait_where_they_were_read() -> None:
    """One seat for 14 requests: only the one that may come is in memory, and the others keep their pages."""
    units = Units(2, 1, eos=EOS, max_num_seqs=8, max_num_batched_tokens=64, there={"max_num_seqs": 1})
    given = [request for rank in (0, 1) for request in queue(units, rank, 7)]
    held, parked = [0], [0]

    def watch() -> None:
        held[0] = max(held[0], len(units.decodes[0].scheduler.held) + len(units.decodes[0]._granted))
        parked[0] = max(parked[0], len(units.prompts[0]._offered))

    units.run(watch)
    for request in given:
        assert_right(request, ORACLE)
    assert held[0] == 1
    assert parked[0] > 2


def test_where_pages_run_out_rows_wait_in_memory() -> None:
    """Three requests that begin in 4 pages each of 13 and grow to 5: the youngest leaves and comes back."""
    sizes = {"max_num_seqs": 3, "max_model_len": 384, "memory_bytes": 18000}
    units = Units(2, 1, eos=EOS, max_num_batched_tokens=64, there=sizes, max_model_len=384)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, frequency_penalty=0.5)
    given = [
        engine.make(str(i), prompt_of(240 + i), params) for i, engine in enumerate((*units.prompts, *units.prompts))
    ]
    for request, engine in zip(given, (*units.prompts, *units.prompts)):
        engine.add(request)
    units.run()
    for request in given:
        assert_right(request, ORACLE)
    assert units.decodes[0]._executor.pages[0] == 13
    assert units.decodes[0].scheduler.preemptions > 0


def test_pages_that_wait_hold_up_prompts_and_never_for_ever() -> None:
    """The caches of the rank that reads hold one long request, and a second one waits for it to leave."""
    units = Units(1, 1, max_num_seqs=4, max_num_batched_tokens=64, here={"memory_bytes": 8 * 1000 + 12 * 400})
    given = [units.prompts[0].make(str(i), prompt_of(400 + i), GREEDY) for i in range(5)]
    for request in given:
        units.prompts[0].add(request)
    units.run()
    for request in given:
        assert_right(request, Oracle())


def test_rows_that_travel_are_those_that_are_still_read() -> None:
    """Whole pages: all of a full cache, of a window those that it reaches."""
    units = Units()
    for length in (1, 64, 65, 200):
        begun = len(units.sent())
        request = units.prompts[0].make("r", prompt_of(length), GREEDY)
        units.prompts[0].add(request)
        units.run()
        firsts = [max(0, length - group.window + 1) // PAGE_SIZE if group.window else 0 for group in GROUPS]
        want = sum((-(-length // PAGE_SIZE) - first) * size for first, size in zip(firsts, PAGE))
        assert [size for kind, _, size in units.sent()[begun:] if kind == ROWS] == [want]
        assert_right(request, Oracle())


def test_what_ends_with_its_first_token_is_not_handed_over() -> None:
    first = Oracle().run(prompt_of(20), GREEDY).tokens[0]
    for params in (
        SamplingParams(temperature=0.0, max_tokens=1),
        SamplingParams(temperature=0.0, stop_token_ids=[first]),
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2),
    ):
        units = Units()
        request = units.prompts[0].make("r", prompt_of(20), params)
        units.prompts[0].add(request)
        units.run()
        assert request.output_ids == [first]
        assert units.sent() == []
    units = Units(eos=(first,))
    request = units.prompts[0].make("r", prompt_of(20), SamplingParams(temperature=0.0))
    units.prompts[0].add(request)
    units.run()
    assert (request.finish_reason, units.sent()) == ("stop", [])


@pytest.mark.parametrize("seed", range(3))
def test_requests_that_are_cancelled_at_any_time(seed: int) -> None:
    """While they wait, are read, are offered, travel, are decoded or have left; the others go on."""
    units = Units(2, 2, eos=EOS, max_num_seqs=4, max_num_batched_tokens=64, there={"max_num_seqs": 2})
    given = [(units.prompts[rank], request) for rank in (0, 1) for request in queue(units, rank, 12, seed)]
    rng = random.Random(seed)

    def cancel() -> None:
        if rng.random() < 0.4:
            engine, request = rng.choice(given)
            engine.cancel(request.id)

    units.run(cancel)
    for _, request in given:
        assert_right(request, ORACLE)
    assert len({request.finish_reason for _, request in given}) == 3


@pytest.mark.parametrize("state", ["offered", "granted", "sent", "decoded"])
def test_a_request_that_is_cancelled_leaves_nothing_on_the_other_rank(state: str) -> None:
    """It is cancelled when the other rank has been asked, has said yes, has been sent the rows, has made tokens."""
    units = Units()
    engine, other = units.prompts[0], units.decodes[0]
    engine._mail.wait = lambda: None
    request = engine.make("r", prompt_of(70), GREEDY)
    engine.add(request)
    engine.step()
    if state != "offered":
        other.step()
        assert list(other._granted.values()) == [70]
    if state in ("sent", "decoded"):
        engine.step()
        assert engine.pages_used == (0, 0, 0)
    if state == "decoded":
        other.step()
        assert other.alive == 1
    engine.cancel("r")
    engine.step()
    assert request.finish_reason == "abort"
    other.step()
    units.run()


def test_log_probabilities_come_back() -> None:
    units = Units(eos=EOS)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=6, logprobs=3, prompt_logprobs=1, ignore_eos=True)
    request = units.prompts[0].make("r", prompt_of(70), params)
    units.prompts[0].add(request)
    units.run()
    want = ORACLE.run(prompt_of(70), params, 1, request.output_ids)
    assert request.output_ids == want.tokens
    assert len(request.prompt_logprobs) == 69
    for entry, logits in zip(request.logprobs, want.logits, strict=True):
        order = sorted(range(VOCAB), key=lambda t: -logits[t])
        assert entry.top_ids == order[:3]
        assert entry.token in order


def test_logits_without_a_maximum_fail_their_request_alone() -> None:
    """The other one is decoded beside it to its end; the error is told where the request came in."""
    units = Units()
    good, bad = (units.prompts[0].make(str(i), prompt_of(30 + i), GREEDY) for i in range(2))
    units.decodes[0]._executor.poison = Oracle().run(prompt_of(31), GREEDY).tokens[3]
    for request in (good, bad):
        units.prompts[0].add(request)
    units.run()
    assert_right(good, Oracle())
    assert isinstance(bad.error, BadLogits)
    assert "position 34" in str(bad.error)
    assert len(bad.output_ids) == 4


def test_a_rank_that_decodes_takes_no_prompts() -> None:
    with pytest.raises(BadRequest, match="decodes what others have read"):
        Units().decodes[0].make("0", [1], GREEDY)


class Reading(LLM):
    """An `LLM` of a rank that reads prompts."""

    units: Units

    def _engine(self, *args):
        return self.units.prompts[0]


def test_texts_and_streams_are_made_where_prompts_came_in() -> None:
    """Stop strings end a request on both ranks at the same token, and a stream that is closed ends all of it."""
    codec = Codec()
    Reading.units = Units(eos=Codec.eos_token_ids, codec=codec, max_num_seqs=4)
    served, plain = Reading(None, codec), LLM(HashExecutor(), codec, max_num_seqs=4)
    prompts = ["some text", "b" * 70, "a third one"]
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True)
    whole = [o.outputs[0].text for o in plain.generate(prompts, params)]
    stops = [text[8:10] for text in whole]
    for more in (
        {"stop": [text[:2] for text in whole]},
        {"stop": [text[0] for text in whole], "min_tokens": 1},
        {},
        {"stop": stops},
        {"stop": stops, "min_tokens": 20},
        {"stop": stops, "include_stop_str_in_output": True},
    ):
        wanted = SamplingParams(temperature=1.0, seed=4, max_tokens=24, ignore_eos=True, **more)
        for one, other in zip(served.generate(prompts, wanted), plain.generate(prompts, wanted), strict=True):
            assert one.outputs == other.outputs
        pieces = {}
        for item in served.stream(prompts, wanted):
            pieces[item.request_id] = pieces.get(item.request_id, "") + item.outputs[0].text
        assert list(pieces.values()) == [o.outputs[0].text for o in plain.generate(prompts, wanted)]
    stream = served.stream(prompts, SamplingParams(temperature=1.0, max_tokens=60, ignore_eos=True))
    for _ in range(12):
        next(stream)
    assert Reading.units.decodes[0].alive
    stream.close()
    Reading.units.run()


def test_a_step_that_fails_ends_the_call() -> None:
    units = Units()
    request = units.prompts[0].make("r", prompt_of(20), GREEDY)
    units.prompts[0].add(request)
    units.prompts[0].step()
    units.decodes[0].step()
    units.prompts[0].step()
    units.decodes[0]._executor.fail = ValueError("a step that fails")
    with pytest.raises(ValueError, match="a step that fails"):
        units.decodes[0].step()
    assert units.decodes[0].alive == 0
    assert "ended early" in units.decodes[0]._executor.ranks.lost
    units.prompts[0]._mail.inbox.append(Message(1, LOST, {"reason": "it ended"}))
    with pytest.raises(RankLost, match="it ended"):
        units.prompts[0].step()
    units.prompts[0].cancel("r")
    units.prompts[0].reap()
    assert request.finish_reason == "abort"
    assert units.prompts[0].alive == 0


def test_rows_of_another_size_are_refused() -> None:
    units = Units()
    units.prompts[0]._mail.wait = lambda: None
    request = units.prompts[0].make("r", prompt_of(20), GREEDY)
    units.prompts[0].add(request)
    units.prompts[0].step()
    assert [kind for kind, *_ in units.sent()] == [OFFER]
    units.decodes[0].step()
    units.prompts[0].step()
    inbox = units.decodes[0]._mail.inbox
    rows = inbox.pop()
    inbox.append(Message(rows.peer, rows.kind, rows.body, rows.rows[:-1]))
    with pytest.raises(RankLost, match="rank 0 gave 3071 bytes of 20 rows"):
        units.decodes[0].step()
