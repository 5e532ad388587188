"""Capture: an unmodified model becomes a two-level program of packed tokens. The only user of torch.export."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from deepinfer_compile.capture import hf
from deepinfer_compile.capture.export import EXAMPLE_ROWS, EXAMPLE_TOKENS, MAX_TOKENS, Exported, export_packed
from deepinfer_compile.capture.layers import plan_layers, trimmed
from deepinfer_compile.capture.partition import LayerPlan, partition
from deepinfer_compile.errors import UnsupportedConstruct
from deepinfer_compile.program import Program

__all__ = ["capture"]


def capture(model: nn.Module, *, trim: bool = True) -> Program:
    """Capture a causal LM as a program over packed tokens: (input_ids, position_ids, rows) -> logits [N, V].

    The model may live on the meta device; its parameters are neither copied nor read. With trim, only the first and
    last layer of each kind are traced; a model whose layers do not form a chain is traced whole.
    Raises UnsupportedConstruct or UnsupportedArchitecture.
    """
    plan = plan_layers(model, trim)
    info: dict[str, Any] = {"model": type(model).__name__, "tied": tied_names(model)}
    if plan is not None and not plan.complete:
        try:
            return partition(_export(model, plan), plan, "packed", {**info, "traced_layers": list(plan.kept)})
        except UnsupportedConstruct as err:
            info["traced_all_because"] = str(err).splitlines()[0]
            plan = plan_layers(model, trim=False)
    return partition(_export(model, plan), plan, "packed", info)


def _export(model: nn.Module, plan: LayerPlan | None) -> Exported:
    function, prefix = (hf.PackedCausalLM(model), "model.") if hf.is_hf(model) else (model, "")
    first: dict[int, str] = {}
    device = next(model.parameters()).device
    with torch.device(device):
        examples = {
            "input_ids": torch.zeros(1, EXAMPLE_TOKENS, dtype=torch.long),
            "position_ids": torch.arange(EXAMPLE_TOKENS)[None],
            "rows": torch.arange(EXAMPLE_ROWS),
        }
    tokens = torch.export.Dim("tokens", min=1, max=MAX_TOKENS)
    rows = torch.export.Dim("rows", min=1, max=MAX_TOKENS)
    dynamic = {"input_ids": {1: tokens}, "position_ids": {1: tokens}, "rows": {0: rows}}
    was_training = model.training
    model.eval()
    try:
        with trimmed(model, plan), hf.interfaces(model) if hf.is_hf(model) else nullcontext():
            names = {prefix + name: first.setdefault(id(t), name) for name, t in named_tensors(model)}
            return export_packed(function, examples, dynamic, names)
    finally:
        model.train(was_training)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters and buffers under every name they have."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that stand for one tensor, first name first."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named_tensors(model):
        groups.setdefault(id(tensor), []).append(name)
    return [names for names in groups.values() if len(names) > 1]
