"""A linear of widened operands reads them as stored, with the same numbers; what others need stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import is_op, target_name
from deepinfer_compile.ops import WIDE_LINEAR
from deepinfer_compile.passes.fuse_linear_casts import FuseLinearCasts
from deepinfer_compile.passes.select_kernels import SelectKernels
from deepinfer_compile.pipeline import Record
from deepinfer_compile.program import Program
from tests.golden_text import check_golden
from tests.passes.harness import check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run

Wide = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
HITS: dict[str, Wide] = {
    "router": lambda x, w, b: (F.linear(x.float(), w.float()),),
    "turned over": lambda x, w, b: (x.float() @ w.float().t(),),
    "bias": lambda x, w, b: (F.linear(x.float(), w.float(), b.float()),),
    "wide bias": lambda x, w, b: (F.linear(x.float(), w.float(), torch.ones(5)),),
    "x is read again": lambda x, w, b: (F.linear(wide := x.float(), w.float()), wide * 2),
    "to fp64": lambda x, w, b: (F.linear(x.double(), w.float().double()),),
}
MISSES: dict[str, tuple[Wide, str]] = {
    "weight is read again": (
        lambda x, w, b: (F.linear(x.float(), wide := w.float()), wide + 1),
        "others read the widened weight too",
    ),
    "x is wide": (lambda x, w, b: (F.linear(x.float() + 1, w.float()),), "only the weight is widened"),
    "types": (lambda x, w, b: (F.linear(x.half().float(), w.float()),), "x is torch.float16, the weight"),
}
SILENT: dict[str, Wide] = {
    "turned over twice": lambda x, w, b: (x.float() @ (turned := w.float().t()), turned + 1),
    "not turned over": lambda x, w, b: (x.float()[..., :5] @ w.float(),),
    "no casts": lambda x, w, b: (F.linear(x, w, b),),
    "narrowed": lambda x, w, b: (F.linear(x.float().half(), (w.float() + 1).half()),),
}


class Small(nn.Module):
    """f(x, weight, bias)."""

    def __init__(self, function: Wide) -> None:
        super().__init__()
        self.function = function
        gen = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(5, 36, generator=gen).bfloat16())
        self.bias = nn.Parameter(torch.randn(5, generator=gen).bfloat16())

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.function(x, self.weight, self.bias)


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.randn(batch, count, 36, generator=torch.Generator().manual_seed(count)).bfloat16()


def passed(function: Wide) -> tuple[Small, Program, Program, list[Record]]:
    module = Small(function)
    before = program_of(module, {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, x=tokens(7, 3))
    after, records = go_on(before, FuseLinearCasts(), FuseLinearCasts())
    return module, before, after, records


@pytest.mark.parametrize("name", HITS)
def test_the_numbers_are_the_same(name: str) -> None:
    module, _, after, records = passed(HITS[name])
    assert [r.count("applied") for r in records] == [1, 0]
    nodes = list(after.blocks["prefix"].graph.nodes)
    (wide,) = [n for n in nodes if is_op(n, WIDE_LINEAR.overload)]
    casts = sum("to" in target_name(n) for n in nodes)
    assert casts == ("again" in name)
    for given in (tokens(7, 3), tokens(1), tokens(0)):
        for got, want in zip(run(after, x=given), module(given), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    assert wide.meta["val"].dtype == (torch.float64 if name == "to fp64" else torch.float32)


@pytest.mark.parametrize("name", MISSES)
def test_near_misses(name: str) -> None:
    function, reason = MISSES[name]
    _, before, after, records = passed(function)
    assert records[0].count("applied") == 0
    assert [reason in r for r in reasons(records[0])] == [True]
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


@pytest.mark.parametrize("name", SILENT)
def test_other_linears_are_no_candidates(name: str) -> None:
    _, _, _, records = passed(SILENT[name])
    assert not records[0].remarks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routers(dtype: torch.dtype) -> None:
    """A model in fp32 has no casts to fuse."""
    model, before = canonical("deepseek_v3", dtype)
    after, records = go_on(before, FuseLinearCasts())
    sparse = [b for b in before.blocks if "topk" in str(before.blocks[b].graph)]
    assert len(sparse) == 1
    assert counts(records[0]) == (dict.fromkeys(sparse, 1) if dtype == torch.bfloat16 else {})
    if dtype == torch.float32:
        check_equal(after, model)


def test_where_linears_have_kernels_the_casts_come_back() -> None:
    module, _, after, _ = passed(HITS["bias"])
    lowered, _ = go_on(replace(after, facts=after.facts | {Fact.CACHED}), SelectKernels())
    names = [target_name(n) for n in lowered.blocks["prefix"].graph.nodes if n.op == "call_function"]
    assert names == ["aten._to_copy"] * 3 + ["aten.linear"]
    given = tokens(3)
    assert torch.equal(run(lowered, x=given)[0], module(given)[0])


def test_bisection_caps_the_pass() -> None:
    program = program_of(Small(HITS["router"]), x=tokens(5))
    _, records = go_on(program, FuseLinearCasts(), limits={"fuse-linear-casts": 0})
    assert records[0].count("applied") == 0


def test_golden() -> None:
    _, before, after, _ = passed(HITS["x is read again"])
    check_golden("fuse_linear_casts", before_and_after(before, after, "prefix"))
