"""`eplb`: place the replicas of experts for measured loads, and show the load of every rank before and after."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json, usage
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, stdout, table
from deepinfer_compile.errors import CompileError

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_compile.eplb.placement import Ints, Placement

LOADS_HELP = "JSON lists, layers by experts: tokens of each. For policy windowed: windows by layers by experts."
CURRENT_HELP = (
    "JSON: the plan in force, layers by slots or what --json printed. Policy balanced then moves few weights."
)
SHOWN = 64
"""Most ranks in the picture."""
BAR = 40
"""Columns of the longest bar."""


@guarded
def eplb(
    loads: Annotated[Path, typer.Argument(metavar="LOADS.json", help=LOADS_HELP)],
    ranks: Annotated[int, typer.Option(help="Ranks that hold experts.")],
    slots: Annotated[int, typer.Option(help="Physical experts of a layer, replicas included; divides by ranks.")],
    nodes: Annotated[int, typer.Option(help="Nodes of as many ranks each.")] = 1,
    groups: Annotated[int, typer.Option(help="Groups of experts that stay on one node.")] = 1,
    policy: Annotated[str, typer.Option(help="balanced, published or windowed.")] = "balanced",
    current: Annotated[Path | None, typer.Option(metavar="FILE", help=CURRENT_HELP)] = None,
    layer: Annotated[int | None, typer.Option(help="Layer of the picture; the least balanced one by default.")] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Place the replicas of experts on ranks, so that all ranks get about the same load.

    Before is the plan in force or, without one, the experts in order and then the first ones again.
    """
    import numpy as np

    from deepinfer_compile.eplb import rebalance
    from deepinfer_compile.eplb.request import checked, in_force
    from deepinfer_compile.eplb.request import loads as checked_loads

    given = _read(loads, "LOADS.json")
    plan = None if current is None else _read(current, "--current")
    plan = plan.get("phy2log", plan) if isinstance(plan, dict) else plan
    try:
        held = plan if policy == "balanced" else None
        found = rebalance(given, slots, ranks, nodes, groups, held, policy)  # type: ignore[arg-type]
        counts = checked_loads(given, policy)
        layers, experts = counts.shape[-2:]
        request = checked(experts, slots, ranks, nodes, groups)
        usual = np.broadcast_to(np.arange(slots) % experts, (layers, slots))
        before = usual if plan is None else in_force(plan, layers, request)
    except CompileError as err:
        err.add_note(f"in {current if err.values.get('name') == 'current' else loads}")
        raise
    if layer is not None and not 0 <= layer < layers:
        raise usage("--layer", layer, f"there are {plural(layers, 'layer')}", f"use 0 to {layers - 1}")
    facts = _facts(counts, found, before, ranks, policy, plan is not None)
    if as_json:
        print_json(facts)
        return
    _show(facts, layer, stdout())


def _read(file: Path, name: str) -> Any:
    """A JSON file. Raises BadOption, OSError."""
    try:
        return json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise usage(name, str(file), f"it is not JSON ({error})", "give nested lists of numbers") from None


def _facts(counts: Any, found: Placement, before: Ints, ranks: int, policy: str, planned: bool) -> dict[str, Any]:
    """All that is printed, as data."""
    from deepinfer_compile.eplb import duplicates, imbalance, moved, rank_loads, windowed_imbalance

    experts, slots = found.logcnt.shape[1], found.phy2log.shape[1]
    windows = counts.ndim == 3
    total = counts.sum(0) if windows else counts
    head = {"layers": len(total), "experts": experts, "slots": slots, "ranks": ranks, "policy": policy}
    sides: dict[str, Any] = {}
    for side, phy2log in (("before", before), ("after", found.phy2log)):
        measured = windowed_imbalance(counts, phy2log, ranks) if windows else imbalance(total, phy2log, ranks)
        sides[side] = {
            "imbalance": measured.tolist(),
            "duplicates": int(duplicates(phy2log, ranks, experts).sum()),
            "rank_loads": rank_loads(total, phy2log, ranks).tolist(),
        }
    moves = moved(before, found.phy2log, ranks, experts).tolist() if planned else None
    maps = {name: getattr(found, name).tolist() for name in ("phy2log", "log2phy", "logcnt")}
    return {**head, "note": found.note, **sides, "moved": moves, **maps}


def _show(facts: dict[str, Any], layer: int | None, console: Console) -> None:
    before, after = facts["before"], facts["after"]
    head = f"{plural(facts['layers'], 'layer')}, {plural(facts['experts'], 'expert')}, {facts['slots']} slots"
    console.print(f"{head} on {plural(facts['ranks'], 'rank')}, policy {facts['policy']}", style="bold")
    if facts["note"]:
        console.print(facts["note"], style="yellow")
    if layer is None:
        layer = before["imbalance"].index(max(before["imbalance"]))
    _picture(facts, layer, console)
    console.print()
    words = "largest load over the mean, mean over layers"
    shown = table(
        "", words, "worst layer", "duplicates on a rank", numbers=(words, "worst layer", "duplicates on a rank")
    )
    for name, side in (("before", before), ("after", after)):
        measured = side["imbalance"]
        mean = sum(measured) / len(measured)
        shown.add_row(name, f"{mean:.4f}", f"{max(measured):.4f}", str(side["duplicates"]))
    console.print(shown)
    if facts["moved"] is not None:
        total, all_slots = sum(facts["moved"]), facts["layers"] * facts["slots"]
        most = max(facts["moved"])
        console.print(f"{total} of {all_slots} weights move ({total / all_slots:.1%}), at most {most} of a layer")


def _picture(facts: dict[str, Any], layer: int, console: Console) -> None:
    """The load of each rank over the mean, as numbers and bars."""
    from rich.bar import Bar

    before, after = (facts[side]["rank_loads"][layer] for side in ("before", "after"))
    mean = sum(before) / len(before) or 1.0
    most = max(*before, *after) or 1.0
    ranks = sorted(sorted(range(len(before)), key=lambda r: (-before[r], r))[:SHOWN])
    few = f", the {SHOWN} that were fullest" if len(before) > SHOWN else ""
    console.print(f"\nLayer {layer}: load of each rank over the mean{few}")
    shown = table("rank", "before", " ", "after", "  ", numbers=("rank", "before", "after"))
    for r in ranks:
        bars = [Bar(most, 0, load, width=BAR) for load in (before[r], after[r])]
        shown.add_row(str(r), f"{before[r] / mean:.3f}", bars[0], f"{after[r] / mean:.3f}", bars[1])
    console.print(shown)


__all__ = ["eplb"]
