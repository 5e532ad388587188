"""What this model of time says of a system whose figures are published, and by how much it is off.

Nothing is fitted: the constants are those of the hardware's description, each with its own source, and the ratio of
prediction to publication is printed as it comes out. The data file holds the figures, their source and the config.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from deepinfer_compile.errors import MissingExtra
from deepinfer_compile.plan.hardware import read_hardware
from deepinfer_compile.plan.load import drawn
from deepinfer_compile.plan.reading import shape_of
from deepinfer_compile.plan.request import Request
from deepinfer_compile.plan.unit import Unit

FILE = Path(__file__).parent / "published.json"


def compared(request: Request) -> dict[str, Any]:
    """Published figures beside predictions, with the request's assumptions about load and overlap.

    Without Transformers, which defines that model, `points` is empty and `note` says what is missing.
    """
    known = json.loads(FILE.read_text())
    head = {"model": known["model"], "hardware": known["hardware"], "source": known["source"]}
    assumed = (request.skew, request.seed, request.policy, request.microbatches)
    try:
        points = [dict(p) for p in _points(*assumed)]
    except MissingExtra as err:
        return {**head, "points": [], "leaves_out": [], "note": str(err).replace("\n", ";")}
    return {**head, "points": points, "leaves_out": known["leaves_out"], "note": ""}


@lru_cache(maxsize=8)
def _points(skew: float, seed: int, policy: str, microbatches: int) -> tuple[dict[str, Any], ...]:
    known = json.loads(FILE.read_text())
    config = {k: v for k, v in known["config"].items() if k != "source"}
    shape, hardware = shape_of(config, known["config"]["source"]), read_hardware(known["hardware"])
    load = drawn(len(shape.routed_layers), shape.experts, skew, seed)
    base = Request(skew=skew, seed=seed, policy=policy, microbatches=microbatches)
    into, out, node = known["prefill"], known["decode"], known["ranks_per_node"]

    asked = replace(base, redundant_prefill=into["redundant"], prompt=out["context"], hit=into["hit"])
    unit = Unit.make("prefill", shape, hardware, load, asked, into["ranks"])
    found = unit.data()["step"]
    given = into["node_rate"] / node
    first = [
        _point("tokens in, a GPU and second", given, found["input_rate"], "prefill", into),
        _point("of them computed", given * (1 - into["hit"]), found["rate"], "prefill", into),
    ]

    given, speed = out["node_rate"] / node, sum(out["user_rate"]) / 2
    batch = round(given / speed)
    asked = replace(base, redundant_decode=out["redundant"], context=out["context"], batch=batch)
    unit = Unit.make("decode", shape, hardware, load, asked, out["ranks"])
    made = unit.data()
    second = [
        _point("tokens out, a GPU and second", given, made["step"]["rate"], "decode", out),
        _point("tokens out, a user and second", speed, made["step"]["user"], "decode", out),
    ]
    return tuple(first + second)


def _point(what: str, published: float, predicted: float, kind: str, known: dict[str, Any]) -> dict[str, Any]:
    return {
        "unit": f"{kind}, EP{known['ranks']}, {known['redundant']} redundant",
        "what": what,
        "published": published,
        "predicted": predicted,
        "ratio": predicted / published,
        "unknown": known["unknown"],
    }


__all__ = ["compared"]
