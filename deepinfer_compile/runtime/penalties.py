"""Presence, frequency and repetition penalties, kept as the few ids a request has seen.

A dense count per vocabulary entry and request would cost a pass over [requests, vocabulary] at every step; the ids seen
are a few hundred, so each request keeps them as a list and all requests of a step are edited by one gather and one
scatter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_compile.runtime.params import SamplingParams


class PenaltyCounts:
    """How often a request has put out each id it has seen. Ids of the prompt count 0 until they are put out."""

    def __init__(self, params: SamplingParams, prompt: NDArray[np.int64], output: list[int]) -> None:
        # a sort of a long prompt, or a loop over its ids, would take longer than the step that waits for it
        there = np.zeros(int(prompt.max(initial=-1)) + 1, dtype=bool)
        there[prompt] = True
        seen = np.flatnonzero(there)
        self.factors = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._prompt, self._new, self._ids = seen, dict[int, int](), seen.copy()
        self._counts = np.zeros(len(seen), dtype=np.float32)
        for token in output:
            self.add(token)

    def add(self, token: int) -> None:
        """Count one more output token; a negative one (no valid choice) is left out."""
        if token < 0:
            return
        at = int(np.searchsorted(self._prompt, token))
        if at == len(self._prompt) or self._prompt[at] != token:
            at = self._new.setdefault(token, len(self._prompt) + len(self._new))
        if at == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(at + 16, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(at + 16, dtype=np.float32)))
        self._ids[at] = token
        self._counts[at] += 1

    @property
    def seen(self) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Ids seen, and how often each was put out."""
        count = len(self._prompt) + len(self._new)
        return self._ids[:count], self._counts[:count]

    @staticmethod
    def apply(logits: Tensor, rows: list[tuple[int, PenaltyCounts]]) -> None:
        """Edit rows of `logits` f32[N, vocab] in place.

        A seen token's logit is divided by the repetition penalty if positive, multiplied if not; then the frequency
        penalty times its count, and the presence penalty if it was put out, are subtracted.
        """
        if not rows:
            return
        ids, counts = zip(*(owner.seen for _, owner in rows))
        sizes = [len(part) for part in ids]
        place = np.concatenate(ids) + np.repeat([row for row, _ in rows], sizes) * logits.shape[1]
        count = np.concatenate(counts)
        factors = np.repeat(np.array([owner.factors for _, owner in rows], dtype=np.float32), sizes, axis=0)
        repetition = _to(factors[:, 0], logits)
        offset = _to(factors[:, 1] * count + factors[:, 2] * (count > 0), logits)
        flat, where = logits.view(-1), _to(place, logits)
        value = flat[where]
        flat[where] = torch.where(value > 0, value / repetition, value * repetition) - offset


def _to(values: NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
