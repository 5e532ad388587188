"""Trace a model that lies on the meta device as if it were in memory.

A meta tensor has no values, and what a model makes on the device of its weights has none either: numbers written in
its code (rotary frequencies, multipliers of a hash) would be traced as constants without a content, and what it makes
on the CPU would not go together with the rest. So weights without values are replaced, while they are traced, by fake
tensors on the CPU, which are as small.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Within, every parameter and buffer of the model that is on the meta device is a fake tensor on the CPU."""
    mode = FakeTensorMode(shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True)
    made: dict[int, Tensor] = {}
    swapped: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    try:
        for module in model.modules():
            held: dict[str, Tensor | None]
            for held in (module._parameters, module._buffers):  # type: ignore[assignment]
                for name, tensor in list(held.items()):
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = _fake(tensor, mode)
                    swapped.append((held, name, tensor))
                    held[name] = made[id(tensor)]
        yield
    finally:
        for held, name, tensor in swapped:
            held[name] = tensor


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode, torch.no_grad():
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def without_values(tensor: Tensor) -> Tensor:
    """A tensor as it is outside of a trace: one that only stood in is on the meta device."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    return torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device="meta")


__all__ = ["standing_in", "without_values"]
