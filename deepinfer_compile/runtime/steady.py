"""Decode steps that differ from the one before by a token a request: their inputs follow from it.

While no request comes or goes (others may wait for a seat) and none crosses the border of a page, plans and tables
stay as they are and only positions move on. On a slow host, making them anew takes longer than a small model's step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_compile.runtime.batch import PAGE_SIZE, GroupMeta, StepInput
from deepinfer_compile.runtime.pages import Ints


@dataclass(frozen=True)
class Steady:
    """A step of one token a request. done: written rows of each request before it. slots: of each cache group.

    left: how many steps after it need neither a new page nor give one back.
    """

    inputs: StepInput
    done: Ints
    prompt: Ints
    slots: tuple[Ints, ...]
    left: int

    @classmethod
    def of(cls, inputs: StepInput, done: Ints, prompt: Ints, reaches: Sequence[int | None]) -> Steady:
        """reaches: per cache group, how far back a position is read, None for all the way."""
        borders = [done, *(done - reach for reach in reaches if reach is not None)]
        left = min(int((PAGE_SIZE - 1 - border % PAGE_SIZE).min()) for border in borders)
        return cls(inputs, done, prompt, tuple(meta.slot.numpy() for meta in inputs.groups), left)

    def covers(self, done: Ints) -> bool:
        """Whether a step that finds these rows written is one of the `left` ones, and no request has gone back."""
        moved = done - self.done
        return bool(((moved >= 0) & (moved <= self.left)).all())

    def step(self, done: Ints, newest: Ints) -> StepInput:
        """The inputs of a step that finds `done` rows written and feeds the `newest` tokens."""
        moved = done - self.done
        groups = tuple(
            GroupMeta(meta.block_table, torch.from_numpy(slot + moved))
            for meta, slot in zip(self.inputs.groups, self.slots)
        )
        return StepInput(
            input_ids=torch.from_numpy(newest),
            position_ids=torch.from_numpy(done),
            rows=self.inputs.rows,
            query_start=self.inputs.query_start,
            seq_len=torch.from_numpy((done + 1).astype(np.int32)),
            context_hint=torch.from_numpy(np.maximum(self.prompt, done + 1)),
            groups=groups,
        )
