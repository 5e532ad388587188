"""Which kernel computes a call of cached latent attention, and what the one for prompts says of its work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, Refused, select, specs

SPEC = next(s for s in specs() if s.name == "latent_prefill")
PARAMS = next(c.params for c in SPEC.cases if c.name == "chunk")


def given(**changes: Any) -> dict[str, Any]:
    case = Case("", replace(PARAMS, **changes), (3, 2), (5, 2))
    return dict(SPEC.inputs(case, torch.Generator().manual_seed(0)))


def chosen(arguments: dict[str, Any], phase: str) -> str:
    found = select(Call(ops.CACHED_LATENT_ATTENTION, arguments, phase), "triton")
    return found.reason if isinstance(found, Refused) else found[0].name


@pytest.mark.parametrize(
    ("phase", "form", "name"),
    [
        ("prefill", "expanded", "latent_prefill"),
        ("prefill", "absorbed", "latent_attention"),
        ("decode", "expanded", "latent_attention"),
        ("verify", "expanded", "latent_attention"),
    ],
)
def test_the_expanded_form_of_a_prefill_has_a_kernel_of_its_own(phase: str, form: str, name: str) -> None:
    assert chosen({**given(), "form": form}, phase) == name
    assert chosen({**given(value_rows=False, dtype=torch.bfloat16), "form": form}, phase) == name


def test_what_it_does_not_take_is_done_absorbed() -> None:
    for changes in ({"nope": 257}, {"value": 300}):
        assert chosen(given(**changes), "prefill") == "latent_attention"
    assert chosen(given() | {"scale": -0.1}, "prefill") == "latent_attention"
    assert chosen(given(nope=256, value=256), "prefill") == "latent_prefill"
    refused = SPEC.bind(Call(ops.CACHED_LATENT_ATTENTION, given(), "decode"))
    assert isinstance(refused, Refused)
    assert "expanded form of a prefill" in refused.reason


def test_what_neither_takes_has_the_reasons_of_both() -> None:
    wide = {n: t.double() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given().items()}
    reason = chosen(wide, "prefill")
    assert "latent_attention: latent_prefill computes" in reason
    assert "latent_prefill: operands of torch.float64" in reason


def test_work_is_expanded_among_new_tokens_and_absorbed_before_them() -> None:
    heads, row = PARAMS.heads, PARAMS.latent + PARAMS.rope
    weights = heads * PARAMS.latent * (PARAMS.nope + PARAMS.value)
    pair = heads * (PARAMS.nope + PARAMS.rope + PARAMS.value)
    alone = SPEC.work(PARAMS, (3, 0), (3, 9))
    assert alone.flops == 2 * (3 * weights + 6 * pair)
    after = SPEC.work(PARAMS, (3, 0), (8, 9))
    assert after.flops - alone.flops == 2 * (3 * weights + 3 * 5 * heads * (row + PARAMS.latent))
    assert after.bytes - alone.bytes == 5 * row * 4
    assert alone.bytes == 4 * (2 * 3 * row + weights + 3 * pair)
