"""`dump`, `replay` and `bisect`: look at every stage of a model, prove it by numbers, find the wrong rewrite."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, short_place, stdout, table
from deepinfer_compile.cli.stages import Stages

if TYPE_CHECKING:
    from deepinfer_compile.bisect import Culprit
    from deepinfer_compile.cli.opening import Subject
    from deepinfer_compile.pipeline import Pipeline

MODEL_HELP = "A model folder (config.json is enough), or an architecture's name."
VALUES_HELP = "A model folder, or an architecture (a tiny random model of it)."
RANDOM_OPTION = typer.Option("--random", help="Random weights even where the folder has its own.")


@guarded
def dump(
    model: Annotated[str, typer.Argument(metavar="MODEL_DIR", help=MODEL_HELP)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New, empty, or an earlier dump.")],
    only: Annotated[str | None, typer.Option("--pass", metavar="NAME", help="Only before and after this pass.")] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Write the graphs after every pass, their diffs, remarks and records into a folder; no weights are needed."""
    from deepinfer_compile.cli.opening import compile_source, open_graph
    from deepinfer_compile.cli.watching import OnePass
    from deepinfer_compile.observe import Dump, Reproducer

    if only is not None:
        _running(only)
    with Stages() as stages:
        stages("open")
        source = open_graph(model)
        written = Dump(folder)
        watch = written if only is None else OnePass(only, written)
        stages("capture and passes")
        compiled = compile_source(source, observers=[watch, Reproducer(folder)])
    ran = list(dict.fromkeys(r.name for records in compiled.records.values() for r in records))
    files = sorted(f.name for f in folder.iterdir() if not f.name.startswith("."))
    if as_json:
        print_json({"folder": str(folder), "model": source.name, "passes": ran, "files": files})
        return
    stdout().print(f"{folder}: {plural(len(files), 'file')} of {source.name}", soft_wrap=True)


def _running(name: str) -> None:
    """Raises UnknownPass unless a pass of that name runs up to the phase programs."""
    from deepinfer_compile.errors import UnknownPass
    from deepinfer_compile.presets import PHASES, default

    known = dict.fromkeys(p.name for passes in (default().passes, *PHASES.values()) for p in passes)
    if name not in known:
        raise UnknownPass(name=name, known=", ".join(known))


@guarded
def replay(
    subject: Annotated[str, typer.Argument(metavar="FILE|MODEL_DIR", help="A *.reproducer.json file, or a model.")],
    random: Annotated[bool, RANDOM_OPTION] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Run a reproducer again, or run every stage of a model and show its error against the captured graph.

    MODEL is a folder or an architecture's name (a tiny random model). Exit code 6 if a pass changes the results.
    """
    if Path(subject).is_file():
        from deepinfer_compile.bisect import replay as run_again

        words = run_again(Path(subject))
        if as_json:
            print_json({"file": subject, "result": words, "fails": words.startswith("fails")})
        else:
            stdout().print(words, soft_wrap=True)
        return
    from deepinfer_compile.cli.opening import open_values
    from deepinfer_compile.cli.watching import replay_stages

    with Stages() as stages:
        stages("open and capture")
        opened = open_values(subject, random=random)
        stages("replay")
        rows, failure = replay_stages(opened)
    if as_json and failure is None:
        print_json({"model": opened.name, "random_weights": opened.random, "stages": [vars(r) for r in rows]})
    elif not as_json:
        shown = table("program", "pass", "fp64 error", "own type error", numbers=("fp64 error", "own type error"))
        for r in rows:
            shown.add_row(r.program, r.name, f"{r.exact:.1e}", f"{r.native:.1e}")
        stdout().print(f"{opened.name}, {'random' if opened.random else 'its own'} weights", style="bold")
        stdout().print(shown)
    if failure is not None:
        raise failure


@guarded
def bisect(
    model: Annotated[str, typer.Argument(metavar="MODEL_DIR", help=VALUES_HELP)],
    pipeline: Annotated[
        str | None, typer.Option(metavar="MODULE:OBJECT", help="A Pipeline, or what returns one; default: ours.")
    ] = None,
    random: Annotated[bool, RANDOM_OPTION] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Find the first pass, and its first rewrite, that changes the results. Exit code 6 if there is one."""
    from deepinfer_compile.cli.opening import named_pipeline, open_values
    from deepinfer_compile.errors import NumericMismatch

    chosen = None if pipeline is None else named_pipeline(pipeline)
    with Stages() as stages:
        stages("open and capture")
        opened = open_values(model, random=random)
        stages("bisect")
        found = _first_wrong(opened, chosen)
    if as_json:
        print_json({"model": opened.name, "culprit": None if found is None else vars(found)})
    elif found is None:
        stdout().print(f"{opened.name}: every pass keeps the results")
    else:
        stdout().print(_in_words(found), soft_wrap=True)
    if found is not None:
        raise typer.Exit(NumericMismatch.exit_code)


def _first_wrong(opened: Subject, chosen: Pipeline | None) -> Culprit | None:
    """Bisect the given pipeline, or ours and then that of each phase."""
    from deepinfer_compile.bisect import bisect as search
    from deepinfer_compile.cli.watching import samples
    from deepinfer_compile.pipeline import Pipeline
    from deepinfer_compile.presets import PHASES, default

    given: tuple[Any, ...] = (opened.weights, *samples(opened.program))
    first = default() if chosen is None else chosen
    found = search(first, opened.program, *given)
    if found is not None or chosen is not None:
        return found
    packed, _ = first.run(opened.program)
    phases = (search(Pipeline(passes, given=packed.facts), packed, *given) for passes in PHASES.values() if passes)
    return next((f for f in phases if f is not None), None)


def _in_words(found: Culprit) -> str:
    lines = [f"pass {found.name} is wrong: {found.error}"]
    if found.application:
        lines.append(f"first at its rewrite {found.application}: {found.node} ({short_place(found.place)})")
    if found.reason:
        lines.append(found.reason)
    return "\n".join(lines)


__all__ = ["bisect", "dump", "replay"]
