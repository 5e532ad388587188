"""What random programs once found wrong in the backend, one small function each; Inductor would get these graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepinfer_compile.backend import counters
from tests.property.checking import Report, call, differences, eager_door


class Held(nn.Module):
    """A function of the module and its arguments, with a weight, a buffer and a number to use."""

    buffer: Tensor

    def __init__(self, function: Callable[..., Any], eps: float = 1e-5) -> None:
        super().__init__()
        self.function, self.eps = function, eps
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 8), requires_grad=False)
        self.register_buffer("buffer", torch.arange(12.0).view(3, 4))

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def same(function: Callable[..., Any], *calls: tuple[Any, ...], dynamic: bool | None = None) -> Report:
    """Each call gives what eager gives, to the last stride and byte of memory."""
    torch._dynamo.reset()
    report, module = Report(), Held(function)
    ours, our_calls = copy.deepcopy((module, calls))
    run = torch.compile(ours, backend=eager_door(report), dynamic=dynamic, fullgraph=True)
    for theirs, mine in zip(calls, our_calls):
        names = [f"argument {i}" for i in range(len(theirs))]
        want = call(lambda **kw: module(*kw.values()), module, dict(zip(names, theirs)))
        got = call(lambda **kw: run(*kw.values()), ours, dict(zip(names, mine)))
        assert not list(differences(want, got, exact=not report.rewritten))
    return report


def raised(report: Report) -> list[dict[str, int]]:
    """The dialect ops of every graph; none may have been left."""
    assert not report.left
    return [p.ran for p in report.prepared]


def x(*shape: int) -> Tensor:
    """Random values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


