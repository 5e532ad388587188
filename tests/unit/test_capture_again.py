"""A trace in which operators that were met before are not worked out again is the trace of torch alone."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from deepinfer_compile.capture import again, capture
from deepinfer_compile.capture.again import met_again
from deepinfer_compile.graph import to_text, value
from deepinfer_compile.models import own
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from
from tests import v41
from tests.plain_model import VOCAB, make_plain

LAYERS = 4
proxy_tensor: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")


class Layer(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x * self.weight)


class Stack(nn.Module):
    """Layers that do the same to x [1, T, 6]."""

    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(run) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often torch works out each operator."""
    met: Counter[str] = Counter()
    whole = proxy_tensor.proxy_call

    def call(mode: Any, func: Any, *rest: Any) -> Any:
        met[str(func)] += 1
        return whole(mode, func, *rest)

    proxy_tensor.proxy_call = call
    try:
        yield met
    finally:
        proxy_tensor.proxy_call = whole


def exported(model: nn.Module, reuse: bool) -> Any:
    x = torch.rand(1, 7, 6, dtype=torch.float64)
    shapes = ({1: torch.export.Dim("length", min=1, max=512)},)
    trace = partial(torch.export.export, model.eval(), (x,), dynamic_shapes=shapes, strict=False)
    with torch.no_grad():
        return met_again(trace) if reuse else trace()


def shown(node: Node, numbers: dict[Node, int]) -> Any:
    """All that a compiler reads of a node; a size by what it is, as any tensor that has it may give it."""
    args = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: numbers.get(n, str(value(n))))
    val = value(node)
    vals = val if isinstance(val, (tuple, list)) else (val,)
    forms = [again.form_of(v) if type(v) is FakeTensor else v for v in vals]
    place = [(path, kind) for path, kind in (node.meta.get("nn_module_stack") or {}).values()]
    stack = re.sub(r"_key>\.\d+", "", node.meta.get("stack_trace") or "")
    return node.op, str(node.target), str(args), str(forms), place, stack


def parts(program: Any) -> list[Any]:
    """Its nodes in order, without those of sizes, which are made where first asked for."""
    nodes = [n for n in program.graph.nodes if not isinstance(value(n), torch.SymInt)]
    numbers = {n: i for i, n in enumerate(nodes)}
    return [shown(n, numbers) for n in nodes]


def sized(x: Tensor) -> Tensor:
    rows, width = x.shape[1], x.stride(1)
    y = x + x.numel() // (rows * width)
    return (y.reshape(2 * rows, 3).view(1, rows, -1) + y.new_ones(rows + 1, 6)[:rows]) / (x.shape[1] + 2)


def unchanged(x: Tensor) -> Tensor:
    y = x.double().type_as(x).contiguous().to(x.dtype)
    z = y.to(torch.float64) + x.type_as(y)
    return (z.reshape(1, -1, 6) + z.expand(1, -1, 6)).tanh()


def several(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    best, where = torch.cat([b, a], -1).topk(3, -1)
    both = torch.stack((a, a, b), -1).flatten(-2).split([6, 3], -1)
    return torch.cat((best, x.gather(-1, where).masked_fill(best < 0, 0.5)), -1) + both[0]


def numbers(x: Tensor) -> Tensor:
    table = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], dtype=torch.float64)
    return (x * (table * 2) + torch.arange(x.shape[1]).unsqueeze(-1) * 1e-3).to(torch.float32).double() + True


def written(x: Tensor) -> Tensor:
    y = x + 1
    y.mul_(0.5)
    y.unsqueeze_(0)
    z = y + 1
    z[..., :2].add_(1)
    y.squeeze_(0)
    return (z + y).squeeze(0).clamp(-3, 3)


def transformed(x: Tensor) -> Tensor:
    scaled: Tensor = torch.vmap(lambda row: row * 2 + row.sum())(x[0])
    return scaled[None] + 1


