"""What articles say of a deployment, computed again: each claim with its formula and what comes out of it.

Reproduced: the formula gives the figure, as far as its digits go. Plausible: the model of time gives it within a factor
of `NEAR` with the constants and the traffic that the plan was asked with, which are named. Inconsistent: neither, or
two figures that should be one are not. The figures are data, with where they are from; no threshold rests on them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepinfer_compile.plan.hardware import Hardware
from deepinfer_compile.plan.load import Load
from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.shape import Shape
from deepinfer_compile.plan.unit import Unit

FILE = Path(__file__).parent / "claims.json"
NEAR, DIGITS = 1.5, 0.006
"""A factor for what is predicted; a share for what is only rounded."""
MOST = 1 << 14
"""Requests of a rank that are tried."""


@dataclass(frozen=True)
class Asked:
    """What a plan was asked."""

    shape: Shape
    hardware: Hardware
    request: Request
    load: Load


def claims(shape: Shape, hardware: Hardware, request: Request, load: Load) -> dict[str, Any] | None:
    """The claims about a model of this shape, None where there are none. Raises as `Unit.make`."""
    known = json.loads(FILE.read_text())
    if any(getattr(shape, name) != value for name, value in known["of"].items()):
        return None
    asked = Asked(shape, hardware, request, load)
    return {"source": known["source"], "rows": [_row(asked, claim) for claim in known["claims"]]}


def _row(asked: Asked, claim: Mapping[str, Any]) -> dict[str, Any]:
    formula, found, exact = _KINDS[claim["kind"]](asked, claim)
    row = {"what": claim["what"], "published": claim["published"], "formula": formula, "found": found}
    if found is None or not found:
        return {**row, "verdict": "inconsistent"}
    ratio = found / claim["published"]
    if exact:
        return {**row, "verdict": "reproduced" if abs(ratio - 1) <= DIGITS else "inconsistent"}
    return {**row, "verdict": "plausible" if 1 / NEAR <= ratio <= NEAR else "inconsistent"}


Found = tuple[str, float | None, bool]
"""A formula, what it gives (None: nothing), and whether it is arithmetic alone."""


def fastest(unit: Unit, user: float) -> tuple[int, float]:
    """The most requests of a rank that get `user` tokens a second each, and tokens a second of a rank; zeros for none.

    A step takes longer the more requests it has.
    """
    accepted = unit.request.accepted
    room = min(MOST, unit.memory()["requests"])
    low, high = 0, room + 1
    while high - low > 1:
        middle = (low + high) // 2
        enough = accepted / unit.decode_costs(middle).stages.seconds >= user
        low, high = (middle, high) if enough else (low, middle)
    return low, low * accepted / unit.decode_costs(low).stages.seconds if low else 0.0


def _speed(asked: Asked, claim: Mapping[str, Any]) -> Found:
    request = replace(asked.request, redundant_decode=claim["redundant"])
    unit = Unit.make("decode", asked.shape, asked.hardware, asked.load, request, claim["ranks"])
    batch, rate = fastest(unit, claim["user"])
    traffic = f"{request.context} tokens of context, {request.accepted:g} tokens a step"
    if not batch:
        return f"no request gets {claim['user']} tokens/s on {asked.hardware.name}, {traffic}", None, False
    words = f"{batch} requests a rank * {request.accepted:g} / step, the most at {claim['user']} tokens/s"
    return f"{words}, on {asked.hardware.name}, {traffic}", rate, False


def _experts(asked: Asked, claim: Mapping[str, Any]) -> Found:
    experts, redundant, ranks = asked.shape.experts, claim["redundant"], claim["ranks"]
    return f"({experts} experts + {redundant} replicas) / {ranks}", (experts + redundant) / ranks, True


def _fewer(asked: Asked, claim: Mapping[str, Any]) -> Found:
    few, many = (asked.shape.experts / ranks for ranks in claim["ranks"])
    return f"1 - {many:g} / {few:g} experts", 1 - many / few, True


def _hits(asked: Asked, claim: Mapping[str, Any]) -> Found:
    hit = claim["hit"]
    return f"1 / (1 - {hit:g}): what is computed is the rest", 1 / (1 - hit), True


def _quotient(asked: Asked, claim: Mapping[str, Any]) -> Found:
    (a, b), (one, other) = claim["over"], claim["units"]
    return f"{a:g} {one} / {b:g} {other}", a / b, True


def _fleet(asked: Asked, claim: Mapping[str, Any]) -> Found:
    by_tokens = claim["tokens_a_day"] / 1e9 * claim["hours_per_billion"] / 24
    by_disk = claim["disk"] / claim["cache_a_gpu"]
    tokens, hours = claim["tokens_a_day"] / 1e12, claim["hours_per_billion"]
    first = f"{tokens:g}T tokens a day * {hours:g} h per 10^9 / 24 h = {by_tokens:,.0f}"
    second = f"{claim['disk'] / 1e15:g} PB / {claim['cache_a_gpu'] / 1e12:g} TB = {by_disk:,.0f}"
    return f"{first}; {second}", by_tokens, True


_KINDS: dict[str, Callable[[Asked, Mapping[str, Any]], Found]] = {
    "speed": _speed,
    "experts": _experts,
    "fewer": _fewer,
    "hits": _hits,
    "quotient": _quotient,
    "fleet": _fleet,
}

__all__ = ["claims", "fastest"]
