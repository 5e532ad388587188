"""latent_prefill in Triton's interpreter: earlier tokens in every place, padding, many requests, what is not read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from deepinfer_compile.kernels import Case, specs
from tests.far_memory import sparse
from tests.triton_interpreter import run_all

SPEC = next(s for s in specs() if s.name == "latent_prefill")
PARAMS = replace(next(c.params for c in SPEC.cases if c.name == "chunk"), heads=3)
SMALL = SPEC.config(16, 16, 4, 1, 16, 16, 4, 1, 16, 16, 16, 2, 4, 1)
LARGE = SPEC.config(32, 64, 4, 1, 32, 32, 4, 1, 32, 64, 32, 8, 4, 1)
CONFIGS = [pytest.param(SMALL, id="small"), pytest.param(LARGE, id="large")]
LIMIT = 5e-6
"""Of the largest result, in fp32."""


def inputs(params: Any, new: tuple[int, ...], lengths: tuple[int, ...]) -> dict[str, Any]:
    return dict(SPEC.inputs(Case("", params, new, lengths), torch.Generator().manual_seed(3)))


def copy(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "latent": given["latent"].clone()}


def wanted(given: dict[str, Any]) -> Tensor:
    floats = {n: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for n, t in given.items()}
    made: Tensor = SPEC.op.reference(*floats.values())
    return made


def check(params: Any, config: Any, given: dict[str, Any], folder: Path, limit: float = LIMIT) -> dict[str, Tensor]:
    """Results and scratch memory, the former as the reference has them."""
    want = wanted(given)
    made = run_all(SPEC, params, config, copy(given), folder)
    torch.testing.assert_close(made["out"].double(), want, rtol=0, atol=limit * max(float(want.abs().max()), 1e-30))
    return made


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("past", [1, 63, 64, 65, 200])
def test_tokens_before_the_new_ones(config: Any, past: int, tmp_path: Path) -> None:
    check(PARAMS, config, inputs(PARAMS, (17, 3), (past + 17, 3)), tmp_path)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("new", [1, 15, 17, 32, 65])
def test_tiles_that_are_not_full(config: Any, new: int, tmp_path: Path) -> None:
    check(PARAMS, config, inputs(PARAMS, (5, new, 2), (5, new, 40)), tmp_path)


@pytest.mark.parametrize("config", CONFIGS)
def test_a_prompt_in_chunks_equals_the_prompt_at_once(config: Any, tmp_path: Path) -> None:
    given = inputs(PARAMS, (90,), (90,))
    whole = check(PARAMS, config, given, tmp_path)["out"]
    cache, begin = given["latent"].clone(), 0
    for end in (40, 41, 73, 90):
        part = {n: t[begin:end] for n, t in given.items() if n in ("q_nope", "q_rope", "c", "k_rope", "slot")}
        part |= {
            "query_start": torch.tensor([0, end - begin], dtype=torch.int32),
            "seq_len": torch.tensor([end], dtype=torch.int32),
            "latent": cache,
        }
        made = run_all(SPEC, PARAMS, config, {**given, **part}, tmp_path)["out"]
        torch.testing.assert_close(made, whole[begin:end], rtol=0, atol=2 * LIMIT * float(whole.abs().max()))
        begin = end


@pytest.mark.parametrize("config", CONFIGS)
def test_without_earlier_tokens_nothing_is_absorbed(config: Any, tmp_path: Path) -> None:
    """Scratch memory keeps its poison where a request has none."""
    made = check(PARAMS, config, inputs(PARAMS, (20, 7, 9), (20, 57, 9)), tmp_path)
    for name in ("queries", "lse"):
        empty = made[name].isnan().flatten(1).all(1)
        assert empty.tolist() == [True] * 20 + [False] * 7 + [True] * 9, name


@pytest.mark.slow
def test_heads_of_a_token_share_a_reading_of_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of prompts has requests with one new token too: a tile of theirs is full as well."""
    params = replace(PARAMS, heads=20)
    products: list[int] = []
    old = InterpreterBuilder.create_dot

    def counting(self: Any, *given: Any) -> Any:
        products.append(1)
        return old(self, *given)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", counting)
    counts = []
    for past in (64, 128):
        products.clear()
        check(params, SMALL, inputs(params, (1, 3), (past + 1, past + 3)), tmp_path)
        counts.append(len(products))
    tiles = -(-20 // SMALL.past_m) + -(-3 * 20 // SMALL.past_m)
    assert counts[1] - counts[0] == 3 * tiles * 64 // SMALL.past_n


@pytest.mark.slow
def test_more_requests_than_are_looked_up_at_once(tmp_path: Path) -> None:
    params = replace(PARAMS, heads=1)
    new = tuple(3 * (i % 9 == 4) for i in range(270))
    lengths = tuple(n + i % 2 * i // 4 if n else 0 for i, n in enumerate(new))
    check(params, SMALL, inputs(params, new, lengths), tmp_path)


@pytest.mark.parametrize("config", CONFIGS)
def test_padding_is_zero_and_its_garbage_stays_there(config: Any, tmp_path: Path) -> None:
    """Tokens without a slot: in a request without positions or with fewer than tokens, one that comes last after others
    in the cache, and after the last request."""
    given = inputs(PARAMS, (30, 4, 36, 6), (75, 0, 34, 6))
    given["latent"].view(-1, PARAMS.latent + PARAMS.rope)[given["slot"][29]] = 0.0
    given["slot"][29] = -1
    given["slot"][-2:] = -1
    given["query_start"][-1] -= 2
    given["seq_len"][-1] -= 2
    lost = given["slot"] < 0
    assert int(lost.sum()) == 1 + 4 + 2 + 2
    for name in ("q_nope", "q_rope", "c", "k_rope"):
        given[name][lost] = math.nan
    want = wanted(given)
    made = run_all(SPEC, PARAMS, config, copy(given), tmp_path)["out"]
    assert not made[lost].any()
    torch.testing.assert_close(made.double(), want, rtol=0, atol=LIMIT * float(want.abs().max()))


def test_a_request_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    """Not even on infinities among their tokens."""
    config = LARGE
    given = inputs(PARAMS, (21, 13, 18), (60, 13, 18))
    clean = run_all(SPEC, PARAMS, config, copy(given), tmp_path)["out"]
    given["c"][21:34] = math.inf
    given["q_nope"][21:34] = math.nan
    dirty = run_all(SPEC, PARAMS, config, copy(given), tmp_path)["out"]
    assert torch.equal(clean[:21], dirty[:21])
    assert torch.equal(clean[34:], dirty[34:])
    assert dirty[21:34].isnan().all()


@pytest.mark.parametrize("where", ["past", "new"])
def test_a_large_score_takes_all_the_weight(where: str, tmp_path: Path) -> None:
    """Scores far apart: nothing overflows, whichever part holds the largest. A score of a thousand is rounded by 2^-15,
    and its weight by as much."""
    params = replace(PARAMS, scale=50.0)
    given = inputs(params, (20,), (90,))
    given["k_rope"][:] *= 5.0 if where == "new" else 0.01
    check(params, SMALL, given, tmp_path, limit=2**-14)


def test_another_scale_changes_both_parts(tmp_path: Path) -> None:
    for new, length in ((30, 30), (1, 90)):
        given = inputs(PARAMS, (new,), (length,))
        one = run_all(SPEC, PARAMS, SMALL, copy(given), tmp_path)["out"]
        two = run_all(SPEC, replace(PARAMS, scale=PARAMS.scale * 1.01), SMALL, copy(given), tmp_path)["out"]
        assert (one - two).abs().max() > 1e-4 * one.abs().max()


def test_pages_far_into_the_cache(tmp_path: Path) -> None:
    """Cache rows after more elements than 32 bits count."""
    given = inputs(PARAMS, (20,), (150,))
    want = wanted(copy(given))
    near, width = given["latent"], PARAMS.latent + PARAMS.rope
    far = (1 << 31) // (PARAMS.page * width) + 5
    cache = sparse(far + len(near), PARAMS.page, width, dtype=near.dtype)
    cache[far:] = near
    moved = {
        "latent": cache,
        "block_table": torch.where(given["block_table"] < 0, -1, given["block_table"] + far),
        "slot": given["slot"] + far * PARAMS.page,
    }
    made = run_all(SPEC, PARAMS, SMALL, {**given, **moved}, tmp_path)["out"]
    torch.testing.assert_close(made.double(), want, rtol=0, atol=LIMIT * float(want.abs().max()))
    row = torch.cat([given["c"], given["k_rope"]], -1)
    assert torch.equal(cache.view(-1, width)[moved["slot"]], row)
