"""Rows in bytes of a format become operations with the same bytes and numbers; other formats stay as they are."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import is_op
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.storage import KEYS, PUBLISHED, ROWS, WINDOW, Grid
from deepinfer_compile.ops import PACK_ROWS, UNPACK_ROWS
from deepinfer_compile.passes.raise_packed_rows import RaisePackedRows
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.presets import PACK, RAISE
from deepinfer_compile.program import Program
from deepinfer_compile.runtime.batch import PAGE_SIZE
from tests import v41
from tests.passes.stages import go_on, program_of, reasons, run

Both = Callable[[Tensor], tuple[Tensor, Tensor]]


def of(grid: Grid, dtype: torch.dtype = torch.float32) -> Both:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        stored = grid.store(x)
        return stored, grid.load(stored, dtype)

    return both


def powers_of_two_by_logarithm(x: Tensor) -> tuple[Tensor, Tensor]:
    """Read back by slices, the scale as an exponent."""
    stored = WINDOW.store(x)
    numbers = stored[..., :64].view(torch.float8_e4m3fn).float().unflatten(-1, (2, 32))
    exponent = stored[..., 64:].float() - 127
    return stored, (numbers * torch.exp2(exponent).unsqueeze(-1)).flatten(-2)


def rounded_down(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x.float().unflatten(-1, (-1, 32))
    scale = (groups.abs().amax(-1).clamp(min=1e-4) / 448.0).log2().floor().exp2().to(torch.float8_e8m0fnu)
    numbers = (groups / scale.float().unsqueeze(-1)).clamp(-448.0, 448.0).flatten(-2).to(torch.float8_e4m3fn)
    stored = torch.cat((numbers.view(torch.uint8), scale.view(torch.uint8)), dim=-1)
    return stored, WINDOW.load(stored, torch.float32)


def read_as_others(x: Tensor) -> tuple[Tensor, Tensor]:
    stored = KEYS.store(x)
    return stored, KEYS.load(stored, torch.float32) * 2


def with_a_bias(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers that also depend on where the row stands."""
    groups = x.float().unflatten(-1, (-1, 32)) + x[..., :1, None] * 0.5
    scale = torch.ones_like(groups[..., 0]).to(torch.float8_e8m0fnu)
    numbers = groups.clamp(-448.0, 448.0).flatten(-2).to(torch.float8_e4m3fn)
    stored = torch.cat((numbers.view(torch.uint8), scale.view(torch.uint8)), dim=-1)
    return stored, WINDOW.load(stored, torch.float32)


HITS: dict[str, Both] = {
    "window": of(WINDOW),
    "rows": of(ROWS, torch.bfloat16),
    "keys": of(KEYS, torch.float64),
    "in fp32 and read by slices": powers_of_two_by_logarithm,
}
ALONE = {"read as others": read_as_others}
"""Only the bytes are of the format."""
MISSES: dict[str, Both] = {"rounded down": rounded_down, "with a bias": with_a_bias}


class Small(nn.Module):
    def __init__(self, function: Both) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.function(x)


def passed(function: Both, dtype: torch.dtype = torch.float32) -> tuple[Small, Program, list[Record]]:
    module = Small(function)
    before = program_of(module, {"x": {1: Dim.AUTO}}, x=torch.randn(1, 7, 64).to(dtype))
    after, records = go_on(before, RaisePackedRows(), RaisePackedRows())
    return module, after, records


def count(program: Program) -> tuple[int, int]:
    nodes = [n for gm in program.blocks.values() for n in gm.graph.nodes]
    return tuple(sum(is_op(n, op.overload) for n in nodes) for op in (PACK_ROWS, UNPACK_ROWS))  # type: ignore[return-value]


def check_numbers(module: Small, after: Program, dtype: torch.dtype = torch.float32) -> None:
    for length in (1, 2, 9):
        x = (torch.randn(1, length, 64) * torch.logspace(-5, 5, length)[:, None]).to(dtype)
        got, want = run(after, x=x), module(x)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["window", "rows", "keys"])
def test_the_bytes_and_numbers_are_the_same(name: str, dtype: torch.dtype) -> None:
    module, after, records = passed(HITS[name], dtype)
    assert [r.count("applied") for r in records] == [1, 0]
    assert count(after) == (1, 1)
    check_numbers(module, after, dtype)


def test_how_they_are_read_is_found_by_trying() -> None:
    module, after, _ = passed(HITS["in fp32 and read by slices"])
    assert count(after)[0] == 1
    check_numbers(module, after)


@pytest.mark.parametrize("name", ALONE)
def test_what_is_read_otherwise_stays(name: str) -> None:
    module, after, _ = passed(ALONE[name])
    assert count(after)[0] == 1
    check_numbers(module, after)


@pytest.mark.parametrize("name", MISSES)
def test_other_forms_stay(name: str) -> None:
    module, after, records = passed(MISSES[name])
    assert records[0].count("applied") == 0
    assert count(after) == (0, 0)
    assert all("in no form that is known" in r for r in reasons(records[0]))
    check_numbers(module, after)


def test_caches_have_the_published_bytes() -> None:
    """Published widths: global rows and keys of a token take 890 bytes, a token of a window 528."""
    layers = {**v41.SHORT, "num_hidden_layers": 6, "compress_ratios": (0, 2, 2, 2, 1, 1)}
    sources = {"kv_source_layer_ids": (1, 2, 3, 4), "index_source_layer_ids": (1, 2, 3, 4), "engram_layer_ids": ()}
    more = {"candidate_source_layer_id": 4, "engram_num_embeddings": (), "dspark_target_layer_ids": (4, 5)}
    model = tiny.make(forms=PUBLISHED, head_dim=512, index_head_dim=128, **{**layers, **sources, **more})
    program = Pipeline((*RAISE, *PACK)).run(capture(model.to(torch.bfloat16).requires_grad_(False)))[0]
    stored = [c for c in program.caches if c.kind in ("rows", "window")]
    assert {c.dtype for c in stored} == {torch.uint8}
    rows = sum(c.shape[0] * c.shape[1] for c in stored if c.kind == "rows") / PAGE_SIZE
    assert rows == 890
    assert {c.shape for c in stored if c.kind == "window"} == {(PAGE_SIZE, 528)}
