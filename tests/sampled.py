"""Rows to choose tokens from, and which choices no rounding can change."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile import ops

NUDGE = 2e-5
"""How much rounding may move a share of the whole; fp32 sums of a row move it by less."""


def rows(logits: Tensor, kinds: list[tuple[float, float, int, float]], noise: Tensor) -> dict[str, Any]:
    """Operands of sample: (temperature, min_p, top_k, top_p) of each row."""
    temperature, min_p, top_k, top_p = zip(*kinds)
    return {
        "logits": logits,
        "temperature": torch.tensor(temperature, dtype=torch.float32),
        "min_p": torch.tensor(min_p, dtype=torch.float32),
        "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p, dtype=torch.float32),
        "noise": noise.double(),
    }


def certain(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens by the reference in fp64, and which of them stay the same when noise, min_p and top_p move a little."""
    wide = {name: t.double() if t.is_floating_point() else t for name, t in given.items()}
    tokens = ops.SAMPLE.reference(*wide.values())
    same = torch.ones_like(tokens, dtype=torch.bool)
    for number, share, part in product((-NUDGE, NUDGE), repeat=3):
        moved = dict(wide)
        moved["noise"] = (wide["noise"] + number).clamp(0, 1 - 2.0**-53)
        moved["min_p"] = (wide["min_p"] * (1 + share)).clamp(max=1)
        moved["top_p"] = torch.where(wide["top_p"] < 1, (wide["top_p"] + part).clamp(1e-9, 1 - 1e-9), 1)
        same &= ops.SAMPLE.reference(*moved.values()) == tokens
    return tokens, same
