"""What a mask that was run shows its rows: how far back, and how many tokens."""

from __future__ import annotations

import torch
from torch import Tensor


def table(mask: Tensor, rows: int, cols: int, negated: bool) -> Tensor:
    """Where any element of a mask is true, or with `negated` false: bool [rows, columns], of its dimensions given."""
    seen = (~mask if negated else mask).movedim((rows, cols), (0, 1))
    return seen.reshape(*seen.shape[:2], -1).any(-1)


def lags(seen: Tensor) -> tuple[int, int]:
    """The least and the most tokens that a row is behind what it sees."""
    at = seen.nonzero()
    lag = at[:, 0] - at[:, 1]
    return (int(lag.min()), int(lag.max())) if len(lag) else (0, 0)


def every(seen: Tensor) -> int:
    """The largest e for which each row i sees at most (i + 1) // e tokens; 1 where a row sees more than there are up to
    it, or none sees any."""
    count = seen.sum(-1)
    up_to = torch.arange(1, len(count) + 1, device=count.device)
    return max(1, int((up_to // count.clamp(min=1))[count > 0].min())) if bool(seen.any()) else 1


__all__ = ["every", "lags", "table"]
