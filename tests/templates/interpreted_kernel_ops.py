"""Kernels as torch operators, their launches interpreted: what the backend puts into a graph for a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer_compile import kernel_ops, ops
from deepinfer_compile.kernels import Limits
from tests.triton_interpreter import load

LIMITS = Limits(("float32", "bfloat16"), "cuda", shared_bytes=227 * 1024, cores=132, max_warps=32)


@pytest.fixture(autouse=True)
def interpreted_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources as the interpreter takes them, in operators of this test alone."""
    monkeypatch.setattr(kernel_ops, "load_source", lambda text: load(text, tmp_path))
    monkeypatch.setattr(torch.library, "wrap_triton", lambda kernel: kernel)  # older versions refuse interpreted ones


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def latent(mask: Tensor | None) -> tuple[Any, ...]:
    q = randn(3, 4, 1, 12), randn(3, 4, 1, 8)
    tensors = (*q, randn(3, 70, 24), randn(3, 70, 8), randn(4, 12, 24), randn(4, 24, 20))
    return (*(t.bfloat16() for t in tensors), 0.2, mask)


def experts(ids: Sequence[int]) -> tuple[Any, ...]:
    chosen = torch.tensor(ids).view(-1, 2)
    weights = randn(len(chosen), 2).abs()
    return (randn(len(chosen), 24), chosen, weights, randn(5, 40, 24), randn(5, 24, 20), None, None, "silu", 0.0, 0.0)


CALLS = {
    "latent": (ops.LATENT_ATTENTION, latent(None)),
    "mask": (ops.LATENT_ATTENTION, latent(torch.arange(70).ge(9).view(1, 1, 1, 70))),
    "experts": (ops.EXPERTS, (*experts([0, 3, 4, 1, 2, 3]), False, False)),
    "route": (ops.ROUTE, (randn(6, 16), None, "softmax", 4, 1, 1, "none", True, 0.0, 2.0)),
}


def test_nothing_starts_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes every operand of a kernel that it cannot see through for written, so that masks are copied."""
    texts: list[str] = []
    whole = kernel_ops.load_source
    monkeypatch.setattr(kernel_ops, "load_source", lambda text: [texts.append(text), whole(text)][1])
    rendered = kernel_ops.Rendered(replace(LIMITS, pdl=True))
    weight, mask = randn(4096, 2048).bfloat16(), torch.ones(1, 1, 1, 70, dtype=torch.bool)
    x = randn(1, 2048).bfloat16()
    made = rendered.linear(x, weight, None)
    assert made is not None
    torch.testing.assert_close(made, torch.nn.functional.linear(x, weight), atol=2e-1, rtol=2e-2)
    one = latent(None)
    assert rendered.call(ops.LATENT_ATTENTION, (*(t[:1] for t in one[:4]), *one[4:7], mask), {}) is not None
    assert len(texts) == 2
    assert not [text for text in texts if "gdc_" in text]


@pytest.mark.parametrize("name", CALLS)
def test_equals_the_reference_and_is_counted(name: str) -> None:
    op, args = CALLS[name]
    rendered = kernel_ops.Rendered(LIMITS)
    made = rendered.call(op, args, {})
    want = op.reference(*args)
    assert rendered.used == {op.name: 1}
    assert not rendered.left
    for got, wanted in zip(made if isinstance(made, tuple) else (made,), want if isinstance(want, tuple) else (want,)):
        assert got.shape == wanted.shape
        assert got.dtype == wanted.dtype
        allowed = 2**-6 if wanted.dtype == torch.bfloat16 else 2e-5
        torch.testing.assert_close(got, wanted, rtol=0, atol=allowed * float(wanted.abs().max()))


@pytest.mark.parametrize("name", CALLS)
def test_a_trace_holds_one_operator(name: str) -> None:
    op, args = CALLS[name]
    rendered = kernel_ops.Rendered(LIMITS)
    tensors = [a for a in args if isinstance(a, Tensor)]

    def call(*given: Tensor) -> Any:
        rest = iter(given)
        return rendered.call(op, [next(rest) if isinstance(a, Tensor) else a for a in args], {})

    traced = make_fx(call, tracing_mode="fake", pre_dispatch=True)(*tensors)
    targets = [str(n.target) for n in traced.graph.nodes if kernel_ops.NAMESPACE in str(n.target)]
    assert len(targets) == 1
    assert targets[0].startswith(f"{kernel_ops.NAMESPACE}.{op.name}_")


def test_what_has_no_kernel_is_left_with_the_reason() -> None:
    rendered = kernel_ops.Rendered(LIMITS)
    args = tuple(a.double() if isinstance(a, Tensor) else a for a in latent(None))
    single = tuple(a.float() if isinstance(a, Tensor) else a for a in latent(None))
    assert rendered.call(ops.LATENT_ATTENTION, single, {}) is None
    assert rendered.call(ops.LATENT_ATTENTION, args, {}) is None
    assert rendered.call(ops.LATENT_ATTENTION, latent(torch.ones(1, 4, 1, 70, dtype=torch.bool)), {}) is None
    assert not rendered.used
    assert sorted(rendered.left) == [
        "latent_attention: a mask a head",
        "latent_attention: operands of torch.float64 and other types",
        "latent_attention: products in fp32 are faster in a library",
    ]
    assert rendered.call(ops.RMS_NORM, (randn(2, 8), None, 1e-6, 0.0, True), {}) is None
    assert len(rendered.left) == 3
