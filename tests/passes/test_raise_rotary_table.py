"""Rotary tables become one op with the same bits, however they are spelled; look-alikes stay, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.graph import is_op
from deepinfer_compile.models.more import MORE
from deepinfer_compile.ops import ROTARY_TABLE
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_rotary_table import RaiseRotaryTable
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run

Tables = Callable[[Tensor, Tensor], tuple[Tensor, ...]]
SIZE = 6
BF16 = torch.bfloat16


def multiplied(p: Tensor, f: Tensor) -> Tensor:
    return p[:, :, None].float() * f.float()


def matmul(p: Tensor, f: Tensor) -> Tensor:
    wide = f[None, :, None].float().expand(p.shape[0], -1, 1)
    return (wide @ p[:, None, :].float()).transpose(1, 2)


def both(angles: Tensor, scaling: float = 1.0) -> tuple[Tensor, ...]:
    return angles.cos() * scaling, angles.sin() * scaling


def halves(angles: Tensor) -> Tensor:
    return torch.cat([angles, angles], dim=-1)


def narrow(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.to(BF16) for t in tables)


# how the op is called: scaling, form, dtype
HITS: dict[str, tuple[Tables, tuple[float, str, torch.dtype]]] = {
    "matmul": (lambda p, f: narrow(both(halves(matmul(p, f)))), (1.0, "halves", BF16)),
    "multiplied": (lambda p, f: both(halves(multiplied(p, f)), 1.25), (1.25, "halves", torch.float32)),
    "other order": (lambda p, f: both(f.float() * p.unsqueeze(-1).float()), (1.0, "once", torch.float32)),
    "two cats": (
        lambda p, f: (halves(multiplied(p, f)).cos(), halves(multiplied(p, f)).sin()),
        (1.0, "halves", torch.float32),
    ),
    "pairs": (lambda p, f: narrow(both(multiplied(p, f).repeat_interleave(2, -1), 3)), (3.0, "pairs", BF16)),
    "an axis for heads": (lambda p, f: both(multiplied(p, f).unsqueeze(2)), (1.0, "once", torch.float32)),
    "two axes": (
        lambda p, f: both(halves(multiplied(p, f)).unsqueeze(1).unsqueeze(-2), 2),
        (2.0, "halves", torch.float32),
    ),
    "sine first": (lambda p, f: ((a := multiplied(p, f)).sin(), a.cos()), (1.0, "once", torch.float32)),
    "scaled apart": (lambda p, f: ((a := multiplied(p, f)).cos() * 2, a.sin() * 3), (1.0, "once", torch.float32)),
    "cast apart": (lambda p, f: ((a := multiplied(p, f)).cos().half(), a.sin().to(BF16)), (1.0, "once", torch.float32)),
    "read before its cast": (
        lambda p, f: ((c := multiplied(p, f).cos()), c.to(BF16), multiplied(p, f).sin().to(BF16)),
        (1.0, "once", torch.float32),
    ),
    "numbers of 32 bits": (lambda p, f: both(multiplied(p.int(), f)), (1.0, "once", torch.float32)),
    "fp64": (lambda p, f: both(p[..., None].double() * f.double().exp()), (1.0, "once", torch.float64)),
}
MISSES: dict[str, tuple[Tables, list[str]]] = {
    "a cosine": (lambda p, f: (multiplied(p, f).cos(),), ["there is no sine of the same angles"]),
    "a sine": (lambda p, f: (multiplied(p, f).sin(),), ["there is no cosine of the same angles"]),
    "different angles": (
        lambda p, f: (multiplied(p, f).cos(), multiplied(p + 1, f).sin()),
        ["there is no sine of the same angles", "there is no cosine of the same angles"],
    ),
    "shifted": (lambda p, f: both(multiplied(p, f) + 1), ["no product of positions and frequencies"]),
    "unequal halves": (
        lambda p, f: both(torch.cat([multiplied(p, f), multiplied(p, f * 2)], -1)),
        ["the angles are joined of different parts"],
    ),
    "three times": (
        lambda p, f: both(multiplied(p, f).repeat_interleave(3, -1)),
        ["the angles are repeated 3 times, not twice"],
    ),
    "half precision": (lambda p, f: both(p[..., None].to(BF16) * f.to(BF16)), ["the angles are taken in"]),
    "rounded positions": (lambda p, f: both(multiplied(p.to(BF16), f)), ["the positions are torch.bfloat16"]),
    "wider than the frequencies": (
        lambda p, f: both(p[..., None].double() * f.double()),
        ["the angles are taken in torch.float64 of frequencies in"],
    ),
    "other places": (
        lambda p, f: both((f[None, :, None].float() @ p[:, None, :].float()).transpose(0, 1)),
        ["no product of positions and frequencies"],
    ),
    "not turned": (
        lambda p, f: both(f[None, :, None].float() @ p[:, None, :].float()),
        ["no product of positions and frequencies"],
    ),
    "another last axis": (
        lambda p, f: both(multiplied(p, f).unsqueeze(-1)),
        ["a dimension more than those of frequencies"],
    ),
    "two terms": (
        lambda p, f: both((f[None, :, None].float().expand(1, -1, 2) @ torch.stack([p, p], 1).float()).transpose(1, 2)),
        ["no product of positions and frequencies"],
    ),
    "a frequency a token": (
        lambda p, f: both(p[..., None].float() * (f.float()[None, None, :] + p[..., None])),
        ["no product of positions and frequencies"],
    ),
    "a square": (lambda p, f: both(p[:, None, :, None].float() * p[:, :, None, None].float()), ["no product of"]),
}


class Small(nn.Module):
    """f(position_ids, inv_freq)."""

    def __init__(self, function: Tables, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("inv_freq", (1e4 ** -(torch.arange(SIZE) / SIZE)).to(dtype))

    def forward(self, position_ids: Tensor) -> tuple[Tensor, ...]:
        return self.function(position_ids, self.inv_freq)  # type: ignore[arg-type]


def positions(tokens: int, batch: int = 1) -> Tensor:
    found = torch.randint(0, 1 << 20, (batch, tokens), generator=torch.Generator().manual_seed(tokens))
    found[:, :1] = 0
    return found


def passed(function: Tables, dtype: torch.dtype = torch.float32) -> tuple[Small, Program, Program, list[Record]]:
    module = Small(function, dtype)
    before = program_of(module, {"position_ids": {0: Dim.AUTO, 1: Dim.AUTO}}, position_ids=positions(7, 3))
    after, records = go_on(before, RaiseRotaryTable(), RaiseRotaryTable())
    return module, before, after, records


def tables(program: Program) -> list[Any]:
    return [n for gm in program.blocks.values() for n in gm.graph.nodes if is_op(n, ROTARY_TABLE.overload)]


def expected(name: str) -> int:
    """Tables of an architecture: one a kind of layer; DeepSeek-V2's are complex."""
    return {"gemma": 2, "deepseek_v2": 0}.get(name, 1)


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseRotaryTable(), RaiseRotaryTable())
    assert counts(records[0]) == ({"prefix": expected(name)} if expected(name) else {})
    assert not reasons(records[0])
    assert records[1].count("applied") == 0
    assert not any(is_op(n, torch.ops.aten.cos.default) for gm in after.blocks.values() for n in gm.graph.nodes)
    check_equal(after, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_architectures(name: str) -> None:
    model = models.make(name, dtype=BF16)
    try:
        before = Pipeline((Canonicalize(),)).run(capture(model))[0]
    except UnsupportedConstruct as error:
        pytest.skip(str(error).splitlines()[0])
    after, records = go_on(before, RaiseRotaryTable())
    cosines = [n for gm in before.blocks.values() for n in gm.graph.nodes if is_op(n, torch.ops.aten.cos.default)]
    assert len(tables(after)) == records[0].count("applied") == len(cosines)
    assert not reasons(records[0])


@pytest.mark.parametrize("stored", [torch.float32, BF16])
@pytest.mark.parametrize("name", HITS)
def test_every_spelling_keeps_every_bit(name: str, stored: torch.dtype) -> None:
    function, (scaling, form, dtype) = HITS[name]
    module, _, after, records = passed(function, stored)
    assert [r.count("applied") for r in records] == [1, 0]
    assert not reasons(records[0])
    (made,) = tables(after)
    assert made.args[2:] == (scaling, form, dtype)
    for given in (positions(7, 3), positions(1), positions(0)):
        for got, want in zip(run(after, position_ids=given), module(given), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    function, wanted = MISSES[name]
    _, before, after, records = passed(function)
    assert records[0].count("applied") == 0
    assert [w in r for w, r in zip(wanted, reasons(records[0]), strict=True)] == [True] * len(wanted)
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_sizes_that_agree_by_chance_are_told_apart() -> None:
    """As many tokens, requests and frequencies: only the way through the views says which dimension is which."""
    module = Small(lambda p, f: both(matmul(p, f)))
    for function, count in ((matmul, 1), (lambda p, f: matmul(p, f).transpose(1, 2), 0)):
        module.function = lambda p, f, made=function: both(made(p, f))
        before = program_of(module, position_ids=positions(SIZE, SIZE))
        after, records = go_on(before, RaiseRotaryTable())
        assert records[0].count("applied") == count
        given = positions(SIZE, SIZE)
        assert all(map(torch.equal, run(after, position_ids=given), module(given)))


def test_bisection_caps_the_pass() -> None:
    program = program_of(Small(HITS["matmul"][0]), position_ids=positions(5))
    _, records = go_on(program, RaiseRotaryTable(), limits={"raise-rotary-table": 0})
    assert records[0].count("applied") == 0


def test_golden() -> None:
    _, before, after, _ = passed(HITS["matmul"][0], BF16)
    check_golden("raise_rotary_table", before_and_after(before, after, "prefix"))
