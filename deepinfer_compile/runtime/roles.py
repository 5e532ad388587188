"""Which programs of a bundle run on which ranks, where some read prompts and others decode.

The section `experts` of a manifest is the plan of all programs, or that of the program that reads prompts, with the
plan of the others under `decode`. Then the first ranks of a job are those that read prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PREFILL, DECODE = "prefill", "decode"
PLAN = ("ranks", "slots", "room", "experts", "layers", "chosen")
SHARED = ("experts", "layers", "chosen")
"""What both plans of a bundle have in common."""


def has_units(section: Mapping[str, Any]) -> bool:
    """Whether prompts are read on ranks of their own."""
    return DECODE in section


def plans_of(section: Mapping[str, Any]) -> dict[str, Any]:
    """The plans by role; nothing of them is checked. A plan that is no object is given as it is."""
    first = {key: value for key, value in section.items() if key != DECODE}
    return {PREFILL: first, DECODE: section[DECODE]} if has_units(section) else {PREFILL: first}


def plan_of(section: Mapping[str, Any], program: str) -> Mapping[str, Any]:
    """The plan of a program, by its name."""
    plans = plans_of(section)
    found: Mapping[str, Any] = plans.get(role_of(program), plans[PREFILL])
    return found


def role_of(program: str) -> str:
    """Who runs a program where prompts are read on ranks of their own."""
    return PREFILL if program == PREFILL else DECODE


def disagreement(section: Mapping[str, Any]) -> str:
    """What the two plans of a bundle should have in common and have not; empty if there is no such thing."""
    plans = plans_of(section)
    different = [name for name in SHARED if len({plan[name] for plan in plans.values()}) > 1]
    return f"the plans have different {', '.join(different)}" if different else ""


__all__ = ["DECODE", "PLAN", "PREFILL", "disagreement", "has_units", "plan_of", "plans_of", "role_of"]
