"""Windows of latents, chosen rows and recent rows over paged caches: chunks between other requests equal eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import is_op
from deepinfer_compile.ops import CACHED_RECENT, WRITE_ROWS
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import PACK, RAISE
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, trace_of, weights_from
from deepinfer_compile.runtime.batch import PAGE_SIZE
from tests import v41


@pytest.fixture(scope="module")
def packed() -> Program:
    _, before = v41.canonical(torch.float64)
    return Pipeline((*RAISE, *PACK)).run(before)[0]


@pytest.mark.slow  # test_v41 of the bundles does the same with chunks of 16
@pytest.mark.parametrize("chunk", [1, 13, 64, 150])
def test_chunks_equal_eager(packed: Program, chunk: int) -> None:
    model, before = v41.canonical(torch.float64)
    ids = torch.randint(0, 300, (150,), generator=torch.Generator().manual_seed(chunk)).tolist()
    weights, rows = weights_from(model), range(0, 150, 3)
    trace = trace_of(packed, weights, ids, rows, chunk)
    want = logits_of(before, weights, ids, range(150)).squeeze(0)
    torch.testing.assert_close(trace.logits, want[list(rows)], atol=1e-11, rtol=1e-11)
    assert not trace.stray


@pytest.mark.slow
def test_what_is_kept(packed: Program) -> None:
    """Rows and keys once, of as many tokens as make one; what is recent in the group of the window."""
    assert packed.windows == (0, 16)
    kinds = [(c.layer, c.kind, c.group, c.shape) for c in packed.caches if c.kind != "window"]
    keys, rows = (PAGE_SIZE // 2, 12), (PAGE_SIZE // 2, 20)
    assert kinds == [
        (0, "recent", 1, (PAGE_SIZE,)),
        (1, "recent", 1, (PAGE_SIZE, 20)),
        (1, "recent", 1, (PAGE_SIZE, 20)),
        (1, "rows", 0, keys),
        (1, "rows", 0, rows),
        (3, "rows", 0, (PAGE_SIZE, 12)),
        (3, "rows", 0, (PAGE_SIZE, 20)),
    ]
    windows = [(c.layer, c.group, c.shape) for c in packed.caches if c.kind == "window"]
    assert windows == [(layer, 1, (PAGE_SIZE, 20)) for layer in range(5)]
    written = [n for gm in packed.blocks.values() for n in gm.graph.nodes if is_op(n, WRITE_ROWS.overload)]
    assert len(written) == 4


class Convolving(nn.Module):
    """A language model whose layers see the last tokens alone, each through products of its own."""

    def __init__(self, *counts: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.weights = nn.ParameterList(torch.randn(n, 8) for n in counts)
        self.head = nn.Linear(8, 50)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for weight in self.weights:
            count = len(weight)
            line = nn.functional.pad(x, (0, 0, count - 1, 0))
            shifts = [line[:, i : i + x.shape[1]] for i in range(count)]
            x = x + torch.tanh((torch.stack(shifts, 2) * weight).sum(2))
        return self.head(x)


def test_convolutions_over_the_last_tokens_need_no_attention() -> None:
    torch.manual_seed(0)
    model = Convolving(3, 4, 2).double().eval()
    program = Pipeline((*RAISE, *PACK)).run(capture(model))[0]
    assert program.windows == (0, 4)
    assert {c.kind for c in program.caches} == {"recent"}
    assert sum(is_op(n, CACHED_RECENT.overload) for gm in program.blocks.values() for n in gm.graph.nodes) == 3
    ids = torch.randint(0, 50, (70,)).tolist()
    with torch.no_grad():
        want = model(torch.tensor([ids]))[0]
    for chunk in (1, 9, 70):
        trace = trace_of(program, weights_from(model), ids, range(70), chunk)
        torch.testing.assert_close(trace.logits, want, atol=1e-12, rtol=1e-12)
        assert not trace.stray
