"""A sample of the random programs through torch.compile(backend="deepinfer") as users run it, Inductor included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch.fx import GraphModule

from deepinfer_compile.backend import counters, deepinfer
from tests.property.checking import Report, check
from tests.property.test_backend_programs import program_of

FAST = (6, 9, 13, 16, 18, 19, 22, 4, 7)
"""Small graphs with a norm, a rotation, an activation, attention, a router, what is nearly one or nothing in them."""
INDUCTORS_OWN = {
    111: "a flattened view of a written input that begins inside its memory",
    166: "a copy of a buffer that was written to lies in the buffer",
    183: "a flattened view of a written input with steps in it",
}
"""Programs that Inductor alone gets wrong: they are compared with Inductor in place of eager."""


def inductor_door(report: Report) -> Callable[..., Any]:
    """The backend itself."""

    def door(gm: GraphModule, example_inputs: Any) -> Any:
        return deepinfer(gm, example_inputs)

    return door


def run(seed: int) -> None:
    """Inductor forms products and sums in its own order and width, so nothing is equal to the bit."""
    counters.clear()
    check(program_of(seed), inductor_door, exact=False, reference="inductor" if seed in INDUCTORS_OWN else "")
    assert not [reason for reason in counters if reason.startswith("left: pass")]


@pytest.mark.parametrize("seed", FAST)
def test_programs(seed: int) -> None:
    run(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 25, 27, *range(100, 200)])
def test_more_programs(seed: int) -> None:
    run(seed)
