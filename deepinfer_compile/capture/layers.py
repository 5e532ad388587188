"""Find the layer list of a model, tell its kinds apart, and trace only one layer of each.

Layers look the same if their class trees, scalar attributes and parameter shapes are equal, minus the attributes that
only say where a layer stands. Layers that look the same are of one kind if they also do the same (`uniform`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from deepinfer_compile.capture.partition import LayerPlan
from deepinfer_compile.capture.uniform import Doings

POSITION_ATTRIBUTES = ("layer_idx", "layer_id", "layer_index", "training")


def layer_list(model: nn.Module) -> tuple[str, nn.ModuleList] | None:
    """The outermost ModuleList with the most parameters below it, or None."""
    best: tuple[int, str, nn.ModuleList] | None = None
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) < 1:
            continue
        if best is not None and name.startswith(best[1] + "."):
            continue
        size = sum(p.numel() for p in module.parameters())
        if best is None or size > best[0]:
            best = (size, name, module)
    return None if best is None else (best[1], best[2])


def kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What makes two layers look the same."""
    modules = tuple(
        (name, type(m).__qualname__, tuple(sorted((k, repr(v)) for k, v in vars(m).items() if _scalar(k, v))))
        for name, m in layer.named_modules()
    )
    shapes = tuple((name, tuple(p.shape), str(p.dtype)) for name, p in layer.named_parameters())
    return modules, shapes


def _scalar(name: str, held: object) -> bool:
    return name not in POSITION_ATTRIBUTES and isinstance(held, (int, float, str, bool, type(None), tuple))


def plan_layers(model: nn.Module) -> LayerPlan | None:
    """A plan that traces all layers. None if the model has no layer list."""
    found = layer_list(model)
    if found is None:
        return None
    path, layers = found
    names: dict[tuple[Any, ...], int] = {}
    kinds = tuple(names.setdefault(kind_of(layer), len(names)) for layer in layers)
    return LayerPlan(path, tuple(range(len(kinds))), kinds)


def proven(plan: LayerPlan, did: Doings) -> LayerPlan:
    """A plan that traces the first layer of each kind, and the last of the first kind, which shows what flows between
    layers. Layers are of one kind if they look and do the same."""
    kinds: list[int] = []
    examples: list[int] = []
    for i, looks in enumerate(plan.kinds):
        same = (k for k, j in enumerate(examples) if plan.kinds[j] == looks and did.same_kind(j, i))
        kind = next(same, len(examples))
        if kind == len(examples):
            examples.append(i)
        elif examples[kind] == 0:
            examples[kind] = i  # layer 0 does not show what flows from layer to layer
        kinds.append(kind)
    kept = {kinds.index(k) for k in kinds} | {len(kinds) - 1 - kinds[::-1].index(kinds[0])}
    return LayerPlan(plan.path, tuple(sorted(kept)), tuple(kinds))


@contextmanager
def trimmed(model: nn.Module, plan: LayerPlan | None) -> Iterator[None]:
    """Give the model only the kept layers, and its config lists to match, for the time of a trace."""
    if plan is None or plan.complete:
        yield
        return
    parent_name, _, attr = plan.path.rpartition(".")
    parent = model.get_submodule(parent_name)
    full: nn.ModuleList = getattr(parent, attr)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    saved: list[tuple[Any, str, Any]] = []
    for config in configs.values():
        for key, held in list(vars(config).items()):
            a_list = isinstance(held, list) and len(held) == len(full) and key != "architectures"
            if a_list or (key == "num_hidden_layers" and held == len(full)):
                saved.append((config, key, held))
    try:
        setattr(parent, attr, nn.ModuleList([full[i] for i in plan.kept]))
        for config, key, held in saved:
            config.__dict__[key] = len(plan.kept) if key == "num_hidden_layers" else [held[i] for i in plan.kept]
        yield
    finally:
        setattr(parent, attr, full)
        for config, key, held in saved:
            config.__dict__[key] = held
