"""Decode steps that start before the tokens of the last one are known.

A device that chooses its own tokens can go on with them while the host reads the last ones and looks for requests that
end, so that a step takes as long as the device needs. When a request does end, the step under way has a row too many,
whose token nobody takes; what it wrote into a page that is free by then comes before whatever its next owner writes.
New requests wait for the step under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_compile.runtime.batch import Flight
from deepinfer_compile.runtime.pages import Ints
from deepinfer_compile.runtime.request import Request
from deepinfer_compile.runtime.scheduler import Plan


@dataclass(frozen=True)
class Ahead:
    """A step under way. requests: of its rows, on these seats. index: how many tokens each had put out before it.

    left: how many steps after it no request can end for its length, or needs more of a step than a token.
    """

    flight: Flight
    seats: Ints
    requests: Sequence[Request]
    index: Ints
    left: int

    def rows(self) -> Ints:
        """The rows whose requests still wait for a token."""
        waits = [request.seat == seat for request, seat in zip(self.requests, self.seats.tolist())]
        return np.flatnonzero(waits)

    def plan(self, rows: Ints) -> Plan:
        """What of it counts, for `Scheduler.advance`."""
        return Plan(self.seats[rows], np.ones(len(rows), dtype=np.int64), [])


def steps_alone(requests: Sequence[Request]) -> int:
    """How many steps after the next one take nothing from the host: lengths are not reached, tokens are as drawn."""
    if any(r.params.penalised or r.params.logprobs is not None for r in requests):
        return 0
    if any(len(r.output_ids) < r.params.min_tokens for r in requests):
        return 0
    return min(r.limit - len(r.output_ids) for r in requests) - 1
