"""Stacked shifts become recent rows, whatever stands before the start; other shifts stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import pad

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import is_op
from deepinfer_compile.ops import RECENT
from deepinfer_compile.passes.raise_recent import RaiseRecent
from deepinfer_compile.pipeline import Record
from deepinfer_compile.program import Program
from tests import v41
from tests.passes.stages import before_and_after, counts, go_on, program_of, reasons, run

Shifts = Callable[[Tensor, Tensor], Tensor]


def shifted(line: Tensor, starts: tuple[int, ...], length: int, dim: int) -> Tensor:
    return torch.stack([line[:, s : s + length] for s in starts], dim=dim)


def filled(x: Tensor, v: Tensor, count: int) -> Tensor:
    return torch.cat((v[0].expand(x.shape[0], count), x), dim=1)


HITS: dict[str, Shifts] = {
    "padded": lambda x, v: shifted(pad(x, (0, 0, 2, 0)), (0, 1, 2), x.shape[1], 2),
    "newest first": lambda x, v: shifted(pad(x, (0, 0, 2, 0)), (2, 1, 0), x.shape[1], 2),
    "behind": lambda x, v: shifted(pad(x, (0, 0, 1, 0)), (0, 1), x.shape[1], -1),
    "filled": lambda x, v: shifted(filled(x[..., 0], v, 3), (3, 2, 1, 0), x.shape[1], -1),
}
MISSES: dict[str, Shifts] = {
    "not all": lambda x, v: shifted(pad(x, (0, 0, 2, 0)), (0, 2), x.shape[1], 2),
    "another fill": lambda x, v: shifted(pad(x, (0, 0, 1, 0), value=1.0), (0, 1), x.shape[1], 2),
    "padded behind": lambda x, v: shifted(pad(x, (0, 0, 0, 1)), (0, 1), x.shape[1], 2),
    "twice": lambda x, v: shifted(pad(x, (0, 0, 1, 0)), (1, 1), x.shape[1], 2),
}


class Small(nn.Module):
    """f(x, table)."""

    def __init__(self, function: Shifts) -> None:
        super().__init__()
        self.function = function
        self.table = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.table)


def passed(function: Shifts) -> tuple[Small, Program, Program, list[Record]]:
    module = Small(function)
    before = program_of(module, {"x": {1: Dim.AUTO}}, x=torch.randn(1, 7, 4))
    after, records = go_on(before, RaiseRecent(), RaiseRecent())
    return module, before, after, records


@pytest.mark.parametrize("name", HITS)
def test_the_numbers_are_the_same(name: str) -> None:
    module, _, after, records = passed(HITS[name])
    assert [r.count("applied") for r in records] == [1, 0]
    assert sum(is_op(n, RECENT.overload) for n in after.blocks["prefix"].graph.nodes) == 1
    for length in (1, 2, 9):
        x = torch.randn(1, length, 4)
        assert torch.equal(run(after, x=x)[0], module(x))


@pytest.mark.parametrize("name", MISSES)
def test_other_shifts_stay(name: str) -> None:
    _, before, after, records = passed(MISSES[name])
    assert records[0].count("applied") == 0
    assert all("not those of the tokens before" in r for r in reasons(records[0]))
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_token_history_and_pooled_rows() -> None:
    _, before = v41.canonical(torch.float64)
    after, records = go_on(before, RaiseRecent())
    assert counts(records[0]) == {"prefix": 1, "layer1": 2}
    assert Fact.CANONICAL in after.facts
