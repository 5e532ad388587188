"""The boundary of DeepSeek-V4.1, whose attention no pass raises: joined keys, a choice among rows, streams and their
weights that cross together. In fp64, so that no choice hangs on a rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile.boundary import find_boundary
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import NoBoundary
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.split_encoder_decoder import SplitEncoderDecoder, kept_rows
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from tests.passes.stages import go_on

LENGTHS = (1, 31, 65)
WINDOW = tiny.TINY["sliding_window"]
# a window, pooled rows, the boundary and a reader of it
SHORT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "compress_ratios": (0, 2, 1, 1),
    "kv_source_layer_ids": (1, 2),
    "index_source_layer_ids": (1, 2),
    "candidate_source_layer_id": 2,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (2, 3),
    "hc_sinkhorn_iters": 1,
}
# a third source above the one that layer 3 shares
OWN: dict[str, Any] = {
    **SHORT,
    "num_hidden_layers": 5,
    "compress_ratios": (0, 2, 1, 1, 1),
    "kv_source_layer_ids": (1, 2, 4),
    "index_source_layer_ids": (1, 2, 4),
    "candidate_source_layer_id": 4,
}


def captured(**changes: Any) -> tuple[DeepseekV41, Program]:
    """A tiny model and its canonical program."""
    model = tiny.make(dtype=torch.float64, **changes).requires_grad_(False)
    return model, Pipeline((Canonicalize(),)).run(capture(model))[0]


def last_logits(program: Program, model: DeepseekV41, ids: Tensor, keep: int) -> Tensor:
    """Logits of the kept rows of one prompt."""
    length = ids.shape[1]
    inputs = {"input_ids": ids, "position_ids": torch.arange(length)[None], "kept": kept_rows(length, keep)}
    made: Tensor = program.run({**bind(program, weights_from(model)), **inputs})[0]
    return made[-min(keep, length) :]


def check_split(model: DeepseekV41, program: Program, halo: int) -> None:
    off, masked, compact = (go_on(program, SplitEncoderDecoder(replay=r))[0] for r in ("off", "mask", "compact"))
    for length in LENGTHS:
        ids = torch.randint(0, 307, (1, length), generator=torch.Generator().manual_seed(length))
        wanted = model(ids)[0]
        torch.testing.assert_close(last_logits(off, model, ids, length), wanted, rtol=0, atol=1e-10)
        for keep in (WINDOW + 2, halo):
            rows = last_logits(compact, model, ids, keep)
            torch.testing.assert_close(last_logits(masked, model, ids, keep), rows, rtol=0, atol=1e-10)
        torch.testing.assert_close(rows[-1], wanted[-1], rtol=0, atol=1e-10)


@pytest.mark.slow
def test_the_boundary_of_a_small_one_lies_inside_its_layer() -> None:
    _, program = captured(**SHORT)
    found = find_boundary(program)
    assert (found.layer, found.below, found.above) == (2, (0, 1), (2, 3))
    assert found.windows == (WINDOW, WINDOW)
    assert found.halo == 1 + 2 * (WINDOW - 1)
    streams, width, size = tiny.TINY["hc_mult"], tiny.TINY["hidden_size"], 8
    assert sorted(c.bytes for c in found.crossing) == [size * streams, size * streams * width]
    assert {c.layer for c in found.crossing} == {1}
    assert {s.layer for s in found.sources} == {2}
    assert sorted(r for s in found.sources for r in s.readers if r is not None) == [2, 3]


@pytest.mark.slow
def test_a_small_one_gives_the_same_split() -> None:
    model, program = captured(**SHORT)
    check_split(model, program, 1 + 2 * (WINDOW - 1))


@pytest.mark.slow
def test_all_ten_layers_are_split() -> None:
    model, program = captured()
    found = find_boundary(program)
    assert (found.layer, found.below, found.above) == (6, (0, 1, 2, 3, 4, 5), (6, 7, 8, 9))
    assert found.halo == 1 + 4 * (WINDOW - 1)
    assert {s.layer for s in found.sources} == {6}
    check_split(model, program, found.halo)


@pytest.mark.slow
def test_a_source_above_the_boundary_is_refused() -> None:
    with pytest.raises(NoBoundary, match="source above") as caught:
        find_boundary(captured(**OWN)[1])
    assert "layer 4" in caught.value.where


@pytest.mark.slow
def test_forty_layers_of_the_published_roles_are_cut_at_twenty() -> None:
    roles: dict[str, Any] = {
        "num_hidden_layers": 40,
        "compress_ratios": (0,) * 2 + (2,) * 18 + (1,) * 20,
        "kv_source_layer_ids": (2, 8, 14, 20),
        "index_source_layer_ids": (2, 8, 14, *range(20, 40, 4)),
        "candidate_source_layer_id": 20,
        "engram_layer_ids": (1, 14),
        "dspark_target_layer_ids": (37, 38, 39),
        "sliding_window": 128,
        "hc_sinkhorn_iters": 1,
    }
    found = find_boundary(captured(**roles)[1])
    assert (found.layer, found.below, found.above) == (20, tuple(range(20)), tuple(range(20, 40)))
    assert found.windows == (128,) * 20
    assert found.halo == 1 + 20 * 127
    assert {s.layer for s in found.sources} == {20}
    assert {c.layer for c in found.crossing} == {19}
