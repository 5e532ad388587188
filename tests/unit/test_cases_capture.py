"""Capture and graph passes against public bug reports, through torch.compile: each test names the case."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from deepinfer_compile.backend import Prepared, deepinfer, prepare
from deepinfer_compile.graph import is_op
from tests.passes.test_raise_rope import DIM, ComplexTurn, angles, reference

A = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def compiled(module: Any, seen: list[Prepared] | None = None, **options: Any) -> Any:
    """Through the backend; with `seen`, without Inductor and keeping what it would have got."""
    if seen is None:
        return torch.compile(module, backend=deepinfer, fullgraph=True, **options)

    def door(gm: GraphModule, example_inputs: Any) -> Any:
        seen.append(prepare(gm))
        return seen[-1].gm

    return torch.compile(module, backend=door, fullgraph=True, **options)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("dynamic", [None, True])
def test_cap_1_every_batch_after_a_first_of_one(dynamic: bool | None) -> None:
    linear = nn.Linear(4, 4)
    run = compiled(linear, dynamic=dynamic)
    with torch.no_grad():
        for batch in (1, 2, 5, 64):
            given = drawn(batch, 4)
            assert torch.allclose(run(given), linear(given), rtol=0, atol=1e-6)


def test_cap_1_decoding_and_then_longer_sequences() -> None:
    seen: list[Prepared] = []
    norm = nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4))
    run = compiled(norm, seen)
    with torch.no_grad():
        for length in (1, 2, 9, 128, 1):
            given = drawn(3, length, 4)
            assert torch.allclose(run(given), norm(given), rtol=0, atol=1e-6)
    assert [p.ran for p in seen] == [{"rms_norm": 1}, {"rms_norm": 1}]
    assert [p.left for p in seen] == ["", ""]


def test_cap_1_a_declared_dimension_of_one_is_an_error_that_names_it() -> None:
    given = drawn(1, 4)
    torch._dynamo.mark_dynamic(given, 0, min=1, max=64)
    with torch.no_grad(), pytest.raises(Exception, match=r"Constraints violated \(L.*size\(\)\[0\]"):
        compiled(nn.Linear(4, 4))(given)


class Named(nn.Module):
    """forward(x, y, flag): two linears of one shape, so that a swap shows in the values alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor, y: Tensor, flag: bool = True) -> Tensor:
        return self.a(x) + self.b(y) if flag else self.a(x) - 2 * self.b(y)


def test_cap_3_arguments_go_by_name() -> None:
    module = Named()
    run = compiled(module)
    x, y = drawn(2, 3), drawn(5, 3)[:2]
    given = {"x": x, "y": y, "flag": False}
    with torch.no_grad():
        want = module(x, y, False)
        assert torch.allclose(run(x, y=y, flag=False), want, atol=1e-6)
        for order in itertools.permutations(given):
            assert torch.allclose(run(**{name: given[name] for name in order}), want, atol=1e-6)
        assert torch.allclose(run(x, y), module(x, y, True), atol=1e-6)
        assert torch.allclose(run(y=y, x=x), module(x, y, True), atol=1e-6)
        for wrong, name in (({"x": x, "z": y}, "z"), ({"x": x}, "y")):
            with pytest.raises(Exception, match=name):
                run(**wrong)
        with pytest.raises(Exception, match="multiple values"):
            run(x, y, x=x)


def test_cap_3_keys_of_a_nested_dict() -> None:
    class Nested(Named):
        def forward(self, given: dict[str, Tensor]) -> Tensor:
            return self.a(given["a"]) - 2 * self.b(given["b"])

    module, seen = Nested(), list[Prepared]()
    run = compiled(module, seen)
    x, y = drawn(2, 3), drawn(5, 3)[:2]
    with torch.no_grad():
        for given in ({"b": y, "a": x}, {"a": x, "b": y}, {"a": y, "b": x}):
            assert torch.equal(run(given), module(given))
    assert not any(p.left for p in seen)


@torch.library.custom_op("deepinfer_cases::triple_", mutates_args=("x",))
def triple_(x: Tensor) -> None:
    """An in-place operation of somebody else."""
    x.mul_(3.0)


def ignored_product(x: Tensor, cache: Tensor) -> Tensor:
    x.mul_(3.0)
    return x


def ignored_sum(x: Tensor, cache: Tensor) -> Tensor:
    x.add_(cache[1])
    return x


def ignored_index_add(x: Tensor, cache: Tensor) -> Tensor:
    cache.index_add_(0, torch.tensor([0, 2, 0]), x[None].expand(3, -1))
    return cache


def ignored_copy(x: Tensor, cache: Tensor) -> Tensor:
    y = x + 1
    cache[0].copy_(y)
    return y


def ignored_custom(x: Tensor, cache: Tensor) -> Tensor:
    triple_(x)
    return x


IGNORED = (ignored_product, ignored_sum, ignored_index_add, ignored_copy, ignored_custom)


@pytest.mark.parametrize("function", IGNORED)
@pytest.mark.parametrize("inductor", [False, True])
def test_cap_4_work_whose_result_is_ignored(function: Callable[..., Tensor], inductor: bool) -> None:
    for size in (1, 3):
        given = [torch.full((size,), 2.0), drawn(3, size)]
        ours = copy.deepcopy(given)
        run = compiled(function, None if inductor else [])
        with torch.no_grad():
            want, got = function(*given), run(*ours)
        assert torch.equal(want, got)
        assert all(map(torch.equal, given, ours))
    if function in (ignored_product, ignored_custom):
        assert torch.equal(got, torch.full((3,), 6.0))


