"""What the tests of shared prefixes have in common: an engine over the hash model, and exact accounts of its pages."""

from __future__ import annotations

import random

import numpy as np

from deepinfer_compile.runtime.engine import Engine, EngineOptions
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.runtime.request import Request
from tests.runtime.fakes import GROUPS, VOCAB, Answer, HashExecutor, Oracle, distance, distribution, noise

PLENTY = 10**9
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def engine(groups=GROUPS, *, hint: bool = False, limit: int = 512, kind=HashExecutor, **options) -> Engine:
    executor = kind(groups=groups, max_model_len=limit, hint=hint)
    return Engine(executor, EngineOptions(**{"memory_bytes": PLENTY, **options}))


def ids(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def run(target: Engine, *prompts: list[int], params: SamplingParams = GREEDY) -> list[Request]:
    requests = [target.make(f"{len(p)} {i}", p, params) for i, p in enumerate(prompts)]
    for request in requests:
        target.add(request)
    while target.alive:
        target.step()
        assert_pages(target)
    assert target.flush(60)
    return requests


def assert_right(request: Request, target: Engine) -> None:
    executor = target._executor
    oracle = Oracle(executor.groups, max_model_len=target.max_model_len, hint=executor.reads_hint)
    got = request.output_ids
    want = oracle.run(request.prompt.tolist(), request.params, request.seed, got)
    if request.finish_reason == "abort":
        want.tokens = want.tokens[: len(got)]
    assert got == want.tokens, explain(request, want)


def explain(request: Request, want: Answer) -> str:
    """Where a request left the oracle, and how close the decision was."""
    got, found, params = request.output_ids, want.tokens, request.params
    at = next((i for i, pair in enumerate(zip(got, found)) if pair[0] != pair[1]), min(len(got), len(found)))
    text = f"{request.id}: seed {request.seed}, {params}, prompt of {len(request.prompt)}, {request.cached} cached: "
    if at == min(len(got), len(found)):
        return text + f"{len(got)} tokens, not {len(found)}"
    logits, draw = want.logits[at], noise(request.seed, at)
    probs = distribution(logits, params, request.prompt.tolist(), found[:at])
    return text + (
        f"token {at} is {got[at]} with logit {logits[got[at]]}, the oracle's is {found[at]} with {logits[found[at]]}, "
        f"the best two are {np.sort(logits)[-2:]}; draw {draw} is {distance(probs, draw, got[at])} from choosing it"
    )


def assert_pages(target: Engine) -> None:
    """Each page is held as often as tables name it, or idle, or unused; the tree names just the kept ones."""
    cache = target.scheduler.prefix
    for i, group in enumerate(target.scheduler.pages.groups):
        pool, named = group.pool, group.table[group.table >= 0]
        holders = np.bincount(named, minlength=pool.count)
        assert holders.tolist() == pool._holders.tolist()
        unused = pool._stack[: pool._unused].tolist()
        held = np.flatnonzero(holders).tolist()
        assert sorted([*held, *pool.idle, *unused]) == list(range(pool.count))
        assert target.scheduler.pages.used[i] + target.scheduler.pages.cached[i] + len(unused) == pool.count
        if cache is None:
            assert not pool.idle
            continue
        assert sorted(cache.owners[i]) == np.flatnonzero(pool._kept).tolist()
        assert set(pool.idle) <= set(cache.owners[i])
        assert all(node.pages[i] == page for page, node in cache.owners[i].items())
    if cache is not None:
        assert_tree(cache)


def assert_tree(cache) -> None:
    """Every node can be reached and leads to something."""
    found, todo = [], [cache.root]
    while todo:
        node = todo.pop()
        found.append(id(node))
        for key, child in node.children.items():
            assert child.parent is node
            assert child.key == key
            todo.append(child)
            assert child.children or child.tips or max(child.pages, default=-1) >= 0
    for i, group in enumerate(cache.groups):
        above = (node.parent for node in cache.owners[i].values() if group.reach is None)
        assert all(node is cache.root or node.pages[i] >= 0 for node in above), "a page that nobody finds"
    assert all(id(node) in found for owners in cache.owners for node in owners.values())
    assert all(id(tip) in found for tip in cache._tip)
