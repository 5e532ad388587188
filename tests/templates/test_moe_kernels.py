"""Kernels of routers and experts without running them: what they take, how many blocks they plan, which tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Limits, Refused, specs
from deepinfer_compile.runtime.launch import evaluate

EXPERTS = next(s for s in specs() if s.op is ops.EXPERTS)
ROUTE = next(s for s in specs() if s.op is ops.ROUTE)
LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)


def operands(spec: Any, case: str) -> dict[str, Any]:
    found = next(c for c in spec.cases if c.name == case)
    made: dict[str, Any] = spec.inputs(found, torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.ones(9, 64).half()}, "rows of torch.float16 with weights of torch.bfloat16"),
        ({"b2": torch.ones(8, 64)}, "rows of torch.bfloat16"),
        ({"ids": torch.ones(9, 2).short()}, "ids of torch.int16"),
        ({"weights": torch.ones(9, 2).double()}, "routing weights of torch.float64"),
        ({"x": torch.ones(3, 3, 64).bfloat16()}, "more than one size"),
        ({"x": torch.ones(64, 9).bfloat16().t()}, "'x' rows do not lie side by side"),
        ({"ids": torch.ones(2, 9).int().t()}, "'ids' rows do not lie side by side"),
        ({"w13": torch.ones(8, 64, 64).bfloat16().transpose(1, 2)}, "gaps or in another order"),
        ({"w2": torch.ones(8, 64, 64).bfloat16()[..., :32]}, "gaps"),
        ({"w13": torch.empty(1, 1 << 16, 1 << 15, dtype=torch.bfloat16, device="meta")}, "experts of 2147483648"),
        ({"w13": torch.ones(1, 64, 64).bfloat16(), "w2": torch.ones(1, 64, 32).bfloat16()}, "2 of 1 a token"),
    ],
)
def test_experts_that_are_not_taken(change: dict[str, Any], reason: str) -> None:
    made = operands(EXPERTS, "even")
    assert not isinstance(EXPERTS.bind(Call(EXPERTS.op, made, "prefill")), Refused)
    found = EXPERTS.bind(Call(EXPERTS.op, {**made, **change}, "prefill"))
    assert isinstance(found, Refused)
    assert reason in found.reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logits": torch.ones(4, 48).double()}, "logits of torch.float64"),
        ({"bias": torch.ones(48).double()}, "have no kernel"),
        ({"logits": torch.ones(2, 4, 48)}, "more than one size"),
        ({"logits": torch.ones(48)}, "more than one size"),
        ({"logits": torch.ones(48, 4).t()}, "side by side"),
        ({"groups": 7}, "48 experts in 7 groups"),
        ({"logits": torch.ones(4, 8 * 513)}, "longer than 4096"),
    ],
)
def test_logits_that_are_not_taken(change: dict[str, Any], reason: str) -> None:
    made = operands(ROUTE, "grouped")
    found = ROUTE.bind(Call(ROUTE.op, {**made, **change}, "decode"))
    assert isinstance(found, Refused)
    assert reason in found.reason
    assert ROUTE.bind(Call(ROUTE.op, {**made, "logits": made["logits"].unsqueeze(0)}, "decode")).experts == 48


@pytest.mark.parametrize("change", [{"top_k": 9}, {"top_k": 0}, {"width": 0}, {"act": "tanh"}])
def test_experts_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experts of"):
        replace(EXPERTS.cases[2].params, **change)


@pytest.mark.parametrize("change", [{"top_k": 300}, {"groups": 3}, {"kind": "hash"}, {"group_rank": "sum"}])
def test_routers_that_cannot_be(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"experts in|no router"):
        replace(ROUTE.cases[-2].params, **change)


@given(st.lists(st.integers(0, 70), min_size=8, max_size=8), st.sampled_from([16, 32, 64]), st.sampled_from([1, 4, 8]))
@settings(max_examples=200, deadline=None)
def test_there_are_enough_blocks_for_any_routing(counts: list[int], block_m: int, group: int) -> None:
    """One choice a token, so that any counts are possible; the grid is whole groups of blocks."""
    params = replace(EXPERTS.cases[2].params, top_k=1)
    config = replace(EXPERTS.default(params, LIMITS, 64), block_m=block_m, group=group, tail=0, direct=False)
    plan = EXPERTS.plan(params, config)
    tensors = {"x": torch.empty(sum(counts), 64, device="meta")}
    order = next(b for b in plan.scratch if b.name == "order")
    blocks, rows = (evaluate(e, tensors) for e in order.shape)
    assert blocks >= sum(-(-n // block_m) for n in counts)
    assert blocks <= sum(counts)
    assert rows == block_m
    for launch in plan.launches[2:4]:
        programs = evaluate(launch.grid[0], tensors)
        width, n = (params.width, config.up_n) if launch.entry == "up" else (params.hidden, config.down_n)
        assert programs >= blocks * -(-width // n)
        assert programs % (group * -(-width // n)) == 0


def test_the_defaults_of_a_large_model() -> None:
    """Nothing is sorted for one or two tokens; weights are streamed until experts get more than one block's rows."""
    params = next(c.params for c in EXPERTS.cases if c.name == "typical")
    found = {n: EXPERTS.default(params, LIMITS, n) for n in (1, 2, 3, 16, 64, 128, 512, 2048, 4096)}
    assert [n for n, c in found.items() if c.direct] == [1, 2]
    assert {n: c.block_m for n, c in found.items()} == {
        **dict.fromkeys((1, 2, 3, 16, 64, 128), 16),
        512: 32,
        2048: 64,
        4096: 128,
    }
    assert [n for n, c in found.items() if c.group > 1] == [2048, 4096]
    few = found[16]
    assert (few.up_n, few.up_k, few.up_warps, few.up_stages) == (64, 256, 4, 3)
    assert [launch.entry for launch in EXPERTS.plan(params, found[1]).launches] == ["up", "down", "combine"]


def test_few_experts_get_narrower_tiles_until_the_target_is_full() -> None:
    params = replace(EXPERTS.cases[2].params, experts=8, top_k=2, hidden=2048, width=1024)
    config = EXPERTS.default(params, LIMITS, 1)
    assert config.direct
    assert (config.up_n, config.down_n) == (32, 32)
