"""What every pass test does: capture a tiny model, run a pipeline, compare every stage with eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import to_text
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from
from tests.models import VOCAB

IDS = torch.randint(0, VOCAB, (45,), generator=torch.Generator().manual_seed(5)).tolist()
ROWS = (0, 7, 30, 44)


def eager_logits(model: Any, ids: Sequence[int] = IDS, rows: Sequence[int] = ROWS) -> Tensor:
    """What the user's model itself gives."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)]), use_cache=False).logits[0, list(rows)]


def run_passes(model: nn.Module, *passes: Any, program: Program | None = None) -> tuple[Program, list[Record]]:
    """Capture and run the passes."""
    before = program or capture(model)
    text = {name: to_text(gm) for name, gm in before.graphs()}
    after, records = Pipeline(passes, given=before.facts).run(before)
    assert text == {name: to_text(gm) for name, gm in before.graphs()}, "a pass edited its input"
    return after, records


def check_equal(program: Program, model: Any, tol: float = 2e-6, chunk: int | None = None) -> None:
    """The program's logits equal eager's."""
    got = logits_of(program, weights_from(model), IDS, ROWS, chunk)
    want = eager_logits(model)
    assert got.shape == want.shape
    assert not got.isnan().any()
    assert (got - want).abs().max() <= tol * max(1.0, want.abs().max().item())


def calls(program: Program, target: str, block: str | None = None) -> int:
    """How many nodes call `target`, over all blocks or one."""
    return sum(
        str(n.target) == f"{target}.default"
        for name, gm in program.blocks.items()
        if block in (None, name)
        for n in gm.graph.nodes
    )
