"""What tokens choose: counted by layer and expert, and what belongs to no request is not sent at all.

Counted where choices are known anyway, in `dispatch`, so that no program has an output for it, and a step that is not
counted does nothing for it. Every program dispatches the layers of a placement in their order, once each.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Tally:
    """The `Choices` of one rank. load: i64[layers, experts + 1], choices of tokens of requests while it was counting,
    the last column of ids that are no expert."""

    def __init__(self, layers: int, experts: int) -> None:
        self.load = torch.zeros(layers, experts + 1, dtype=torch.int64)
        self._real: Tensor | None = None
        self._counting = False
        self._layer = 0

    def begin(self, real: Tensor, counting: bool) -> None:
        """A step begins. real: bool[T], the tokens that belong to a request."""
        self._real = None if bool(real.all()) else real
        self._counting = counting
        self._layer = 0

    def sent(self, ids: Tensor) -> Tensor:
        """See `Choices`."""
        ids = self._kept(ids)
        if self._counting:
            experts = self.load.shape[1] - 1
            known = (ids >= 0) & (ids < experts)
            if self.load.device != ids.device:
                self.load = self.load.to(ids.device)
            one = torch.ones_like(ids, dtype=torch.int64).flatten()
            # no sizes that depend on ids, so that nobody waits for a device
            self.load[self._layer].scatter_add_(0, torch.where(known, ids, experts).long().flatten(), one)
        self._layer += 1
        return ids

    def _kept(self, ids: Tensor) -> Tensor:
        """-1 for padding. A layer that runs on some rows alone has those of requests, where there are any."""
        if self._real is None:
            return ids
        if len(ids) == len(self._real):
            return torch.where(self._real.to(ids.device).unsqueeze(-1), ids, -1)
        return ids if bool(self._real.any()) else torch.full_like(ids, -1)

    def take(self) -> Tensor:
        """The load so far; it begins again from zero."""
        found, self.load = self.load, torch.zeros_like(self.load)
        return found[:, :-1].cpu().contiguous()


__all__ = ["Tally"]