def with_gradients(x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = (x * 2).tanh()
    return y + x * 2


def autocast(x: Tensor) -> Tensor:
    y = x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = F.linear(y, y[0, :1].expand(6, 6))
    return (z.double() + F.linear(y, y[0, :1].expand(6, 6)).double()).tanh()


CASES = {c.__name__: c for c in (sized, unchanged, several, numbers, written, transformed, with_gradients, autocast)}


@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_that_of_torch(name: str) -> None:
    model = Stack(CASES[name]).requires_grad_(False)
    plain, reused = exported(model, reuse=False), exported(model, reuse=True)
    assert parts(reused) == parts(plain)
    functional = [p.run_decompositions({}) for p in (reused, plain)]
    assert parts(functional[0]) == parts(functional[1])
    for length in (1, 2, 13):
        x = torch.rand(1, length, 6, dtype=torch.float64)
        torch.testing.assert_close(reused.module()(x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["sized", "unchanged", "several"])
def test_an_operator_is_worked_out_once(name: str) -> None:
    model = Stack(CASES[name]).requires_grad_(False)
    with counted() as met:
        exported(model, reuse=False)
    with counted() as left:
        exported(model, reuse=True)
    assert left.total() < met.total() / 2
    assert set(left) == set(met)


@pytest.mark.parametrize(
    ("run", "name"),
    [
        (lambda x: F.dropout(x, 0.5, True) + torch.rand_like(x), "aten.rand_like.default"),
        (lambda x: x.clone().mul_(2), "aten.mul_.Tensor"),
        (lambda x: x * torch.tensor(3.0), "aten.lift_fresh.default"),
    ],
    ids=["random", "writes", "constants"],
)
def test_what_is_unusual_is_worked_out_every_time(run: Callable[[Tensor], Tensor], name: str) -> None:
    with counted() as met:
        exported(Stack(run).requires_grad_(False), reuse=True)
    assert met[name] == LAYERS


def test_gradients_are_left_to_torch() -> None:
    model = Stack(several)
    x = torch.rand(1, 7, 6, dtype=torch.float64)
    with counted() as met:
        program = met_again(partial(torch.export.export, model, (x,), strict=False))
    assert met["aten.stack.default"] == LAYERS
    assert torch.equal(program.module()(x), model(x))


def test_a_torch_that_lacks_something_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(proxy_tensor, "_ProxyTensor")
    assert again._Torch.found() is None
    with counted():
        before = proxy_tensor.proxy_call
        assert met_again(lambda: proxy_tensor.proxy_call) is before


def test_a_torch_that_has_changed_does_it_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack(several).requires_grad_(False)
    found = again._Torch.found()
    assert found is not None
    monkeypatch.setattr(again._Torch, "found", staticmethod(lambda: replace(found, track=lambda tensor: None)))
    assert parts(exported(model, reuse=True)) == parts(exported(model, reuse=False))


def test_errors_of_a_model_are_its_own() -> None:
    runs = []

    def wrong(x: Tensor) -> Tensor:
        runs.append(x)
        return cast(Tensor, cast(Any, x).no_such_thing())

    with pytest.raises(AttributeError, match="no_such_thing"):
        exported(Stack(wrong), reuse=True)
    assert len(runs) == 1


def texts(program: Program) -> list[str]:
    return [to_text(program.skeleton), *[f"{name}: {to_text(gm)}" for name, gm in program.blocks.items()]]


@pytest.mark.parametrize("form", ["plain", "shared rows"])
def test_a_program_is_the_same_with_and_without(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_plain("loop") if form == "plain" else v41.make(torch.float64, hc_sinkhorn_iters=2)
    reused = capture(model, trim=False)
    monkeypatch.setattr(again._Torch, "found", staticmethod(lambda: None))
    assert texts(reused) == texts(capture(model, trim=False))
    ids = torch.randint(0, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "position_ids": torch.arange(9)[None]}
    wanted = {n.name for n in reused.inputs()}
    got = reused.run({**bind(reused, weights_from(model)), **{k: v for k, v in inputs.items() if k in wanted}})
    torch.testing.assert_close(got, model(ids), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_few_operators_of_the_published_model_are_worked_out() -> None:
    """40 layers of 384 experts; torch alone works out 5592, and more with every layer that is traced."""
    with counted() as met:
        program = capture(own.deepseek_v41({"model_type": "deepseek_v41"}).model)
    assert len(program.info["traced_layers"]) == 10
    assert met.total() < 560


def test_few_operators_of_many_layers_are_worked_out() -> None:
    with counted() as few:
        capture(v41.make(hc_sinkhorn_iters=2))
    with counted() as many:
        capture(v41.make(hc_sinkhorn_iters=6))
    assert many.total() == few.total()
    assert many.total() < 500