COPIES: dict[str, Callable[..., Any]] = {
    "clone": lambda m, a: a.clone(),
    "clone beside it": lambda m, a: (a, a.clone()),
    "two copies of one value": lambda m, a: (lambda y: (y, y.clone(), y.contiguous()))(a + 1),
    "contiguous": lambda m, a: (a.contiguous(), a.t().contiguous()),
    "cast to its own dtype": lambda m, a: (a.float(), a.to(torch.float32, copy=True)),
    "detached": lambda m, a: a.detach(),
    "views": lambda m, a: (a[1:], a.t(), a.view_as(a), a[0].unsqueeze(0)),
    "copied, then written": lambda m, a: (a.clone(), a.add_(1))[0],
    "swapped": lambda m, a: (lambda old: (a.copy_(m.buffer), m.buffer.copy_(old))[0])(a.clone()),
}
VIEWS_OF_WRITTEN: dict[str, Callable[..., Any]] = {
    "written, and a view of it": lambda m, a: (a.mul_(2), a[1:], a.t())[1:],
    "a written buffer and its view": lambda m, a: (m.buffer.add_(a), m.buffer, m.buffer[:, 1:])[1:],
    "a view that is written": lambda m, a: (lambda v: (v.mul_(2), v))(a[1:])[1],
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("layout", ["plain", "turned", "inside", "stepped"])
def test_memory_is_shared_as_in_eager(name: str, layout: str) -> None:
    lay = {"plain": x(3, 4), "turned": x(4, 3).t(), "inside": x(5, 4)[1:-1], "stepped": x(3, 8)[:, ::2]}
    raised(same(COPIES[name], (lay[layout],), (lay[layout],)))


@pytest.mark.parametrize("name", VIEWS_OF_WRITTEN)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_view_of_a_written_input_is_left(name: str, dynamic: bool | None) -> None:
    calls = (x(6, 4).t()[1:],), (x(8, 4).t()[1:],)
    if "buffer" in name:
        calls = (x(3, 4),), (x(3, 4),)
    reasons = same(VIEWS_OF_WRITTEN[name], *calls, dynamic=dynamic).left
    assert reasons
    assert all(r.endswith("it returns a view of an input that it writes to") for r in reasons)


def test_strides_survive_rewrites() -> None:
    """rms_norm of ours gives rows in order; torch's keeps the order of what it was given."""
    report = same(lambda m, a: F.rms_norm(a, (8,), m.weight, 1e-5), (x(3, 8, 2).transpose(1, 2),), dynamic=False)
    assert raised(report) == [{"rms_norm": 1}]


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_of_what_a_rewrite_moved(dynamic: bool) -> None:
    """The norm is copied into the order that eager has; what else looks into it looks into the copy."""

    def norm(m: Held, a: Tensor) -> Any:
        y = F.rms_norm(a, (8,), m.weight, 1e-5)
        return y, y[None], y[1:].transpose(0, 1), y

    given, other = x(3, 8, 2).transpose(1, 2), x(4, 8, 3).transpose(1, 2)
    for p in raised(same(norm, (given,), (other,), dynamic=dynamic)):
        assert p == {"rms_norm": 1}
    assert raised(same(lambda m, a: (lambda y: (y, y[..., None]))(a.clone()), (x(1, 4).expand(3, 4),))) == [{}]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_that_was_written_through(dynamic: bool) -> None:
    """Functional, the view is no view any more of what it was written to."""

    def attend(m: Held, a: Tensor) -> Any:
        parts = F.linear(a, m.weight.repeat(10)[:, None].expand(80, 24)).split([48, 16, 16], -1)
        q, k, v = (p.view(*a.shape[:2], -1, 8).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        rows = y.unfold(-1, 2, 2)
        twice = y * 2
        rows.mul_(2)
        return twice, y, rows

    for p in raised(same(attend, (x(2, 5, 24),), (x(4, 7, 24),), dynamic=dynamic)):
        assert p == {"attention": 1}


def test_a_part_of_memory_and_all_of_it() -> None:
    def norm(m: Held, a: Tensor) -> Any:
        y = F.rms_norm(a, (8,), m.weight, 1e-5)
        return y[1:], y

    (left,) = same(norm, (x(3, 8, 2).transpose(1, 2),)).left
    assert left.endswith("an output shares memory in a way that the raised graph does not keep")


@pytest.mark.parametrize("ambient", [False, True])
def test_autocast_is_left(ambient: bool) -> None:
    def inside(m: Held, a: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return a @ a.t()

    with torch.autocast("cpu", torch.bfloat16, enabled=ambient):
        report = same((lambda m, a: a @ a.t()) if ambient else inside, (x(3, 4),))
    said = "autocast is on" if ambient else "it calls _enter_autocast midway"
    assert report.left == [f"the graph cannot be made functional: {said}"]


def test_gradient_switches() -> None:
    """They matter only where something requires a gradient."""

    def switched(m: Held, a: Tensor) -> Tensor:
        with torch.no_grad():
            y = a * 2
        return y * m.weight

    raised(same(switched, (x(3, 8),)))
    with torch.no_grad():

        def learned(m: Held, a: Tensor) -> Tensor:
            with torch.enable_grad():
                return a * m.weight.detach().requires_grad_()

        assert same(lambda m, a: a * 2, (x(3, 8).requires_grad_(),)).left == []
        with pytest.raises(torch._dynamo.exc.Unsupported):
            same(learned, (x(3, 8),))


def test_constants_are_part_of_the_graph() -> None:
    table = [[0.5, 1.0, 2.0, 4.0]]
    report = same(lambda m, a: (a * torch.tensor(table), torch.tensor(3), torch.tensor([1, 2])), (x(3, 4),))
    assert raised(report) == [{}]
    assert not list(report.prepared[0].gm.buffers())


def test_floats_of_a_module_are_read() -> None:
    """dynamic=True makes every Python float symbolic; eps is needed as a number."""

    def norm(m: Held, a: Tensor, scale: float) -> Tensor:
        return a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + m.eps) * m.weight * scale

    report = same(norm, (x(3, 8), 0.5), (x(4, 8), 0.25), (x(5, 8), 1.5), dynamic=True)
    assert raised(report) == [{"rms_norm": 1}]


def test_default_floats_are_read() -> None:
    def norm(m: Held, a: Tensor) -> Tensor:
        def root(y: Tensor, eps: float = 1e-5) -> Tensor:
            return torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)

        return a * root(a) * m.weight

    assert raised(same(norm, (x(3, 8),), dynamic=True)) == [{"rms_norm": 1}]


def test_heads_of_unknown_number() -> None:
    report = same(lambda m, q: F.scaled_dot_product_attention(q, q, q), (x(2, 3, 5, 8),), dynamic=True)
    assert raised(report) == [{"attention": 1}]


def test_an_attention_scale_that_is_an_argument() -> None:
    def attend(m: Held, q: Tensor, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, scale=scale)

    report = same(attend, (x(2, 3, 5, 8), 0.5), (x(2, 3, 7, 8), 0.25), dynamic=True)
    assert all(p.ran == {"attention": 1} for p in report.prepared)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda m, a: torch.vmap(lambda row: row * 2)(a), "it calls _vmap_increment_nesting midway"),
        (lambda m, a: torch.func.grad(lambda y: (y * y).sum())(a), "it calls _grad_increment_nesting midway"),
        (lambda m, a: a.as_strided((2, 2), (1, 2)) + 1, "as_strided reads memory"),
        (
            lambda m, a: torch.cond(a.sum() > 0, lambda y: y + 1, lambda y: y - 1, (a,)),
            "it calls cond, an operation on operations",
        ),
    ],
)
def test_what_is_left_runs_as_it_is(function: Callable[..., Any], reason: str) -> None:
    report = same(function, (x(3, 4),))
    assert len(report.left) == 1
    assert reason in report.left[0]
    raised(same(lambda m, a: a + 1, (x(3, 4),)))  # and what was begun there is over


