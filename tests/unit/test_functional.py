"""The backend's outputs lie in memory as eager's do: copies that a pass may drop come back, aliases stay aliases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_compile.backend import counters, deepinfer


def copied(x: Tensor) -> Any:
    return x.clone()


def copied_before_a_write(x: Tensor) -> Any:
    y = x.clone()
    x.add_(1)
    return y


def dense(x: Tensor) -> Any:
    return x.transpose(0, 1).contiguous()


def turned(x: Tensor) -> Any:
    return (x + 1).transpose(0, 1), (x * 2).transpose(0, 1).clone()


def two_of_one(x: Tensor) -> Any:
    y = x + 1
    return y, y.clone()


def views(x: Tensor) -> Any:
    return x, x.view(-1), x.clone(), x.t()


def views_of_a_copy(x: Tensor) -> Any:
    y = x.clone()
    return y, y[..., None], y[:, 1:].t(), y


def written(x: Tensor) -> Any:
    x[0].mul_(3)
    return x, x[0] * 2


def written_view(x: Tensor) -> Any:
    x.add_(1)
    return x.view(-1)


def memory(inputs: list[Tensor], results: list[Tensor]) -> list[list[bool]]:
    every = [t.untyped_storage().data_ptr() for t in (*inputs, *results)]
    return [[a == b for b in every] for a in every]


@pytest.mark.parametrize(
    ("function", "left"),
    [
        *(
            (f, False)
            for f in (copied, copied_before_a_write, dense, turned, two_of_one, views, views_of_a_copy, written)
        ),
        (written_view, True),
    ],
)
@pytest.mark.parametrize("shape", [(3, 4), (1, 5)])
def test_values_strides_and_memory(function: Callable[..., Any], left: bool, shape: tuple[int, int]) -> None:
    torch._dynamo.reset()
    counters.clear()
    want = torch.randn(shape)
    got = want.clone()
    compiled = torch.compile(function, backend=deepinfer)
    for _ in range(2):
        with torch.no_grad():
            expected, found = function(want), compiled(got)
        first = list(expected) if isinstance(expected, tuple) else [expected]
        second = list(found) if isinstance(found, tuple) else [found]
        assert torch.equal(want, got)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert [t.stride() for t in first] == [t.stride() for t in second]
        assert memory([want], first) == memory([got], second)
    assert any(reason.startswith("left") for reason in counters) == left
