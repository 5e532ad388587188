"""Kernels of rows and choices in Triton's interpreter: tokens of nobody, steps one after another, poison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Limits, Refused, specs
from deepinfer_compile.ops.registry import Op
from tests.triton_interpreter import run

LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)
NAN = float("nan")
PAGE = 64
CUTS = (((5, 0, 63, 1), (1, 0, 1, 0), (3, 0, 4, 2)), ((1,), (1,), (7,), (59,)))
"""New tokens of each request, step by step."""


class Steps:
    """Requests that grow step by step on scattered pages."""

    def __init__(self, cuts: tuple[tuple[int, ...], ...]) -> None:
        self.cuts = cuts
        self.lengths = torch.tensor(cuts).sum(0).tolist()
        count = len(self.lengths) * 3
        self.tables = torch.randperm(count, generator=torch.Generator().manual_seed(0)).view(-1, 3).int()

    def cache(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        fill = NAN if dtype.is_floating_point else -99
        return torch.full((self.tables.numel(), *shape), fill, dtype=dtype)

    def __iter__(self) -> Any:
        """Of each step (tokens of each request by number, metadata, slots): two tokens of nobody behind, and table
        entries of pages that hold nothing yet are -1."""
        done = [0] * len(self.lengths)
        for cut in self.cuts:
            spans = [range(a, a + n) for a, n in zip(done, cut)]
            done = [a + n for a, n in zip(done, cut)]
            start = torch.tensor([0, *cut]).cumsum(0).int()
            pages = [int(self.tables[r, p // PAGE]) * PAGE + p % PAGE for r, span in enumerate(spans) for p in span]
            filled = torch.arange(3) * PAGE < torch.tensor(done)[:, None]
            meta = (start, torch.tensor(done, dtype=torch.int32), torch.where(filled, self.tables, -1))
            yield spans, meta, torch.tensor([*pages, -1, -1])

    def packed(self, whole: list[Tensor], spans: list[range]) -> Tensor:
        """The rows of a step's tokens, and two of nobody."""
        rows = [x[span.start : span.stop] for x, span in zip(whole, spans)]
        return torch.cat((*rows, torch.full_like(whole[0][:1], 3), torch.full_like(whole[0][:1], 3)))

    def drawn(self, *shape: int, seed: int = 0) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(max(n, 1), *shape, generator=generator) for n in self.lengths]


