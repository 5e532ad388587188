"""A kernel of a bundle in words, for `inspect` and `explain`."""

from __future__ import annotations

from typing import Any

from deepinfer_compile.cli.show import plural


def choice_words(choice: dict[str, Any]) -> str:
    """Tokens, config, registers a thread and shared memory of a choice in words."""
    upto = "more tokens" if choice["tokens"] is None else f"up to {plural(choice['tokens'], 'token')}"
    if "library" in choice:
        return f"{upto}: by {choice['library']}, whose library is as fast there or faster"
    config = " ".join(f"{key}={value}" for key, value in choice["config"].items())
    registers, shared, stack = (
        "/".join(str(n[key]) for n in choice["launches"]) for key in ("registers", "shared_bytes", "stack_bytes")
    )
    spills = f", {stack} bytes of stack" if stack.strip("0/") else ""
    cost = f"{_cost(choice['work'])}{_measured(choice)}; {_origin(choice['tuned'])}"
    return f"{upto}: {config}; {registers} registers, {shared} bytes shared{spills}{cost}"


def _origin(tuned: dict[str, Any] | None) -> str:
    """Where a configuration is from, in words."""
    if tuned is None:
        return "default"
    usual = f", default {tuned['default_us']:.1f} us" if tuned["default_us"] else ""
    return f"tuned, {tuned['us']:.1f} us at {plural(tuned['tokens'], 'token')}{usual}, {tuned['device']}"


def _cost(work: dict[str, Any] | None) -> str:
    """What a call costs, in words."""
    if work is None:
        return ""
    time = f", {work['seconds'] * 1e6:.3g} us at best" if work["seconds"] else ""
    return f"; {plural(work['tokens'], 'token')}: {work['flops'] / 1e9:.3g} GFLOP, {work['bytes'] / 1e6:.3g} MB{time}"


def _measured(choice: dict[str, Any]) -> str:
    """What a call took here, in words; nothing where it was not measured."""
    found = choice.get("measured")
    if found is None:
        return ""
    return f", {found['us']:.3g} us measured" if found["us"] is not None else f", not measured: {found['reason']}"
