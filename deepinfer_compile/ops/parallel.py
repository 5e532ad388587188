"""Experts over ranks: `dispatch` sends a row for every chosen expert to a rank that holds it, `combine` brings back and
sums what the experts made of it.

A physical slot holds one expert, an expert has one slot or several (replicas), rank r owns slots offsets[r] to
offsets[r + 1] - 1. All of that is given at run time, so that a new placement changes tables and never a program. Rows
travel one a choice, without their weight: the weighted sum is taken where the token is, in fp32, so that it does not
depend on where experts are.

What carries rows is the `Peers` of the moment (`joined`): one process that holds every slot needs none. Two forms give
equal sums. `exact` first tells each rank how many rows come, then sends these; it waits for sizes. `static` sends
capacity * min(k, room) rows to each rank, whatever was chosen, and waits for nothing but the rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor

from deepinfer_compile.errors import WrongTarget
from deepinfer_compile.ops.registry import Work, define, size_bytes, wide

FORMS = ("exact", "static")
STRIDE = 23333
"""Token t of rank r uses replica (r + t * STRIDE) mod replicas: spread out, the same at every run, without a count."""


class Peers(Protocol):
    """What a rank reaches the others through. size: ranks, this one included."""

    size: int

    def exchange(self, rows: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """Give give[r] rows of `rows` [sum(give), ...], in order, to each rank r; what the ranks gave [sum(take), ...],
        in their order. Every rank calls it at the same time."""
        ...


class Choices(Protocol):
    """What sees the choices of a step before rows are sent, a layer at a time."""

    def sent(self, ids: Tensor) -> Tensor:
        """The ids [T, k] that are to be sent: those given, -1 in place of some."""
        ...


_peers: ContextVar[Peers | None] = ContextVar("peers", default=None)
_choices: ContextVar[Choices | None] = ContextVar("choices", default=None)


@contextmanager
def joined(peers: Peers | None, choices: Choices | None = None) -> Iterator[None]:
    """Let the operations called inside reach other ranks through `peers`, and show what they send to `choices`."""
    tokens = _peers.set(peers), _choices.set(choices)
    try:
        yield
    finally:
        _peers.reset(tokens[0])
        _choices.reset(tokens[1])


def _exchange(rows: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
    """See `Peers`. Raises WrongTarget where the ranks that the tables name are not there."""
    peers = _peers.get()
    found = 1 if peers is None else peers.size
    if found != len(give):
        fix = f"start {len(give)} processes with torchrun --nproc-per-node {len(give)}, or build for other ranks"
        raise WrongTarget(built_for=f"experts over {len(give)} ranks", found=f"{found}", fix=fix)
    return rows if peers is None else peers.exchange(rows, give, take)


def chosen_slots(ids: Tensor, slots: Tensor, counts: Tensor, rank: Tensor) -> Tensor:
    """i64[T, k]: the slot that each choice of a token goes to, -1 for an id that is no expert. See `dispatch`."""
    expert = ids.long()
    known = (expert >= 0) & (expert < counts.shape[0])
    expert = torch.where(known, expert, 0)
    token = torch.arange(ids.shape[0], device=ids.device).unsqueeze(-1)
    replica = (rank.long() + token * STRIDE) % counts[expert]
    slot = slots[expert].gather(-1, replica.unsqueeze(-1)).squeeze(-1)
    return torch.where(known, slot.long(), -1)


def _first_of_equal(slot: Tensor) -> Tensor:
    """i64[T, k]: the first place in its row that holds the same slot; a row goes to a slot once."""
    return (slot.unsqueeze(-1) == slot.unsqueeze(-2)).long().argmax(-1)


def _dispatch(
    x: Tensor,
    ids: Tensor,
    slots: Tensor,
    counts: Tensor,
    offsets: Tensor,
    rank: Tensor,
    lanes: Tensor,
    room: int,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if form not in FORMS:
        raise ValueError(f"no dispatch of form {form!r}")
    choices = _choices.get()
    slot = chosen_slots(ids if choices is None else choices.sent(ids), slots, counts, rank)
    first = _first_of_equal(slot)
    goes = (slot >= 0) & (first == torch.arange(slot.shape[1], device=slot.device))
    to = torch.searchsorted(offsets, slot, right=True) - 1
    local = (slot - offsets[to.clamp(min=0)]).to(torch.int32)
    send = _send_exact if form == "exact" else _send_static
    rows, arrived, row, sizes = send(x, goes, to, local, offsets.shape[0] - 1, lanes, room)
    row = torch.where(slot >= 0, row.gather(1, first), -1)
    return rows, arrived.unsqueeze(-1), row, sizes


def _send_exact(
    x: Tensor, goes: Tensor, to: Tensor, local: Tensor, ranks: int, lanes: Tensor, room: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, their local slots, place of each choice among what was sent, sizes), by counting first."""
    flat = torch.where(goes, to, ranks).flatten()
    order = torch.sort(flat, stable=True).indices
    sent = torch.bincount(flat, minlength=ranks + 1)[:ranks]
    taken = _exchange(sent, [1] * ranks, [1] * ranks)
    give, take = sent.tolist(), taken.tolist()
    order = order[: sum(give)]
    row = torch.full_like(flat, -1)
    row[order] = torch.arange(len(order), device=row.device)
    rows = _exchange(x[order // goes.shape[1]], give, take)
    arrived = _exchange(local.flatten()[order], give, take)
    return rows, arrived, row.view(goes.shape), torch.stack([sent, taken])


def _send_static(
    x: Tensor, goes: Tensor, to: Tensor, local: Tensor, ranks: int, lanes: Tensor, room: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_send_exact`, token t's j-th choice for rank r in lane (r * capacity + t) * width + j, other lanes empty."""
    tokens, chosen = goes.shape
    width, count = min(chosen, room), lanes.shape[0]
    each = count // ranks
    if tokens * width > each:
        raise ValueError(f"{tokens} tokens do not fit in lanes for {each // width}")
    beside = (to.unsqueeze(-1) == to.unsqueeze(-2)) & goes.unsqueeze(-2)
    place = torch.tril(beside, -1).sum(-1)
    token = torch.arange(tokens, device=x.device).unsqueeze(-1)
    row = torch.where(goes, to * each + token * width + place, count)
    rows, arrived = x.new_zeros(count + 1, x.shape[1]), local.new_full((count + 1,), -1)
    rows[row.flatten()] = x.repeat_interleave(chosen, 0)
    # what does not go shares one lane behind the last, so that nothing has to be counted
    arrived[row.flatten()] = local.flatten()
    even = [each] * ranks
    sizes = torch.full((2, ranks), each, dtype=torch.int64)
    return _exchange(rows[:count], even, even), _exchange(arrived[:count], even, even), row, sizes


def _dispatch_fake(
    x: Tensor, ids: Tensor, slots: Tensor, counts: Tensor, offsets: Tensor, rank: Tensor, lanes: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = lanes.shape[0]
    return (
        x.new_empty((count, x.shape[1])),
        x.new_empty((count, 1), dtype=torch.int32),
        x.new_empty(ids.shape, dtype=torch.int64),
        x.new_empty((2, offsets.shape[0] - 1), dtype=torch.int64),
    )


def _dispatch_work(x: Tensor, ids: Tensor, *rest: object) -> Work:
    return Work(0, 2 * ids.numel() * (x.shape[1] * x.element_size() + 4))


DISPATCH = define(
    "dispatch(Tensor x, Tensor ids, Tensor slots, Tensor counts, Tensor offsets, Tensor rank, Tensor lanes, int room, "
    "str form) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_dispatch,
    fake=_dispatch_fake,
    work=_dispatch_work,
)
"""x [T, H], ids int[T, k] of E experts; slots i64[E, M], the slots of each expert, of which counts i64[E] are in use;
offsets i64[ranks + 1], the first slot of each rank and their number; rank i64[1], this one; room: most slots of a rank
-> rows [n, H] that came to this rank, local i32[n, 1], the slot among its own that each is for (-1: none),
row i64[T, k], where what becomes of each choice will be among the rows that come back (-1: no such expert),
sizes i64[2, ranks], rows given to and taken from each rank.

lanes u8[n] gives n by its length: for static ranks * capacity * min(k, room), capacity the most tokens of a rank; for
exact nobody knows it before, so there it only stands for n in the types, and its own length is of no meaning.
Token t of rank r goes to slots[id, (r + t * 23333) mod counts[id]]. Bytes to other ranks, b a value's bytes:
exact: 8 for each, and H * b + 4 a row; static: capacity * min(k, room) * (H * b + 4) for each."""


def _combine(y: Tensor, row: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    given, taken = sizes.tolist()
    back = _exchange(y, taken, given)
    known = (row >= 0).unsqueeze(-1)
    if not len(back):
        return y.new_zeros(len(row), y.shape[1])
    terms = wide(back)[row.clamp(min=0)] * weights.to(wide(back).dtype).unsqueeze(-1)
    return torch.where(known, terms, 0.0).sum(1).to(y.dtype)


COMBINE = define(
    "combine(Tensor y, Tensor row, Tensor weights, Tensor sizes) -> Tensor",
    reference=_combine,
    fake=lambda y, row, *rest: y.new_empty((row.shape[0], y.shape[1])),
    work=lambda y, row, weights, sizes: Work(2 * row.numel() * y.shape[1], 2 * size_bytes(y)),
)
"""y [n, H] made of the rows that `dispatch` brought, its row and sizes, weights [T, k] -> [T, H], the sum over k of
weight * result, in fp32; a choice that is no expert adds nothing, whatever its weight. sizes is read on the host.
Bytes to other ranks: H * b a row that came from one (static: for each, capacity * min(k, room) rows)."""
