"""Rotary frequencies that depend on a request's length, decided per request instead of per batch.

Transformers picks LongRoPE's factors (arXiv 2402.13753), or the dynamic NTK base, from the largest position of the
whole call. In a packed call that would let one request change another's results. Here the choice is made per token from
`context_hint`, the length that the request's own eager call would have seen.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.errors import UnsupportedConstruct

LONG = "deepinfer_long_inv_freq"
Choose = Callable[[Callable[[Tensor], Any], Tensor], Any]
"""(rotation with a table of frequencies, context hint i64[1, T]) -> the rotation for each token."""


class Hint:
    """Holds the traced `context_hint` i64[1, T] while the model's forward runs."""

    value: Tensor | None = None


def length_dependent(model: nn.Module) -> dict[str, Any]:
    """Rotary modules whose frequencies depend on length, by name."""
    return {n: m for n, m in model.named_modules() if _kind(m) in ("longrope", "dynamic")}


def _kind(module: Any) -> str:
    kind = getattr(module, "rope_type", "")
    return kind if isinstance(kind, str) and hasattr(module, "inv_freq") else ""


@contextmanager
def per_request(model: nn.Module, hint: Hint, constants: dict[str, Tensor]) -> Iterator[None]:
    """Replace the length-dependent modules' forward for the time of a trace; their long tables go into `constants`."""
    found = length_dependent(model)
    try:
        for name, module in found.items():
            choose = _longrope(name, module, constants) if _kind(module) == "longrope" else _dynamic(module)
            module.forward = _forward(module, choose, hint)
        yield
    finally:
        for module in found.values():
            module.__dict__.pop("forward", None)
            module._buffers.pop(LONG, None)
            module._non_persistent_buffers_set.discard(LONG)


def _forward(module: Any, choose: Choose, hint: Hint) -> Callable[..., Any]:
    plain = inspect.unwrap(type(module).forward)
    if plain is type(module).forward:
        raise UnsupportedConstruct(
            construct=f"{type(module).__name__} changes its rotary frequencies in a way of its own",
            fix="report the model",
        )

    def forward(*args: Any, **kwargs: Any) -> Any:
        if hint.value is None:
            raise UnsupportedConstruct(construct="rotary frequencies without a context hint", fix="report the model")

        def with_table(table: Tensor) -> Any:
            kept = module._buffers["inv_freq"]
            module._buffers["inv_freq"] = table
            try:
                return plain(module, *args, **kwargs)
            finally:
                module._buffers["inv_freq"] = kept

        return choose(with_table, hint.value)

    return forward


def _longrope(name: str, module: Any, constants: dict[str, Tensor]) -> Choose:
    """Long factors where the request is longer than the original context, short ones elsewhere.

    Both rotations are computed and one is taken, which is right for every way of applying a table of frequencies.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    limit = int(module.config.rope_parameters["original_max_position_embeddings"])
    with torch.device("cpu"):
        long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, torch.device("cpu"), seq_len=limit + 1)
    constants[f"{name}.{LONG}"] = long
    module.register_buffer(LONG, long.to(module.inv_freq.device), persistent=False)

    def choose(with_table: Callable[[Tensor], Any], hint: Tensor) -> Any:
        far, near = with_table(module._buffers[LONG]), with_table(module.original_inv_freq)
        return tuple(torch.where((hint > limit).unsqueeze(-1), f, n) for f, n in zip(far, near, strict=True))

    return choose


def _dynamic(module: Any) -> Choose:
    """Dynamic NTK: the base grows with the length beyond the original context, so each token has its own table."""
    config = module.config
    parameters = config.rope_parameters
    limit, factor = float(config.max_position_embeddings), float(parameters["factor"])
    base, dim = float(parameters["rope_theta"]), 2 * int(module.inv_freq.shape[-1])

    def choose(with_table: Callable[[Tensor], Any], hint: Tensor) -> Any:
        length = hint.to(torch.float32).clamp(min=limit)
        grown = base * ((factor * length / limit) - (factor - 1)) ** (dim / (dim - 2))
        powers = torch.arange(0, dim, 2, dtype=torch.int64, device=hint.device).to(torch.float32) / dim
        try:
            return with_table(1.0 / (grown.unsqueeze(-1) ** powers))
        except RuntimeError as err:
            raise UnsupportedConstruct(
                construct=f"{type(module).__name__} applies one table of rotary frequencies to all tokens, and dynamic "
                "NTK needs one for each",
                fix="use a newer Transformers, whose models take a table a token",
            ) from err

    return choose
