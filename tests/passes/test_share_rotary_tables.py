"""Equal rotary tables of a block are computed once, with the same numbers; tables that differ stay."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.graph import is_op
from deepinfer_compile.ops import ROTARY_TABLE
from deepinfer_compile.passes.raise_rotary_table import RaiseRotaryTable
from deepinfer_compile.passes.share_rotary_tables import ShareRotaryTables
from deepinfer_compile.pipeline import Record
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests import v41
from tests.passes.stages import go_on, program_of, run

FREQUENCIES = (1.0, 0.5, 0.125)


class Tables(nn.Module):
    """Cosines and sines of position_ids, made again and again: equal ones, and those that differ in one thing."""

    def __init__(self, learned: bool) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.tensor(FREQUENCIES)) if learned else None

    def table(self, positions: Tensor, frequencies: Tensor, scaling: float = 1.0) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(-1).float() * frequencies
        return angles.cos() * scaling, angles.sin() * scaling

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        found = [self.table(position_ids, torch.tensor(FREQUENCIES)) for _ in range(3)]
        found.append(self.table(position_ids // 2, torch.tensor(FREQUENCIES)))
        found.append(self.table(position_ids // 2, torch.tensor(FREQUENCIES)))
        found.append(self.table(position_ids, torch.tensor(FREQUENCIES), 2.0))
        found.append(self.table(position_ids, torch.tensor((*FREQUENCIES[:2], 0.25))))
        if self.learned is not None:
            found.append(self.table(position_ids, self.learned))
        return tuple(t + i for i, both in enumerate(found) for t in both)


def passed(learned: bool) -> tuple[Tables, Program, Program, list[Record]]:
    module = Tables(learned)
    before = program_of(module, {"position_ids": {1: Dim.AUTO}}, position_ids=torch.arange(7)[None])
    before, _ = go_on(before, RaiseRotaryTable())
    after, records = go_on(before, ShareRotaryTables(), ShareRotaryTables())
    return module, before, after, records


def count(program: Program) -> int:
    return sum(is_op(n, ROTARY_TABLE.overload) for gm in program.blocks.values() for n in gm.graph.nodes)


def test_equal_tables_are_one() -> None:
    module, before, after, records = passed(False)
    assert (count(before), count(after)) == (7, 4)
    assert [r.count("applied") for r in records] == [3, 0]
    assert len(after.weights) == len(before.weights) - 3
    for tokens in (1, 9):
        position_ids = torch.randint(0, 1 << 20, (1, tokens), generator=torch.Generator().manual_seed(tokens))
        for got, want in zip(run(after, position_ids=position_ids), module(position_ids), strict=True):
            assert torch.equal(got, want)


def test_frequencies_of_a_checkpoint_may_change() -> None:
    _, before, _, _ = passed(True)
    name = next(n for n, ref in before.weights.items() if "learned" in ref.name)
    held = before.weights[name]
    before.weights[name] = dataclasses.replace(held, value=None)
    after, _ = go_on(before, ShareRotaryTables())
    assert (count(before), count(after)) == (8, 5)


@pytest.mark.slow
def test_layers_turn_by_one_table_for_tokens_and_one_for_rows() -> None:
    model, before = v41.canonical(torch.float64)
    raised, _ = go_on(before, RaiseRotaryTable())
    after, records = go_on(raised, ShareRotaryTables())
    assert (count(raised), count(after)) == (22, 6)
    assert records[0].count("applied") == 16
    ids, rows = list(range(7, 48)), (0, 5, 40)
    got, want = (logits_of(p, weights_from(model), ids, rows) for p in (after, before))
    assert torch.equal(got, want)
    packed, _ = default().run(before)
    assert count(packed) == 7
