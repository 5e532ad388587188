"""What a plan must know of a model: its weights one by one, its attention per layer as work, the bytes of its caches.

Numbers come from the modules themselves and from the operations' work functions, never from formulas of a plan's own:
a `Shape` only holds them, so that everything after it is the same for every architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from deepinfer_compile.ops.registry import Work

ROUTED, TABLES, DRAFTS = "routed experts", "memory tables", "drafts"
WORDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("shared experts", ("shared_expert", "shared_mlp")),
    (ROUTED, (".experts.",)),
    ("router", ("gate.weight", "gate.bias", "gate.wg", "router", "correction_bias")),
    ("attention", ("attn", "attention")),
    ("feed-forward", ("mlp", "feed_forward", "ffn")),
    ("head", ("lm_head", "head.weight")),
    ("embedding", ("embed",)),
)
REST = "norms and mixes"
ROLES = (ROUTED, *(role for role, _ in WORDS if role != ROUTED), REST, TABLES, DRAFTS)
"""What weights are for, in the order in which they are printed."""
FORMS = ("fp4", "fp8", "bf16", "fp32")
"""Formats of weights; products of the first two are 8-bit ones, of the others 16-bit ones."""


def role_of(name: str) -> str:
    """The role of a parameter by the words in its name: that of the first in `WORDS`, and of norms the rest's."""
    if "norm" in name.rsplit(".", 2)[-2 if "." in name else -1]:
        return REST
    return next((role for role, words in WORDS if any(word in name for word in words)), REST)


@dataclass(frozen=True)
class Weight:
    """One parameter.

    layer: its layer, None outside. count: its numbers. nbytes: what it takes stored, scales included. form: of `FORMS`.
    active: numbers of it by which one token is multiplied. fills: a prompt's token that only fills caches needs it.
    rows: the size of its first dimension, 0 where it is not told.
    """

    name: str
    role: str
    layer: int | None
    count: int
    nbytes: int
    form: str
    active: int
    fills: bool = True
    rows: int = 0


@dataclass(frozen=True)
class Shape:
    """A model of `layers` layers that route a token to `top` of `experts` experts, made for `context` tokens (0: not
    known).

    cache_bytes: of cache that a token adds. request_bytes: of cache that a request holds whatever its length.
    step(rows, context): the attention of a request that gets `rows` tokens at that context, per layer. prompt(start,
    end): the same of a prompt's tokens start..end-1. Both without products with weights. keep: rows at the end of a
    prompt that the layers from `edge` on are run on; None where all are. spread: most nodes that a token's experts lie
    on, 0 for any number.
    """

    name: str
    hidden: int
    layers: int
    experts: int
    top: int
    context: int
    weights: tuple[Weight, ...]
    cache_bytes: float
    request_bytes: float
    step: Callable[[int, int], tuple[Work, ...]]
    prompt: Callable[[int, int], tuple[Work, ...]]
    keep: int | None = None
    edge: int = 0
    spread: int = 0

    @cached_property
    def routed_layers(self) -> tuple[int, ...]:
        """Layers that have routed experts."""
        return tuple(sorted({w.layer for w in self.weights if w.role == ROUTED and w.layer is not None}))

    @cached_property
    def expert_bytes(self) -> float:
        """Bytes of one routed expert of one layer, mean over layers."""
        total = sum(w.nbytes for w in self.weights if w.role == ROUTED)
        return total / (self.experts * len(self.routed_layers))

    def role_bytes(self) -> dict[str, int]:
        """Bytes of all weights by role, without what is zero."""
        found = {role: sum(w.nbytes for w in self.weights if w.role == role) for role in ROLES}
        return {role: nbytes for role, nbytes in found.items() if nbytes}

    def active(self, *, filling: bool = False) -> int:
        """Parameters that a new token activates, or a prompt's token that only fills caches."""
        return sum(w.active for w in self.weights if w.fills or not filling)

    def rows(self, layer: int, prompt: int) -> int:
        """Rows of a prompt of `prompt` tokens that a layer is run on."""
        return prompt if self.keep is None or layer < self.edge else min(self.keep, prompt)


__all__ = ["DRAFTS", "FORMS", "REST", "ROLES", "ROUTED", "TABLES", "Shape", "Weight", "role_of"]
