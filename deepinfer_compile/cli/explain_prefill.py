"""What a decoder that shares global keys saves in prefill: its boundary, its layers, and a table of operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_compile.cli.show import table
from deepinfer_compile.cli.stages import Stages
from deepinfer_compile.errors import BadModelConfig

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_compile.models.own import Own
    from deepinfer_compile.prefill_work import PrefillWork

LENGTHS = (1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20)


def explain_own(own: Own) -> dict[str, Any]:
    """A definition of ours: its layers, its boundary in the graph, bytes and operations. Raises BadModelConfig where
    the graph is cut elsewhere than the configuration says, NoBoundary where it cannot be cut at all."""
    from deepinfer_compile.capture import capture
    from deepinfer_compile.passes.canonicalize import Canonicalize
    from deepinfer_compile.pipeline import Pipeline
    from deepinfer_compile.prefill_work import PrefillWork

    found: dict[str, Any] = {"model": own.name, "layers": list(own.layers), "kv_bytes_per_token": own.kv_bytes}
    if own.boundary is None:
        return {**found, "boundary": None}
    with Stages() as stages:
        stages("capture")
        program = capture(own.model)
        stages("canonicalize")
        work = PrefillWork(Pipeline((Canonicalize(),)).run(program)[0])
        stages("boundary")
        if work.found.layer != own.boundary:
            reason = f"the graph is cut at layer {work.found.layer}"
            raise BadModelConfig(key="boundary", value=own.boundary, reason=reason)
        stages("operations")
        return {**found, **explain_prefill(work, own.backtrack, [n for n in LENGTHS if n <= own.context])}


def explain_prefill(work: PrefillWork, backtrack: int, lengths: Sequence[int]) -> dict[str, Any]:
    """The boundary of a program and the operations of prompts, for any decoder that has one."""
    cut = work.found
    keep = max(cut.windows, default=1) + backtrack
    rows = []
    for tokens in lengths:
        made = work.saving(tokens, keep)
        counts = {"whole": made.whole, "cut inside": made.inside, "cut after": made.after}
        saved = {"saved inside": made.saved(made.inside), "saved after": made.saved(made.after)}
        rows.append({"tokens": tokens, **counts, **saved})
    crossing = [{"shape": c.shape, "bytes": c.bytes, "layer": c.layer} for c in cut.crossing]
    known = {"boundary": cut.layer, "why": cut.why, "halo": cut.halo, "keep": keep}
    return {**known, "crossing": crossing, "prefill": rows}


def print_own(found: dict[str, Any], console: Console) -> None:
    """What `explain_own` found."""
    console.print(found["model"], style="bold")
    layers = table(*found["layers"][0])
    for row in found["layers"]:
        layers.add_row(*row.values())
    console.print(layers)
    console.print(f"\nglobal cache: {found['kv_bytes_per_token']:g} bytes a token")
    if found["boundary"] is None:
        console.print("no boundary: every layer needs every token of a prompt")
        return
    console.print(f"boundary: layer {found['boundary']}, found in the graph; the configuration agrees")
    console.print(f"  {found['why']}", soft_wrap=True)
    print_prefill(found, console)


def print_prefill(found: dict[str, Any], console: Console) -> None:
    """The table of operations."""
    at, keep = found["boundary"], found["keep"]
    console.print(f"\nprefill, 10^12 operations; above the boundary the last {keep} rows of a prompt", style="bold")
    names = ("tokens", "all layers", f"cut inside {at}", "saved", f"cut after {at}", "saved")
    made = table(*names, numbers=names)
    for row in found["prefill"]:
        counts = [f"{row[k] / 1e12:.3f}" for k in ("whole", "cut inside", "cut after")]
        saved = [f"{row[k]:.1%}" for k in ("saved inside", "saved after")]
        made.add_row(str(row["tokens"]), counts[0], counts[1], saved[0], counts[2], saved[1])
    console.print(made)


__all__ = ["explain_own", "explain_prefill", "print_own", "print_prefill"]
