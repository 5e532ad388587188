"""`tune`: measure every legal configuration of a kernel on this machine's GPU and keep what was found in a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, stderr, stdout, table

if TYPE_CHECKING:
    from deepinfer_compile.sweep import Outcome

SHAPES_HELP = 'JSON file: [{"params": {...}, "tokens": [1, 16], "new": 1, "context": 4096}], or default.'


@guarded
def tune(
    template: Annotated[str, typer.Argument(metavar="TEMPLATE", help="A kernel's template, such as linear.")],
    shapes: Annotated[str, typer.Option(metavar="FILE", help=SHAPES_HELP)],
    store: Annotated[Path, typer.Option(metavar="DIR", help="Folder of records; made if it is not there.")],
    again: Annotated[bool, typer.Option("--again", help="Forget first what the store has for these shapes.")] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Find the fastest right configurations of a kernel, for `build --tuned DIR` and the backend.

    What differs from the reference is never timed. A run that was ended goes on where it was; what is in the store is
    not measured again.
    """
    from deepinfer_compile.sweep import Sweep
    from deepinfer_compile.sweep_machine import this_machine
    from deepinfer_compile.sweep_shapes import read_shapes
    from deepinfer_compile.tuning import Store

    wanted = read_shapes(template, shapes)
    machine, timer = this_machine()
    console = stderr()
    found = []
    with console.status(f"{machine.target}, {machine.name}") as status:
        sweep = Sweep(machine, timer, Store(store), status.update, again, shapes)
        for outcome in sweep.run(wanted):
            console.print(_line(outcome), soft_wrap=True)
            found.append(outcome)
    for note in sweep.notes:
        console.print(note, style="yellow", soft_wrap=True)
    if as_json:
        rows = [{**_facts(outcome), "file": str(sweep.store.path(outcome.key))} for outcome in found]
        print_json({"target": machine.target, "device": machine.name, "shapes": rows, "notes": list(sweep.notes)})
        return
    _tables(found)


def _line(outcome: Outcome) -> str:
    """One line a shape, as it is done."""
    counts = outcome.bucket.counts()
    how = "in the store" if outcome.stored else f"{counts['measured']} measured, {counts['rejected']} rejected"
    went_on = f", {outcome.resumed} of them before" if outcome.resumed else ""
    return f"{outcome.shape}: {how}{went_on}"


def _facts(outcome: Outcome) -> dict[str, Any]:
    summary = outcome.bucket.summary()
    head = {"op": outcome.key.op, "params": outcome.key.params, "stored": outcome.stored, "resumed": outcome.resumed}
    reasons: dict[str, int] = {}
    for m in outcome.bucket.measurements:
        if m.us is None:
            reasons[m.rejected] = reasons.get(m.rejected, 0) + 1
    return {**head, **summary, "reasons": reasons}


def _tables(found: list[Outcome]) -> None:
    """A table for each operation with its Params, one row a bucket."""
    console = stdout()
    numbers = ("tokens", "default us", "best us", "times", "legal", "rejected", "measured")
    groups: dict[str, list[Outcome]] = {}
    for outcome in found:
        params = " ".join(f"{name}={_plain(value)}" for name, value in outcome.key.params.items())
        groups.setdefault(f"{outcome.key.op} {params}", []).append(outcome)
    for head, group in groups.items():
        console.print(f"\n{head}", style="bold", soft_wrap=True)
        shown = table(*numbers, "best configuration", numbers=numbers)
        for outcome in group:
            shown.add_row(*_row(outcome))
        console.print(shown)
        refused = sum(o.bucket.counts()["rejected"] for o in group)
        if refused:
            shown = table("rejected because", "configurations", numbers=("configurations",))
            for reason, count in _reasons(group)[:5]:
                shown.add_row(reason, str(count))
            console.print(shown)
    console.print(f"\n{plural(len(found), 'shape')}")


def _row(outcome: Outcome) -> list[str]:
    one = outcome.bucket.summary()
    usual, best = one["default_us"], one["best_us"]
    times = f"{usual / best:.2f}" if usual and best else "-"
    config = "the default" if one["best"] == one["default"] else _config(one["best"])
    figures = ("-" if us is None else f"{us:.1f}" for us in (usual, best))
    return [str(one["tokens"]), *figures, times, *(str(one[n]) for n in ("legal", "rejected", "measured")), config]


def _reasons(group: list[Outcome]) -> list[tuple[str, int]]:
    """Reasons of rejections, the most frequent first, figures in them left out."""
    counts: dict[str, int] = {}
    for outcome in group:
        for reason, count in _facts(outcome)["reasons"].items():
            counts[reason] = counts.get(reason, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])


def _config(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> str:
    return str(value["dtype"]) if isinstance(value, dict) and "dtype" in value else str(value)


__all__ = ["tune"]
