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
SHORT = ((1, 0, 9), (1, 0, 1), (0, 2, 2))


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


def call(op: Op, folder: Path, *values: Any, phase: str = "decode", **changes: Any) -> tuple[Tensor, ...]:
    """The results of an operation's kernel, with its default configuration, or `config`."""
    names = op.overload._schema.arguments
    given = dict(zip((a.name for a in names), (*values, *(a.default_value for a in names[len(values) :])), strict=True))
    spec = next(s for s in specs() if s.op is op)
    params = spec.bind(Call(op, given, phase))
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


@pytest.mark.parametrize(
    ("cuts", "ratio", "window", "pieces"), [(CUTS[0], 1, 6, 1), (CUTS[1], 4, 200, 4), (SHORT, 2, 3, 16)]
)
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


def exact(batch: Steps, *shape: int, seed: int, parts: int = 1) -> list[Tensor]:
    """Numbers whose products add up without rounding, so that what is chosen does not hang on the order of sums."""
    return [(x * parts).round() / parts for x in batch.drawn(*shape, seed=seed)]


def in_order(lists: Tensor) -> bool:
    """Whether numbers rise and all -1 are behind."""
    placed = torch.where(lists >= 0, lists, 1 << 30)
    steps = placed[:, 1:] - placed[:, :-1]
    return bool(((steps > 0) | (placed[:, 1:] == 1 << 30)).all())


@pytest.mark.parametrize("cuts", [SHORT, *(pytest.param(cuts, marks=pytest.mark.slow) for cuts in CUTS)])
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_rows_chosen_step_by_step_are_those_of_whole_sequences(cuts: Any, ratio: int, tmp_path: Path) -> None:
    """Sets equal those of the plain form, which knows no cache; then again among the candidates that were made."""
    batch, block, blocks = Steps(cuts), 3, 4
    q, weights, keys = exact(batch, 3, 8, seed=0), exact(batch, 3, seed=1, parts=4), exact(batch, 8, seed=2)
    plain = [ops.SELECT_ROWS.reference(*(x[None] for x in s), None, 0.5, ratio, 5, block, blocks)
             for s in zip(q, weights, keys)]  # fmt: skip
    limited = [
        ops.SELECT_ROWS.reference(*(x[None] for x in s), made[1], 0.5, ratio, 5, block, 0)[0]
        for s, made in zip(zip(q, weights, keys), plain, strict=True)
    ]
    stored = batch.cache(PAGE // ratio, 8)
    for spans, meta, slot in batch:
        (written,) = call(ops.WRITE_ROWS, tmp_path, batch.packed(keys, spans), stored, slot, ratio)
        given = (*(batch.packed(x, spans) for x in (q, weights)), stored, written, *meta)
        rest = (0.5, ratio, 5, block)
        chosen, made = call(ops.CACHED_SELECT_ROWS, tmp_path, *given, None, *rest, blocks, block_s=1024, narrow_warps=4)
        beside, _ = call(ops.CACHED_SELECT_ROWS, tmp_path, *given, None, *rest, blocks, phase="verify")
        assert torch.equal(beside, chosen)
        again, none = call(ops.CACHED_SELECT_ROWS, tmp_path, *given, made, *rest, 0)
        assert none.shape == (len(slot), 0)
        for found, wanted in ((chosen, [p[0] for p in plain]), (made, [p[1] for p in plain]), (again, limited)):
            assert (found[-2:] == -1).all()
            assert in_order(found)
            want = batch.packed([w[0] for w in wanted], spans)
            assert torch.equal(found[:-2].sort().values, want[:-2].sort().values)


def choose(rows: Tensor, folder: Path, top: int, candidates: Tensor | None = None, **changes: Any) -> tuple[Any, Any]:
    """What a token whose rows have these scores chooses, and the reference's choice in order of number. Two heads, so
    that scores may be negative."""
    count, page = len(rows), 64
    pages = -(-count // page)
    keys = torch.full((pages, page, 1), NAN)
    keys.view(-1)[:count] = rows
    meta = (torch.tensor([0, 1]).int(), torch.tensor([count]).int(), torch.arange(pages).int()[None])
    both = (torch.tensor([[[1.0], [-1.0]]]), torch.tensor([[1.0, -1.0]]))
    values = (*both, keys, torch.tensor([count - 1]), *meta, candidates, 1.0, 1, top, 2, 3)
    want = ops.CACHED_SELECT_ROWS.reference(*values)
    found = call(ops.CACHED_SELECT_ROWS, folder, *values, block_s=1024, narrow_warps=4, **changes)
    return [x.tolist()[0] for x in found], [sorted(x.tolist()[0], key=lambda n: n % (1 << 31)) for x in want]


def test_equal_scores_go_to_the_lower_rows(tmp_path: Path) -> None:
    """Scores are the rows themselves: equal ones of all signs, both zeros, infinite ones and the largest floats."""
    generator = torch.Generator().manual_seed(3)
    few = torch.randint(-2, 3, (1100,), generator=generator).float()
    nothing = torch.full((9,), -float("inf"))
    large = torch.tensor([3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, 1.0, -float("inf"), float("inf"), -1.0])
    for rows, tops in ((few, (1, 600)), (few[:7], (3, 20)), (-few.abs(), (6,)), (large, range(1, 11)), (nothing, (2,))):
        for top in tops:
            found, want = choose(rows, tmp_path, top)
            assert found == want


def test_lines_of_several_parts(tmp_path: Path) -> None:
    """Random scores, many equal ones, and a part that holds nearly all that is wanted."""
    generator = torch.Generator().manual_seed(4)
    rows = torch.randn(5000, generator=generator)
    rows[2100:2900] += 10
    for scores, tops in ((rows, (7, 1024, 1500)), (rows.round(), (300, 2000)), (torch.zeros(3000), (1100,))):
        for top in tops:
            for held, warps in ((8192, 16), (1024, 1)):
                found, want = choose(scores, tmp_path, top, held=held, choose_warps=warps)
                assert found == want


def test_candidates_in_any_order_and_twice_end(tmp_path: Path) -> None:
    rows = torch.tensor([1.0, 5, 5, 5, 2, 5, 5, 0, 3, 5])
    for listed in ([3, 0, 1, -1], [-1, 4, -1, 2], [-1] * 4, [9, 1, 40, 2]):
        found, want = choose(rows, tmp_path, 3, torch.tensor([listed]).int())
        assert [sorted(x, key=lambda n: n % (1 << 31)) for x in found] == want
    found, _ = choose(rows, tmp_path, 3, torch.tensor([[1, 1, 1, 1]]).int())
    assert set(found[0]) <= {2, 3}


def test_a_choice_refuses_what_it_does_not_take() -> None:
    spec = next(s for s in specs() if s.op is ops.CACHED_SELECT_ROWS)
    good = spec.inputs(next(c for c in spec.cases if c.name == "both"), torch.Generator().manual_seed(0))
    for changes, reason in (
        ({"q": good["q"].double()}, "float64"),
        ({"weights": good["weights"].half()}, "float16 weights"),
        ({"q": good["q"][:, :, :1].expand(-1, -1, 300)}, "300 elements"),
        ({"top": 0}, "0 rows"),
        ({"block": 0}, "blocks of 0"),
        ({"candidates": torch.zeros(4, 9000, dtype=torch.int32)}, "8192 candidates"),
        ({"weights": good["weights"].t().contiguous().t()}, "side by side"),
    ):
        found = spec.bind(Call(spec.op, {**good, **changes}, "decode"))
        assert isinstance(found, Refused), changes
        assert reason in found.reason