def call(op: Op, folder: Path, *values: Any, **changes: Any) -> tuple[Tensor, ...]:
    """The results of an operation's kernel, with its default configuration, or `config`."""
    given = dict(zip((a.name for a in op.overload._schema.arguments), values, strict=True))
    spec = next(s for s in specs() if s.op is op)
    params = spec.bind(Call(op, given, "decode"))
    assert isinstance(params, spec.params), params
    config = spec.config(**{**vars(spec.default(params, LIMITS, 64)), **changes})
    assert config in set(spec.space(params, LIMITS)), config
    return run(spec, params, config, given, folder)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_rows_are_written_by_the_tokens_that_complete_them(cuts: Any, ratio: int, tmp_path: Path) -> None:
    batch = Steps(cuts)
    whole = batch.drawn(12)
    cache = batch.cache(PAGE // ratio, 12)
    for spans, _, slot in batch:
        (out,) = call(ops.WRITE_ROWS, tmp_path, batch.packed(whole, spans), cache, slot, ratio, tokens=4)
        assert torch.equal(out, slot)
    for r, x in enumerate(whole):
        for row in range(3 * PAGE // ratio):
            page, at = int(batch.tables[r, row * ratio // PAGE]), row % (PAGE // ratio)
            last = ratio * (row + 1) - 1
            want = x[last] if last < batch.lengths[r] else torch.full((12,), NAN)
            torch.testing.assert_close(cache[page, at], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("count", "fill"), [(1, None), (3, 7), (4, None)])
def test_recent_rows_step_by_step_are_those_of_whole_sequences(
    cuts: Any, count: int, fill: int | None, tmp_path: Path
) -> None:
    batch = Steps(cuts)
    given = [(x * 100).long() if fill else x for x in batch.drawn(*(() if fill else (2, 6)))]
    filler = None if fill is None else torch.tensor(fill)
    cache = batch.cache(PAGE, *given[0].shape[1:], dtype=given[0].dtype)
    for spans, meta, slot in batch:
        (out,) = call(ops.CACHED_RECENT, tmp_path, batch.packed(given, spans), cache, *meta, slot, filler, count)
        token = 0
        for r, span in enumerate(spans):
            for position in span:
                for back in range(count):
                    number = position - (count - 1) + back
                    want = given[r][number] if number >= 0 else torch.full_like(given[r][0], fill or 0)
                    assert torch.equal(out[token, back], want)
                token += 1
        assert (out[token:] == (fill or 0)).all()


def test_a_token_of_nobody_amid_a_request_is_read_from_where_it_was_written(tmp_path: Path) -> None:
    """Its row of this call is not stored, so what counts is the row that an earlier call stored."""
    x, cache = torch.randn(5, 8), torch.full((2, PAGE, 8), NAN)
    cache[1, :2] = torch.randn(2, 8)
    meta = (torch.tensor([0, 5]).int(), torch.tensor([5]).int(), torch.tensor([[1]]).int())
    slot = torch.tensor([PAGE, -1, PAGE + 2, PAGE + 3, -1])
    old = cache.clone()
    (out,) = call(ops.CACHED_RECENT, tmp_path, x, cache, *meta, slot, None, 3)
    want = ops.CACHED_RECENT.reference(x, old, *meta, slot, None, 3)
    assert torch.equal(out, want)
    assert torch.equal(out[2, 1], old[1, 1])
    torch.testing.assert_close(cache, old, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("ratio", "window", "pieces"), [(1, 6, 1), (4, 200, 4)])
def test_attention_step_by_step_is_that_of_whole_sequences(
    cuts: Any, ratio: int, window: int, pieces: int, tmp_path: Path
) -> None:
    """Window and rows lie on different pages. Against the plain form, which knows no cache."""
    batch, others, top = Steps(cuts), Steps(cuts), 5
    others.tables = batch.tables.flip(0, 1)
    queries, latents, rows = (batch.drawn(*s, seed=i) for i, s in enumerate(((3, 10), (10,), (10,))))
    sinks = torch.tensor([0.3, -2.0, 1.0])
    lists = [torch.full((len(x), top), -1, dtype=torch.int32) for x in latents]
    for x in lists:
        for t in range(len(x)):
            seen = (t + 1) // ratio
            x[t, : min(top, seen)] = torch.randperm(seen)[:top]
            x[t] = x[t, torch.randperm(top)]
    wanted = [
        ops.SELECTED_ATTENTION.reference(*(x[None] for x in sequence), sinks, 0.4, window, ratio)[0]
        for sequence in zip(queries, latents, rows, lists)
    ]
    cache, stored = batch.cache(PAGE, 10), batch.cache(PAGE // ratio, 10)
    for (spans, meta, slot), (_, (_, _, table), written) in zip(batch, others):
        (written,) = call(ops.WRITE_ROWS, tmp_path, batch.packed(rows, spans), stored, written, ratio)
        chosen = batch.packed(lists, spans)
        chosen[-2:] = 1 << 30  # of nobody: must not be looked at
        given = (*(batch.packed(x, spans) for x in (queries, latents)), cache, *meta, slot)
        (out,) = call(
            ops.CACHED_SELECTED_ATTENTION, tmp_path, *given, stored, written, table, chosen, sinks, 0.4, window,
            pieces=pieces,
        )  # fmt: skip
        torch.testing.assert_close(out[:-2], batch.packed(wanted, spans)[:-2], atol=3e-6, rtol=3e-6)
        assert not out[-2:].any()


def test_attention_to_nothing_but_sinks_is_nothing(tmp_path: Path) -> None:
    """All tokens are nobody's; with sinks of minus infinity, too."""
    meta = (torch.tensor([0, 2]).int(), torch.tensor([0]).int(), torch.tensor([[-1]]).int())
    for sinks in (None, torch.tensor([1.0, -float("inf"), 0.0])):
        for pieces in (1, 4):
            given = (torch.randn(2, 3, 8), torch.randn(2, 8), torch.full((1, PAGE, 8), NAN), *meta)
            slot = torch.tensor([-1, -1])
            (out,) = call(
                ops.CACHED_SELECTED_ATTENTION, tmp_path, *given, slot, *[None] * 4, sinks, 0.4, 20, pieces=pieces
            )
            assert not out.any()
            assert given[2].isnan().all()


def test_attention_refuses_what_it_does_not_take() -> None:
    spec = next(s for s in specs() if s.op is ops.CACHED_SELECTED_ATTENTION)
    good = spec.inputs(next(c for c in spec.cases if c.name == "block"), torch.Generator().manual_seed(0))
    wide = {n: torch.zeros(*good[n].shape[:-1], 600) for n in ("q", "latents", "cache", "rows")}
    for changes, reason in (
        ({"q": good["q"].double()}, "float64"),
        ({"sinks": good["sinks"].half()}, "sinks of torch.float16"),
        ({"rows_table": None}, "without their page table"),
        (wide, "600 elements"),
        ({"cache": good["cache"][:, :40]}, "pages of 40"),
        ({"window": 0}, "window of 0"),
        ({"q": good["q"].transpose(1, 2).contiguous().transpose(1, 2)}, "side by side"),
    ):
        found = spec.bind(Call(spec.op, {**good, **changes}, "decode"))
        assert isinstance(found, Refused), changes
        assert reason in found.reason
