"""`dispatch` and `combine` over simulated ranks, one thread each, against the experts of one process.

Tolerance 1e-5 of the largest value (fp32): sums run in another order. What a rank holds of no expert is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_compile.eplb import Placement
from deepinfer_compile.eplb.layout import in_order, placed
from deepinfer_compile.errors import BadOption, WrongTarget
from deepinfer_compile.ops import COMBINE, DISPATCH, EXPERTS
from deepinfer_compile.ops.parallel import STRIDE, chosen_slots, joined
from tests.ranks import Together, in_threads

HIDDEN, INNER = 12, 8
Route = Callable[[int, int, torch.Generator], Tensor]


def any_of(experts: int, chosen: int) -> Route:
    """Different experts of each token, at random."""
    return lambda rank, tokens, gen: torch.rand(tokens, experts, generator=gen).topk(chosen).indices.int()


@dataclass(frozen=True)
class World:
    """Ranks with tokens and a route for them."""

    tokens: Sequence[int]
    plan: Placement
    chosen: int
    route: Route
    form: str = "exact"
    dtype: torch.dtype = torch.float32
    sent: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        return int(self.plan.phy2log.shape[1]) // self.ranks

    def weights(self) -> tuple[Tensor, Tensor]:
        gen = torch.Generator().manual_seed(1)
        experts = self.plan.logcnt.shape[1]
        made = [torch.randn(experts, *shape, generator=gen) / 4 for shape in ((2 * INNER, HIDDEN), (HIDDEN, INNER))]
        return made[0].to(self.dtype), made[1].to(self.dtype)

    def rank(self, peers: Together) -> tuple[Tensor, Tensor, Tensor]:
        """What one rank gets, what it should get, and its choices."""
        gen = torch.Generator().manual_seed(peers.rank)
        count = self.tokens[peers.rank]
        x = torch.randn(count, HIDDEN, generator=gen).to(self.dtype)
        ids, weights = self.route(peers.rank, count, gen), torch.rand(count, self.chosen, generator=gen)
        w13, w2 = self.weights()
        mine = self.plan.phy2log[0, peers.rank * self.room : (peers.rank + 1) * self.room]
        own = [
            torch.stack([w[e] if e >= 0 else torch.full_like(w[0], np.nan) for e in mine.tolist()]) for w in (w13, w2)
        ]
        tables = (torch.from_numpy(self.plan.log2phy[0]), torch.from_numpy(self.plan.logcnt[0]))
        width = max(self.tokens) * min(self.chosen, self.room)
        lanes = torch.empty(self.ranks * width if self.form == "static" else 3, dtype=torch.uint8)
        place = (torch.arange(self.ranks + 1) * self.room, torch.tensor([peers.rank]), lanes)
        with joined(peers):
            rows, local, row, sizes = DISPATCH.overload(x, ids, *tables, *place, self.room, self.form)
            made = EXPERTS.overload(rows, local, torch.ones(local.shape), *own, *ACT)
            got = COMBINE.overload(made, row, weights, sizes)
        return got, EXPERTS.overload(x, ids, weights, w13, w2, *ACT), ids

    def check(self) -> list[Tensor]:
        """Every rank gets what one process computes; the choices of all."""

        def work(peers: Together) -> tuple[Tensor, Tensor, Tensor]:
            found = self.rank(peers)
            self.sent.append(peers.sent)
            return found

        found = in_threads(self.ranks, work)
        for rank, (got, want, _) in enumerate(found):
            assert got.shape == want.shape == (self.tokens[rank], HIDDEN)
            assert got.dtype == want.dtype == self.dtype
            bound = 1e-5 if self.dtype == torch.float32 else 1e-2
            error = (got - want).abs().amax() if len(got) else torch.zeros(1)
            assert float(error) <= bound * max(1.0, float(want.abs().max()) if len(want) else 0.0)
        return [ids for *_, ids in found]


ACT = (None, None, "silu", 0.0, 0.0, False, False)


@pytest.mark.parametrize("form", ["exact", "static"])
@pytest.mark.parametrize(
    ("experts", "slots", "tokens", "chosen"),
    [
        (8, 8, (5, 4), 3),
        (5, 7, (3, 0, 9), 2),
        (30, 30, (1, 2, 3, 4, 5, 6, 7, 0), 4),
        (3, 3, (2, 0, 1, 2), 2),
        (4, 8, (3, 5), 4),
        (12, 16, (0, 0), 4),
        (6, 6, (7,), 3),
        (128, 128, (3, 3, 3, 0, 3, 3), 8),
    ],
)
def test_ranks_together_are_one_process(
    experts: int, slots: int, tokens: tuple[int, ...], chosen: int, form: str
) -> None:
    World(tokens, in_order(1, experts, slots, len(tokens)), chosen, any_of(experts, chosen), form).check()


@pytest.mark.parametrize("form", ["exact", "static"])
def test_half_precision_rows(form: str) -> None:
    World((5, 2), in_order(1, 8, 10, 2), 3, any_of(8, 3), form, torch.bfloat16).check()


@pytest.mark.parametrize("form", ["exact", "static"])
def test_all_tokens_to_one_expert_and_to_ids_that_are_none(form: str) -> None:
    """moe-3: one rank gets every row, the others none; -1 and ids past the end add nothing, and a NaN weight of theirs
    neither."""
    plan = in_order(1, 8, 8, 4)
    World((3, 5, 0, 64), plan, 1, lambda r, n, g: torch.full((n, 1), 7, dtype=torch.int32), form).check()
    World((2, 3, 1, 1), plan, 2, lambda r, n, g: torch.tensor([[-1, 8]], dtype=torch.int32).repeat(n, 1), form).check()
    half = World((2, 3, 1, 1), plan, 2, lambda r, n, g: torch.tensor([[5, -1]], dtype=torch.int32).repeat(n, 1), form)
    half.check()


@pytest.mark.parametrize("form", ["exact", "static"])
def test_an_expert_that_a_token_chose_twice_counts_twice(form: str) -> None:
    World((4, 3), in_order(1, 4, 4, 2), 3, lambda r, n, g: torch.tensor([[2, 2, 1]]).repeat(n, 1), form).check()


def test_moe_6_the_tokens_of_the_report() -> None:
    route = torch.tensor([[2], [3], [0], [5], [2], [7]])
    World((6, 0, 0, 0), in_order(1, 8, 8, 4), 1, lambda r, n, g: route[:n]).check()


@pytest.mark.parametrize("form", ["exact", "static"])
def test_bytes_are_those_of_the_formula(form: str) -> None:
    """exact: 8 bytes to each other rank, and for a row that leaves its rank H * 4 + 4 there and H * 4 back. static:
    all lanes to each other rank."""
    world = World((5, 4, 6), in_order(1, 8, 11, 3), 3, any_of(8, 3), form)
    choices = world.check()
    row = 2 * HIDDEN * 4 + 4
    if form == "static":
        assert world.sent == [2 * 6 * min(3, world.room) * row] * 3
        return
    away = 0
    for rank, ids in enumerate(choices):
        for token, chosen in enumerate(ids.tolist()):
            for expert in chosen:
                slots = [s for s, e in enumerate(world.plan.phy2log[0].tolist()) if e == expert]
                away += slots[(rank + token * STRIDE) % len(slots)] // world.room != rank
    assert 0 < away < sum(ids.numel() for ids in choices)
    assert sum(world.sent) == away * row + 3 * 2 * 8


def test_replicas_take_turns() -> None:
    """An expert with two slots: tokens of a rank alternate between them, and the rank decides who begins."""
    plan = placed(np.array([[0, 1, 1, 2]]), 3)
    ids = torch.ones(6, 1, dtype=torch.int32)
    tables = (torch.from_numpy(plan.log2phy[0]), torch.from_numpy(plan.logcnt[0]))
    for rank in range(2):
        found = chosen_slots(ids, *tables, torch.tensor([rank])).flatten().tolist()
        assert found == [1 + (rank + t * STRIDE) % 2 for t in range(6)]
    assert chosen_slots(torch.tensor([[-1, 3, 2]]), *tables, torch.tensor([0])).tolist() == [[-1, -1, 3]]


def test_what_does_not_fit_is_refused() -> None:
    x, ids = torch.ones(3, HIDDEN), torch.zeros(3, 1, dtype=torch.int32)
    plan = in_order(1, 4, 4, 2)
    tables = (torch.from_numpy(plan.log2phy[0]), torch.from_numpy(plan.logcnt[0]), torch.tensor([0, 2, 4]))
    with pytest.raises(WrongTarget, match="nproc-per-node 2"):
        DISPATCH.overload(x, ids, *tables, torch.tensor([0]), torch.empty(6, dtype=torch.uint8), 2, "exact")
    with pytest.raises(ValueError, match="do not fit"):
        DISPATCH.overload(x, ids, *tables, torch.tensor([0]), torch.empty(4, dtype=torch.uint8), 2, "static")
    with pytest.raises(ValueError, match="no dispatch of form"):
        DISPATCH.overload(x, ids, *tables, torch.tensor([0]), torch.empty(6, dtype=torch.uint8), 2, "dense")


@pytest.mark.parametrize(
    ("experts", "slots", "ranks", "sizes"),
    [
        (30, 30, 8, [4] * 6 + [3, 3]),
        (128, 128, 6, [22, 22, 21, 21, 21, 21]),
        (3, 3, 4, [1, 1, 1, 0]),
        (256, 272, 16, [17] * 16),
        (16, 20, 4, [5] * 4),
    ],
)
def test_moe_6_eplb_3_ranks_are_as_full_as_each_other(experts: int, slots: int, ranks: int, sizes: list[int]) -> None:
    plan = in_order(2, experts, slots, ranks)
    room = -(-slots // ranks)
    assert plan.phy2log.shape == (2, ranks * room)
    held = plan.phy2log[0].reshape(ranks, room)
    assert (held >= 0).sum(1).tolist() == sizes
    assert all(len(set(r[r >= 0].tolist())) == (r >= 0).sum() for r in held), "an expert is twice on a rank"
    used = plan.phy2log[0][plan.phy2log[0] >= 0]
    assert plan.logcnt[0].tolist() == np.bincount(used, minlength=experts).tolist()
    back = np.full(ranks * room, -1)
    for expert, row in enumerate(plan.log2phy[1].tolist()):
        back[[s for s in row if s >= 0]] = expert
    assert back.tolist() == plan.phy2log[1].tolist()
    local = plan.local(ranks)
    assert local.shape == (ranks, 2, experts)
    assert all(
        sorted(local[r, 1][local[r, 1] >= 0].tolist()) == list(range(sizes[r]))
        and all(held[r, s] == e for e, s in enumerate(local[r, 1].tolist()) if s >= 0)
        for r in range(ranks)
    )


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: in_order(1, 8, 7, 2), "8 experts"),
        (lambda: in_order(1, 8, 17, 2), "no use"),
        (lambda: in_order(1, 8, 8, 0), "ranks"),
        (lambda: placed(np.array([[0, 1, 1]]), 3), "expert 2 has no slot in layer 0"),
        (lambda: placed(np.array([[0, 1, 3]]), 3), "there are 3 experts"),
    ],
)
def test_eplb_2_impossible_plans_are_refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(BadOption, match=words):
        call()