class Rows(nn.Module):
    """A buffer whose rows are written; `form` says what else happens to it."""

    c: Tensor

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.register_buffer("c", torch.zeros(4, 2))

    def forward(self, x: Tensor, i: Tensor) -> Tensor:
        if self.form == "two views":
            upper, lower = self.c[:2], self.c[2:]
            upper.add_(x[0, 0])
            torch._dynamo.graph_break()
            lower.copy_(upper * 2)
            return self.c.clone()
        self.c.index_copy_(0, i, x)
        return self.c if self.form == "returned" else x + self.c.sum()


@pytest.mark.parametrize("form", ["returned", "kept", "two views"])
def test_cap_5_a_buffer_that_is_written(form: str) -> None:
    module, other = Rows(form), Rows(form)
    want = copy.deepcopy(module)
    run, apart = (torch.compile(m, backend=deepinfer) for m in (module, other))
    calls = [(1.0, 1), (7.0, 0), (9.0, 3), *((float(n), n % 4) for n in range(7))]
    with torch.no_grad():
        for at, (number, row) in enumerate(calls):
            given = torch.full((1, 2), number), torch.tensor([row])
            assert torch.equal(run(*given), want(*given))
            assert torch.equal(module.c, want.c)
            if at == 2 and form != "two views":
                assert module.c[:, 0].tolist() == [7.0, 1.0, 0.0, 9.0]
        apart(torch.ones(1, 2), torch.tensor([2]))
        fresh = Rows(form)
        fresh(torch.ones(1, 2), torch.tensor([2]))
    assert torch.equal(other.c, fresh.c)


class Sites(nn.Module):
    """[B * S, H] to [B, S, H], plus a residual, then RMSNorm, four times."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, flat: Tensor, residual: Tensor) -> Tensor:
        for _ in range(4):
            h = flat.reshape(residual.shape) + residual
            h = h.transpose(0, 1).contiguous().transpose(0, 1) if self.form == "contiguous" else h
            dims = (1, -1) if self.form == "other dimension" else (-1,)
            h = h * torch.rsqrt(h.pow(2).mean(dims, keepdim=True) + 1e-5) * self.weight
            flat = h.reshape(-1, 8)
        return h


@pytest.mark.parametrize(("form", "found"), [("plain", 4), ("contiguous", 4), ("other dimension", 0)])
def test_cap_7_rewrites_hold_no_example_size(form: str, found: int) -> None:
    module, seen = Sites(form), list[Prepared]()
    run = compiled(module, seen, dynamic=True)
    with torch.no_grad():
        for batch, length in ((2, 3), (5, 2), (3, 4), (5, 1), (1, 4)):
            given = drawn(batch * length, 8), drawn(batch, length, 8)
            torch._dynamo.mark_static(given[0], 1)
            torch._dynamo.mark_static(given[1], 2)
            assert torch.allclose(run(*given), module(*given), rtol=0, atol=1e-6)
    dynamic = seen[0]
    assert sum(dynamic.ran.values()) == found
    (record,) = (r for r in dynamic.records if r.name == "raise-rms-norm")
    assert (record.count("applied"), record.count("missed")) == (found, 4 - found)
    reshapes = [n for n in dynamic.gm.graph.nodes if is_op(n, A.reshape.default, A.view.default, A.expand.default)]
    assert reshapes
    assert not {2, 3, 6} & {d for n in reshapes for d in n.args[1] if not isinstance(d, Node)}


POSITIONS = (0, 1, 2047, 131071)


@pytest.mark.parametrize("inductor", [False, True])
@pytest.mark.parametrize(
    ("positions", "dtype", "stride"),
    [
        ((0, 1, 2), torch.float32, 1),
        (POSITIONS, torch.bfloat16, 1),
        (POSITIONS, torch.float32, 2),
        ((), torch.float32, 1),
    ],
)
def test_cap_8_complex_rotary(positions: tuple[int, ...], dtype: torch.dtype, stride: int, inductor: bool) -> None:
    at = torch.tensor(positions, dtype=torch.int64)
    x = drawn(2, len(at), 4, DIM * stride).to(dtype)[..., :DIM]
    seen: list[Prepared] = []
    with torch.no_grad():
        got = compiled(ComplexTurn(at), None if inductor else seen)(x)
    want = reference(x.transpose(1, 2), angles(at)).transpose(1, 2)
    assert got.dtype == dtype
    assert got.shape == x.shape
    assert torch.allclose(got.double(), want, rtol=0, atol=1e-6 if dtype == torch.float32 else 2.0**-8 * 4)
    assert all(p.ran == {"rope": 1, "complex_rope_table": 1} for p in seen)


@pytest.mark.filterwarnings("ignore:Casting complex values:UserWarning", "ignore:Complex modules:UserWarning")
def test_cap_8_a_table_cast_to_a_real_dtype_is_not_rewritten() -> None:
    """torch drops the imaginary part with a warning; eager's result stays, and the reason is said."""
    module = ComplexTurn(torch.arange(3)).to(torch.bfloat16)
    x, seen = drawn(2, 3, 4, DIM).to(torch.bfloat16), list[Prepared]()
    with torch.no_grad():
        assert torch.equal(compiled(module, seen)(x), module(x))
    assert "has dropped its imaginary part" in seen[0].left
