"""What tokens cost, and from which share of cached prompt tokens on things work out.

Two break-even hit rates. Keeping up: the least share of prompts' tokens found in a cache with which the prefill unit
takes in as many tokens as the decode unit's output asks for (`ratio` for each one out). Paying: the shares at which the
revenue of one token out and its `ratio` tokens in is at least what their ranks cost, given prices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.unit import Unit

HITS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)
"""Hit rates at which the prefill unit is looked at; between them seconds a token are taken as linear."""
MILLION = 1e6


def economy(prefill: Unit, rate: float, decode_ranks: int, price: float | None) -> dict[str, Any]:
    """Costs of units that fit. rate: tokens out of one decode rank a second. price: dollars of a rank an hour."""
    asked = prefill.request
    seconds = np.array([1.0 / prefill.input_rate(hit) for hit in HITS])
    wanted = decode_ranks * rate * asked.ratio
    now = float(np.interp(asked.hit, HITS, seconds))
    found: dict[str, Any] = {
        "output_rate": decode_ranks * rate,
        "input_wanted": wanted,
        "input_rate": prefill.plan.ranks / now,
        "prefill_ranks_needed": wanted * now,
        "keeps_up_from": keeps_up(seconds, prefill.plan.ranks, wanted),
        "cost": None,
        "pays": None,
    }
    if price is None:
        return found
    second = price / 3600.0
    out, into = second / rate * MILLION, second * now * MILLION
    found["cost"] = {"output": out, "input": into, "output_with_input": out + asked.ratio * into}
    if asked.prices is not None:
        found["pays"] = pays(asked, out, second * seconds * MILLION)
    return found


def keeps_up(seconds: Any, ranks: int, wanted: float) -> float | None:
    """The least hit rate at which `ranks` take in `wanted` tokens a second, by seconds a token at `HITS`; None where
    the highest of these is not enough."""
    room = ranks / wanted if wanted else np.inf
    enough = np.flatnonzero(np.asarray(seconds) <= room)
    if not len(enough):
        return None
    i = int(enough[0])
    if i == 0:
        return 0.0
    return float(np.interp(room, [seconds[i], seconds[i - 1]], [HITS[i], HITS[i - 1]]))


def pays(asked: Request, out: float, into: Any) -> dict[str, Any]:
    """Where revenue is at least cost: the lowest and highest hit rate, None for nowhere; and both at the asked one.

    out, into: dollars of a million tokens out, and in at each of `HITS`.
    """
    assert asked.prices is not None
    hit, miss, output = asked.prices
    fine = np.linspace(HITS[0], HITS[-1], 991)
    cost = out + asked.ratio * np.interp(fine, HITS, into)
    revenue = output + asked.ratio * (fine * hit + (1 - fine) * miss)
    good = fine[revenue >= cost]
    at = int(np.abs(fine - asked.hit).argmin())
    span = {"from": float(good[0]), "to": float(good[-1])} if len(good) else {"from": None, "to": None}
    return {**span, "revenue": float(revenue[at]), "cost": float(cost[at])}


__all__ = ["HITS", "economy", "keeps_up", "pays"]
