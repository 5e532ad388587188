"""A small model shape written down by hand, hardware without figures of exchanges, and a fitting request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from deepinfer_compile.ops.registry import Work
from deepinfer_compile.plan.hardware import Hardware, read_hardware
from deepinfer_compile.plan.load import Load, drawn
from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.shape import ROUTED, Shape, Weight
from deepinfer_compile.plan.unit import Unit

LAYERS, HIDDEN, INNER, KEYS = 4, 256, 128, 64


def shape(experts: int = 30, top: int = 4) -> Shape:
    """Four layers, the first without routed experts; keys and values of 64 bytes a token and layer."""
    one = 3 * HIDDEN * INNER
    dense = [Weight(f"layers.{i}.attn", "attention", i, 90_000, 90_000, "fp8", 90_000) for i in range(LAYERS)]
    routed = [
        Weight(f"layers.{i}.experts", ROUTED, i, experts * one, experts * one // 2, "fp4", top * one)
        for i in range(1, LAYERS)
    ]
    ends = [
        Weight("embed", "embedding", None, 64_000, 128_000, "bf16", 0),
        Weight("head", "head", None, 64_000, 128_000, "bf16", 64_000),
    ]
    return Shape(
        name="Hand",
        hidden=HIDDEN,
        layers=LAYERS,
        experts=experts,
        top=top,
        context=4096,
        weights=(*dense, *routed, *ends),
        cache_bytes=KEYS * LAYERS,
        request_bytes=100.0,
        step=lambda rows, context: (Work(1000 * rows * context, KEYS * context),) * LAYERS,
        prompt=lambda start, end: (Work(500 * (end - start) * (start + end), KEYS * end),) * LAYERS,
    )


def plain(**changes: float) -> Hardware:
    """A description whose exchanges follow its links."""
    return replace(read_hardware("b200"), small=None, large=None).with_(changes)


def unit(
    kind: str = "decode", ranks: int = 8, model: Shape | None = None, load: Load | None = None, **more: Any
) -> Unit:
    """A unit of the hand-made shape, or of another; `hardware` and fields of the request are options."""
    model = model or shape()
    hardware = more.pop("hardware", None) or plain()
    request = Request(**{"policy": "published", **more})
    load = load or drawn(len(model.routed_layers), model.experts, request.skew, request.seed)
    return Unit.make(kind, model, hardware, load, request, ranks)
