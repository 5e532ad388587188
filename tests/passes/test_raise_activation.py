"""Gated activations of every kind become one op with the same bits; the rest stays, with a reason."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim

from deepinfer_compile.graph import is_op
from deepinfer_compile.ops import GATED_ACT
from deepinfer_compile.passes.raise_activation import RaiseActivation
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import check_equal
from tests.passes.stages import before_and_after, canonical, counts, go_on, program_of, reasons, run

Act = Callable[[Tensor, Tensor], Tensor]
DENSE = {"llama", "qwen3", "gemma", "phi", "mistral"}
MIXED = {"glm4_moe", "deepseek_v2", "deepseek_v3"}
"""Architectures whose every layer has a dense MLP, or one of MLP and shared experts. The others have neither."""


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def unequal(gate: Tensor, up: Tensor) -> Tensor:
    return (up.clamp(-7, 7) + 1) * (gate * torch.sigmoid(gate * 1.702))


def halves(function: Act) -> Act:
    return lambda gate, up: function(*torch.cat([gate, up], -1).chunk(2, dim=-1))


def alternating(gate: Tensor, up: Tensor) -> Tensor:
    both = torch.stack([gate, up], -1).flatten(-2)
    return swiglu_oai(both[..., ::2], both[..., 1::2])


KINDS: list[tuple[Act, str, float, float]] = [
    (lambda g, u: F.silu(g) * u, "silu", 0.0, 0.0),
    (lambda g, u: u * F.silu(g), "silu", 0.0, 0.0),
    (lambda g, u: g * torch.sigmoid(g) * u, "silu", 0.0, 0.0),
    (lambda g, u: u * (torch.sigmoid(g) * g), "silu", 0.0, 0.0),
    (lambda g, u: F.gelu(g) * u, "gelu", 0.0, 0.0),
    (lambda g, u: F.gelu(g, approximate="tanh") * u, "gelu_tanh", 0.0, 0.0),
    (lambda g, u: F.relu(g) * u, "relu", 0.0, 0.0),
    (swiglu_oai, "swiglu_oai", 1.702, 7.0),
    (lambda g, u: swiglu_oai(g, u, 0.5, 2.0), "swiglu_oai", 0.5, 2.0),
    (lambda g, u: F.silu(g.clamp(max=3.0)) * u.clamp(-3.0, 3.0), "swiglu_clamp", 0.0, 3.0),
    (lambda g, u: F.silu(g.clamp_max(3.0)) * u.clamp_max(3.0).clamp_min(-3.0), "swiglu_clamp", 0.0, 3.0),
    (lambda g, u: F.silu(g.clamp(max=3.0)) * u.clamp(-2.0, 2.0), "silu", 0.0, 0.0),
    (lambda g, u: F.silu(g) * F.silu(u), "silu", 0.0, 0.0),
    (halves(lambda g, u: F.silu(g) * u), "silu", 0.0, 0.0),
    (halves(swiglu_oai), "swiglu_oai", 1.702, 7.0),
    (alternating, "swiglu_oai", 1.702, 7.0),
]
MISSES: dict[str, tuple[Act, str]] = {
    "not gated": (lambda g, u: F.silu(g) + u, "silu is not multiplied with a second value"),
    "squared": (lambda g, u: F.relu(g) * F.relu(g) + u, "the activation is multiplied with itself"),
    "broadcast": (lambda g, u: F.silu(g) * u[..., :1], "a value of another shape or dtype"),
    "other dtype": (lambda g, u: F.silu(g) * u.double(), "a value of another shape or dtype"),
    "quick gelu": (lambda g, u: g * torch.sigmoid(g * 1.702) * u, "no kind without `up + 1` and equal clamps"),
    "no clamps": (lambda g, u: (u + 1) * (g * torch.sigmoid(g * 1.702)), "no kind without `up + 1` and equal clamps"),
    "unequal clamps": (lambda g, u: unequal(g.clamp(max=6), u), "no kind without `up + 1` and equal clamps"),
}


class Acts(nn.Module):
    """Every f(gate, up): many cases are one trace."""

    def __init__(self, *functions: Act) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(gate, up) for f in self.functions)


def inputs(tokens: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Values beyond every clamp."""
    gen = torch.Generator().manual_seed(tokens)
    gate, up = (5 * torch.randn(2, tokens, 6, generator=gen) for _ in range(2))
    return {"gate": gate.to(dtype), "up": up.to(dtype)}


def dynamic() -> dict[str, dict[int, object]]:
    return {"gate": {1: Dim.AUTO}, "up": {1: Dim.AUTO}}


@pytest.mark.parametrize("name", models.CONFIGS)
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    after, records = go_on(before, RaiseActivation(), RaiseActivation())
    layers = [block for block in before.blocks if block.startswith("layer")]
    assert counts(records[0]) == (dict.fromkeys(layers, 1) if name in DENSE | MIXED else {})
    assert not reasons(records[0])
    assert records[1].count("applied") == 0
    check_equal(after, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kinds_keep_every_bit(dtype: torch.dtype) -> None:
    """All but the spelled silu, where sigmoid(g) was rounded before the product: two units in the last place."""
    module = Acts(*(k[0] for k in KINDS))
    before = program_of(module, dynamic(), **inputs(5, dtype))
    after, records = go_on(before, RaiseActivation(), RaiseActivation())
    assert [r.count("applied") for r in records] == [len(KINDS), 0]
    nodes = [n for n in after.blocks["prefix"].graph.nodes if is_op(n, GATED_ACT.overload)]
    assert [n.args[2:] for n in nodes] == [k[1:] for k in KINDS]
    for tokens in (5, 1, 0):
        given = inputs(tokens, dtype)
        for i, (got, want) in enumerate(zip(run(after, **given), module(**given))):
            rtol = 2 * torch.finfo(dtype).eps if i in (2, 3) else 0
            assert torch.allclose(got, want, rtol=rtol, atol=0), i


def test_clamps_are_part_of_the_op() -> None:
    after, _ = go_on(program_of(Acts(swiglu_oai), dynamic(), **inputs(5)), RaiseActivation())
    assert sum(n.op == "call_function" for n in after.blocks["prefix"].graph.nodes) == 1


def test_near_misses() -> None:
    module = Acts(*(f for f, _ in MISSES.values()))
    before = program_of(module, dynamic(), **inputs(5))
    after, records = go_on(before, RaiseActivation())
    assert records[0].count("applied") == 0
    # relu(g) * relu(g) holds two activations, and both are met
    wanted = [reason for _, reason in MISSES.values()]
    wanted.insert(1, wanted[1])
    assert [w in r for w, r in zip(wanted, reasons(records[0]), strict=True)] == [True] * len(wanted)
    assert before_and_after(before, before, "prefix") == before_and_after(before, after, "prefix")


def test_bisection_caps_the_pass() -> None:
    program = program_of(Acts(KINDS[0][0], KINDS[4][0]), **inputs(5))
    _, records = go_on(program, RaiseActivation(), limits={"raise-activation": 1})
    assert records[0].count("applied") == 1


def test_golden() -> None:
    before = program_of(Acts(KINDS[0][0], alternating), dynamic(), **inputs(5))
    after, _ = go_on(before, RaiseActivation())
    check_golden("raise_activation", before_and_after(before, after, "prefix"))
