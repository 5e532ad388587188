"""Which pages a request starts after, and when they are there no more."""

from __future__ import annotations

import pytest

from deepinfer_compile.errors import BadLogits, BadOption
from deepinfer_compile.runtime.batch import PAGE_SIZE, CacheGroup
from deepinfer_compile.runtime.engine import EngineOptions
from deepinfer_compile.runtime.llm import LLM
from deepinfer_compile.runtime.params import SamplingParams
from tests.runtime.fakes import FULL, GROUPS, NARROW, VOCAB, WIDE, Codec, HashExecutor
from tests.runtime.sharing import GREEDY, PLENTY, assert_pages, assert_right, engine, ids, run
from tests.runtime.test_ahead import Flying


@pytest.mark.parametrize("groups", [(FULL,), (NARROW,), (WIDE,), GROUPS, (CacheGroup("one", 1, 8),), ()])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 300])
def test_the_same_prompt_again_starts_after_its_full_pages(groups, length):
    target = engine(groups, limit=512)
    prompt = ids(length)
    first, second = (run(target, prompt)[0] for _ in range(2))
    shared = (length - 1) // PAGE_SIZE * PAGE_SIZE if groups else 0
    assert (first.cached, second.cached) == (0, shared)
    assert target._executor.steps[-5] == (1, length - shared)
    for request in (first, second):
        assert_right(request, target)
    stats = target.prefix_stats
    assert (stats.queries, stats.hits, stats.hit_tokens) == (2, int(shared > 0), shared)
    assert (stats.queried_tokens, stats.evictions, stats.recomputed) == (2 * length, 0, 0)