def test_a_written_input_whose_rows_are_one_row() -> None:
    (left,) = same(lambda m, a: a.fill_(2.0) + 1, (x(1, 4).expand(3, 4),)).left
    assert left.endswith("it writes to an input whose elements share memory")


def test_two_inputs_in_one_memory() -> None:
    base = x(4, 4)
    (left,) = same(lambda m, a, b: (a.add_(1), b * 2)[1], (base, base.t())).left
    assert left.endswith("two inputs share memory")
    raised(same(lambda m, a, b: (a.add_(1), b * 2)[1], (base, base)))  # one tensor twice is one input


def test_outputs_that_are_no_tensors() -> None:
    raised(same(lambda m, a: (a.shape[0] * 2, None, 3.5, a + 1, "word"), (x(3, 4),), (x(5, 4),), dynamic=True))
    raised(same(lambda m, a: (a.unsqueeze(0).shape[0], a.t().contiguous()), (x(3, 4),)))


def test_no_inputs_and_numbers_as_inputs() -> None:
    raised(same(lambda m: torch.arange(5) + 1, ()))
    raised(same(lambda m, n: torch.arange(n) + n, (5,), (7,), (9,)))


def test_no_elements_beside_an_unknown_size() -> None:
    raised(same(lambda m, a: a.reshape(a.shape[0], 0, 8), (x(3, 0, 4),), (x(5, 0, 4),), dynamic=True))


def test_a_value_written_in_place_is_still_a_pattern() -> None:
    """Functionalization makes its views again after the write: one reshape is one node."""

    def turned(m: Held, a: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        p, q = a.unflatten(-1, (-1, 2)).unbind(-1)
        y = torch.stack((p * cos - q * sin, p * sin + q * cos), dim=-1).flatten(-2)
        y.view(-1)[0] = 0.0
        return y

    assert raised(same(turned, (x(3, 8), x(3, 4), x(3, 4)))) == [{"rope": 1}]


@torch.library.custom_op("deepinfer_tests::doubled", mutates_args=())
def doubled(a: Tensor) -> Tensor:
    """A functional operation of another package."""
    return a * 2


@doubled.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


@torch.library.custom_op("other_tests::double_", mutates_args=("a",))
def double_(a: Tensor) -> None:
    """One that writes."""
    a.mul_(2)


@torch.library.custom_op("other_tests::halved", mutates_args=())
def halved(a: Tensor) -> Tensor:
    """A functional operation of a namespace that no bundle may hold."""
    return a / 2


@halved.register_fake
def _(a: Tensor) -> Tensor:
    return torch.empty_like(a)


def test_operations_of_other_packages() -> None:
    def norm(m: Held, a: Tensor) -> Tensor:
        y = F.rms_norm(halved(a).contiguous(), (8,), m.weight, 1e-5)
        return doubled(y)

    assert raised(same(norm, (x(3, 8),))) == [{"rms_norm": 1}]
    (left,) = same(lambda m, a: (double_(a), a + 1)[1], (x(3, 8),)).left
    assert "it calls auto_functionalized" in left


def test_a_failing_pass_is_a_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left because of a fault of ours is said aloud, and the result is still right."""
    from deepinfer_compile.passes.canonicalize import Canonicalize

    def broken(self: Any, gm: Any, ctx: Any) -> None:
        raise KeyError("no such node")

    monkeypatch.setattr(Canonicalize, "run", broken)
    counters.clear()
    (left,) = same(lambda m, a: a + 1, (x(3, 4),)).left
    assert "pass 'canonicalize' failed" in left
    assert counters == {f"left: {left}": 1}
    assert [r.levelname for r in caplog.records if r.name == "deepinfer_compile.backend"] == ["WARNING"]