@pytest.mark.parametrize("at", [0, 1, 63, 64, 127, 128, 190])
def test_one_other_token_ends_the_shared_part(at):
    target = engine()
    prompt = ids(200)
    other = [*prompt[:at], (prompt[at] + 1) % VOCAB, *prompt[at + 1 :]]
    requests = [run(target, one)[0] for one in (prompt, other, prompt)]
    assert [r.cached for r in requests] == [0, at // PAGE_SIZE * PAGE_SIZE, 192]
    for request in requests:
        assert_right(request, target)


def test_a_page_belongs_to_all_that_precedes_it():
    """Equal tokens after other ones, or at another place, are other pages."""
    target = engine()
    a, b, c = (ids(64, seed) for seed in range(3))
    run(target, [*a, *b, *c, 1])
    for prompt, shared in (([*b, *a, *c, 1], 0), ([*c, *b, *c, 1], 0), ([*a, *c, *b, 1], 64), ([*a, *b, *a, 1], 128)):
        (request,) = run(target, prompt)
        assert request.cached == shared
        assert_right(request, target)


def test_a_conversation_goes_on_after_its_own_answer():
    target = engine()
    prompt = ids(100)
    for turn in range(3):
        (request,) = run(target, prompt, params=SamplingParams(temperature=0, max_tokens=90, ignore_eos=True))
        assert request.cached == (turn and (len(prompt) - 11) // PAGE_SIZE * PAGE_SIZE)
        assert_right(request, target)
        prompt = [*prompt, *request.output_ids, *ids(10, turn + 1)]


def test_rows_that_depend_on_the_prompt_length_are_shared_only_where_it_is_equal():
    target = engine(hint=True)
    start = ids(192)
    requests = [run(target, [*start, *ids(n, seed)])[0] for seed, n in enumerate((50, 51, 50, 1))]
    assert [r.cached for r in requests] == [0, 0, 192, 0]
    for request in requests:
        assert_right(request, target)
    long = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    (first,) = run(target, ids(60, 9), params=long)
    (second,) = run(target, [*ids(60, 9), *first.output_ids])
    assert second.cached == 0
    assert_right(second, target)


def test_scored_prompts_are_read_whole():
    target = engine()
    scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=1)
    requests = [run(target, ids(200), params=params)[0] for params in (scored, scored, GREEDY)]
    assert [r.cached for r in requests] == [0, 0, 192]
    assert [len(r.prompt_logprobs) for r in requests] == [199, 199, 0]
    assert target.prefix_stats.queries == 1


def test_running_requests_hold_the_same_pages():
    target = engine((FULL,))
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    prompt = ids(192)
    first = target.make("first", [*prompt, 1], long)
    target.add(first)
    target.step()
    later = [target.make(str(i), [*prompt, i], long) for i in range(2, 5)]
    for request in later:
        target.add(request)
    target.step()
    assert target._executor.steps[-1] == (4, 4)
    assert target.pages_used == (3 + 4,)
    run(target)
    for request in (first, *later):
        assert_right(request, target)


def test_a_page_that_is_being_filled_is_waited_for():
    target = engine((FULL, WIDE), max_num_seqs=6, max_num_batched_tokens=80)
    shared = ids(192)
    first, *later = (target.make(str(i), [*shared, *ids(20, i)], GREEDY) for i in range(4))
    other = target.make("other", ids(30, 9), GREEDY)
    for request in (first, *later, other):
        target.add(request)
    for _ in range(5):
        target.step()
        assert_pages(target)
    assert target._executor.steps == [(1, 80), (1, 80), (1, 52), (5, 80), (5, 15)]
    run(target)
    assert [r.cached for r in (first, *later, other)] == [0, 192, 192, 192, 0]
    for request in (first, *later, other):
        assert_right(request, target)


def test_no_one_waits_for_a_page_that_may_never_come():
    """A leader that scores its prompt, whose rows are outdated, or that ends in the page."""
    target = engine((FULL,), max_num_seqs=8, max_num_batched_tokens=300)
    scored = SamplingParams(temperature=0, max_tokens=3, prompt_logprobs=0)
    leaders = [target.make("a", ids(300, 1), scored), target.make("b", ids(63, 2), GREEDY)]
    followers = [target.make(str(seed), ids(80, seed), GREEDY) for seed in (1, 2)]
    for request in (leaders[0], followers[0]):
        target.add(request)
    target.step()
    assert followers[0].seat >= 0
    run(target)
    for request in (leaders[1], followers[1]):
        target.add(request)
    target.step()
    assert followers[1].seat >= 0
    run(target)
    third, fourth = (target.make(str(i), [*ids(400, 3), i], GREEDY) for i in (5, 6))
    target.add(third)
    target.step()
    target.forget_prefixes()
    target.add(fourth)
    target.step()
    assert fourth.seat >= 0
    run(target)


def test_equal_pages_of_one_step_become_one():
    """Answers that turn out alike."""
    target = engine((FULL, WIDE))
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    requests = [target.make(str(i), ids(60), long) for i in range(3)]
    for request in requests:
        target.add(request)
    for _ in range(6):
        target.step()
    assert target.pages_used == (1 + 3, 1 + 3)
    run(target)
    for request in requests:
        assert_right(request, target)
    assert target.scheduler.pages.cached[0] == (60 + 199) // PAGE_SIZE


@pytest.mark.parametrize("window", [1, 2, 64])
def test_what_a_prompt_held_already_is_exchanged_while_a_step_is_under_way(window):
    """A window of one position gives a page back for the step under way, before the step that filled it has ended."""
    groups = (CacheGroup("narrow", window, 8), FULL)
    long = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    (first,) = run(engine(groups), ids(60), params=long)
    target = engine(groups, kind=Flying)
    run(target, [*ids(60), *first.output_ids])
    requests = run(target, ids(60), ids(60), params=long)
    assert target._executor.following > 150
    for request in requests:
        assert_right(request, target)
    assert target.scheduler.pages.cached[1] == (60 + 200) // PAGE_SIZE


def depth(node) -> int:
    """Pages of tokens up to a node's end."""
    return depth(node.parent) + 1 if node.parent is not None else 0


@pytest.mark.parametrize("lost", range(5))
def test_a_hit_ends_where_a_window_is_whole(lost):
    """WIDE reads 129 positions back: before position 320 the pages 2, 3 and 4, before 256 the pages 1 to 3, ..."""
    target = engine((FULL, WIDE))
    run(target, ids(330))
    cache = target.scheduler.prefix
    page = next(p for p, node in cache.owners[1].items() if depth(node) == lost + 1)
    cache._drop(1, page)
    (request,) = run(target, ids(330))
    start = 320 if lost < 2 else lost * PAGE_SIZE
    assert request.cached == start
    assert target.prefix_stats.recomputed == 320 - start
    assert_right(request, target)


def tight(requests: float) -> int:
    """Memory for so many requests of 512 tokens in one group of FULL."""
    return int(requests * 8 * FULL.bytes_per_page)


def test_idle_pages_go_before_anyone_is_preempted_and_the_longest_idle_first():
    target = engine((FULL,), memory_bytes=tight(1.5), max_num_seqs=2)
    a, b, c = (ids(250, seed) for seed in range(3))
    for prompt, cached in ((a, 0), (b, 0), (c, 0), (b, 192), (c, 192), (a, 192), (ids(440, 4), 0), (c, 128), (b, 0)):
        (request,) = run(target, prompt)
        assert request.cached == cached
        assert_right(request, target)
    assert target.scheduler.preemptions == 0
    assert target.prefix_stats.evictions > 0


def test_the_end_of_a_prefix_goes_before_its_start():
    target = engine((FULL,), memory_bytes=tight(1), max_num_seqs=1)
    run(target, ids(440, 0))
    run(target, ids(250, 1))
    assert run(target, ids(440, 0))[0].cached == 4 * PAGE_SIZE


def test_pages_expire():
    target = engine(prefix_cache_ttl=10)
    now = [100.0]
    for group in target.scheduler.pages.groups:
        group.pool.clock = lambda: now[0]
    cached = []
    for seconds in (0, 9, 9, 11, 10):
        now[0] += seconds
        cached.append(run(target, ids(200))[0].cached)
    assert cached == [0, 192, 192, 0, 192]
    now[0] += 11
    run(target, [1])
    assert target.scheduler.pages.cached == (0, 0, 0)
    assert target.prefix_stats.expired == 2 * 3 * len(GROUPS)


def test_nothing_of_a_failed_step_is_reused():
    target = engine(max_num_batched_tokens=128)
    run(target, ids(200))
    request = target.make("r", ids(400), GREEDY)
    target.add(request)
    target.step()
    target._executor.fail = RuntimeError("device lost")
    with pytest.raises(RuntimeError, match="device lost"):
        target.step()
    assert_pages(target)
    assert target.scheduler.pages.cached == (0, 0, 0)
    target._executor.allocate(target._executor.pages)
    before = target.prefix_stats.hits
    run(target)
    assert target.prefix_stats.hits == before
    assert_right(request, target)


def test_rows_of_a_request_that_the_model_failed_are_forgotten():
    target = engine()
    prompt = [t for t in ids(300) if t != 90][:200]
    run(target, prompt)
    target._executor.poison = 90
    (bad,) = run(target, [*prompt, 90])
    assert isinstance(bad.error, BadLogits)
    assert bad.cached == 192
    assert target.scheduler.pages.cached == (0, 0, 0)
    assert run(target, prompt)[0].cached == 0


def test_what_hangs_on_rows_of_a_failed_request_is_forgotten_too(tmp_path):
    """An idle answer to the same start, and a running one, which goes on; on disk as well."""
    target = engine((FULL,), prefix_cache_folder=tmp_path)
    start, tail = ([t for t in ids(500, seed) if t != 90][:200] for seed in (0, 1))
    run(target, [*start, *tail])
    assert target.prefix_stats.disk_pages == 6
    running = target.make("running", [*start, *tail[::-1]], SamplingParams(temperature=0, max_tokens=90))
    target.add(running)
    target.step()
    target._executor.poison = 90
    bad = target.make("bad", [*start, 90], GREEDY)
    target.add(bad)
    while bad.error is None:
        target.step()
    assert_pages(target)
    target._executor.poison = None
    assert target.scheduler.pages.cached == (0,)
    run(target)
    assert target.scheduler.pages.cached == (0,)
    assert target.prefix_stats.disk_pages == 0
    assert_right(running, target)
    assert [run(target, [*start, *end])[0].cached for end in (tail, tail[::-1], tail)] == [0, 192, 384]


@pytest.mark.parametrize("running", [False, True])
def test_a_reset_forgets_everything(running):
    target = engine((FULL,))
    first = target.make("first", ids(200), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    target.add(first)
    target.step()
    if not running:
        run(target)
    target.forget_prefixes()
    target.step()
    assert target.scheduler.pages.cached == (0,)
    (second,) = run(target, ids(200))
    assert second.cached == 0
    assert run(target, ids(200))[0].cached == 192
    assert_right(first, target)
    assert_right(second, target)


def test_the_end_is_reported_although_storing_is_interrupted(monkeypatch):
    def stop(_):
        raise KeyboardInterrupt

    target = engine((FULL,))
    monkeypatch.setattr(target.scheduler.prefix, "store", stop)
    request = target.make("r", ids(100), GREEDY)
    target.add(request)
    with pytest.raises(KeyboardInterrupt):
        run(target)
    assert request.sink[-1].finished
    assert (target.alive, target.pages_used) == (0, (0,))


def test_an_interrupted_reset_is_made_again(monkeypatch):
    target = engine((FULL,))
    run(target, ids(200))
    cache = target.scheduler.prefix
    whole = cache.clear
    seen = []

    def clear(identity):
        seen.append(identity)
        if len(seen) == 1:
            raise KeyboardInterrupt
        whole(identity)

    monkeypatch.setattr(cache, "clear", clear)
    target.forget_prefixes()
    target.forget_prefixes("new")
    with pytest.raises(KeyboardInterrupt):
        target.reap()
    assert run(target, ids(200))[0].cached == 0
    assert seen == ["", "", "new"]


@pytest.mark.parametrize("backtrack", [0, 1, 64, 70])
def test_tokens_that_may_be_dropped_are_not_shared(backtrack):
    target = engine(backtrack=backtrack)
    run(target, ids(300), params=SamplingParams(temperature=0, max_tokens=21, ignore_eos=True))
    assert run(target, ids(300))[0].cached == (320 - backtrack) // PAGE_SIZE * PAGE_SIZE - PAGE_SIZE * (not backtrack)


def test_without_the_cache_nothing_is_kept():
    target = engine(enable_prefix_caching=False)
    assert [run(target, ids(200))[0].cached for _ in range(2)] == [0, 0]
    assert target.scheduler.pages.cached == (0, 0, 0)
    assert target.prefix_stats.queries == 0
    target.forget_prefixes()
    run(target, [1])
    with pytest.raises(BadOption, match="prefix_cache_ttl"):
        EngineOptions(prefix_cache_ttl=-1)
    with pytest.raises(BadOption, match="enable_prefix_caching is off"):
        EngineOptions(enable_prefix_caching=False, prefix_cache_folder="somewhere")


def test_the_offline_door_shows_what_was_shared():
    llm = LLM(HashExecutor(hint=False), Codec(), memory_bytes=PLENTY, max_num_batched_tokens=256)
    off = LLM(HashExecutor(hint=False), Codec(), memory_bytes=PLENTY, enable_prefix_caching=False)
    prompts = [[*ids(200), i] for i in range(12)]
    got = llm.generate(prompts, GREEDY)
    assert [o.outputs for o in got] == [o.outputs for o in off.generate(prompts, GREEDY)]
    assert [o.num_cached_tokens for o in got] == [0] + [192] * 11
    assert [o.num_cached_tokens for o in off.generate(prompts[:1], GREEDY)] == [0]
    assert llm.prefix_stats.hits == 11
    (piece, *_) = llm.stream(prompts[3], GREEDY)
    assert piece.num_cached_tokens == 192
    llm.reset_prefix_cache()
    assert llm.prefix_stats.cached == (0, 0, 0)
    assert llm.generate(prompts[3], GREEDY)[0].num_cached_tokens == 0
