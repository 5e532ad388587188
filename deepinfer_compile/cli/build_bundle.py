"""`build`: from a model folder to a bundle, with the stages as they pass and a summary at the end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json, usage
from deepinfer_compile.cli.show import experts_in_words, plural, ranges, ranks_of, size, stdout
from deepinfer_compile.cli.stages import Stages

if TYPE_CHECKING:
    from deepinfer_compile.pipeline import Observer
    from deepinfer_compile.settings import ExpertPlan

JSON_OPTION = typer.Option("--json", help="Print the result, or the error, as one JSON document.")
DTYPE_OPTION = typer.Option(help="Computing type: auto (the checkpoint's), float32 or bfloat16.")
REPLAY_OPTION = typer.Option(
    help="Layers that share keys run on the wanted rows of a prompt, where that is exact (compact), or all (off)."
)
KEEP_OPTION = typer.Option(
    help="Rows of a prompt for layers above shared keys that have windows of their own; approximate. 0: all."
)
DECODE_HELP = "With --ranks: as many more processes decode, and those of --ranks read prompts."
WAIVE_OPTION = typer.Option(metavar="PASS", help="A pass that may miss what it must match; recorded. May be repeated.")


@guarded
def build(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="Hugging Face folder with config and safetensors.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Where the bundle goes.")],
    target: Annotated[list[str] | None, typer.Option(help="Where it will run; may be repeated. Default: cpu.")] = None,
    dtype: Annotated[str, DTYPE_OPTION] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest context; default: the model's own.")] = None,
    graph_only: Annotated[bool, typer.Option("--graph-only", help="No native code: runs anywhere, slowly.")] = False,
    isa: Annotated[str | None, typer.Option(help="x86-64-v3 or x86-64-v4 (cpu); default: this machine's.")] = None,
    weights: Annotated[str, typer.Option(help="copy into the bundle, link to MODEL_DIR, or none.")] = "copy",
    waive: Annotated[list[str] | None, WAIVE_OPTION] = None,
    tuned: Annotated[Path | None, typer.Option(metavar="DIR", help="Configurations that `tune --store` found.")] = None,
    replay: Annotated[str, REPLAY_OPTION] = "compact",
    keep: Annotated[int, KEEP_OPTION] = 0,
    ranks: Annotated[int | None, typer.Option(help="Spread the experts over as many processes.")] = None,
    slots: Annotated[int | None, typer.Option(help="With --ranks: experts of a layer, copies included.")] = None,
    decode_ranks: Annotated[int | None, typer.Option(help=DECODE_HELP)] = None,
    decode_slots: Annotated[int | None, typer.Option(help="With --decode-ranks: as --slots, of these.")] = None,
    dump: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every stage, its diff and remarks; reproducers too.")
    ] = None,
    print_after: Annotated[
        str | None, typer.Option(metavar="PASS", help="Print the graphs after a pass, after all, or where changed.")
    ] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Compile a model folder into a bundle.

    What is at OUT is replaced only by a complete bundle, and only if it is one. Progress goes to stderr.
    """
    import deepinfer_compile
    from deepinfer_compile.cli.facts import describe_bundle

    options: dict[str, Any] = {"dtype": dtype, "max_model_len": max_model_len, "native": not graph_only, "isa": isa}
    options |= {"weights": weights, "waive": waived(waive), "tuned": tuned, "replay": replay, "keep": keep}
    options["experts"] = _plan(ranks, slots, decode_ranks, decode_slots)
    observers = watchers(dump, print_after, to_stderr=as_json)
    with Stages(live=print_after is None) as stages:
        files = deepinfer_compile.build(model, out, target or "cpu", observers=observers, progress=stages, **options)
    found = describe_bundle(files)
    if as_json:
        print_json({**found, "stages": {name: round(s, 3) for name, s in stages.seconds.items()}})
        return
    _summary(found, out)


def _plan(
    ranks: int | None, slots: int | None, decode_ranks: int | None, decode_slots: int | None
) -> ExpertPlan | None:
    """Where experts go. Raises BadOption."""
    from deepinfer_compile.settings import ExpertPlan

    if ranks is None and slots is not None:
        raise usage("--slots", slots, "the experts are not spread", "add --ranks, or leave it out")
    if ranks is None and decode_ranks is not None:
        raise usage("--decode-ranks", decode_ranks, "no ranks read prompts", "add --ranks, or leave it out")
    if decode_ranks is None and decode_slots is not None:
        raise usage("--decode-slots", decode_slots, "no ranks decode alone", "add --decode-ranks, or leave it out")
    decode = None if decode_ranks is None else ExpertPlan(decode_ranks, decode_slots)
    return None if ranks is None else ExpertPlan(ranks, slots, decode)


def waived(names: list[str] | None) -> tuple[str, ...]:
    """The passes to waive. Raises UnknownPass for a name that no pass has, since it would waive nothing."""
    for name in names or ():
        known_pass(name)
    return tuple(names or ())


def known_pass(name: str) -> str:
    """The name of a pass, checked. Raises UnknownPass."""
    from deepinfer_compile.errors import UnknownPass
    from deepinfer_compile.passbase import registered

    known = registered()
    if name not in known:
        raise UnknownPass(name=name, known=", ".join(sorted(known)))
    return name


def watchers(dump: Path | None, print_after: str | None, *, to_stderr: bool) -> list[Observer]:
    """The observers that --dump and --print-after ask for. Raises UnknownPass, OutputExists."""
    import sys

    from deepinfer_compile.observe import Dump, PrintAfter, Reproducer

    found: list[Observer] = []
    if print_after is not None:
        which = print_after if print_after in ("all", "changed") else known_pass(print_after)
        found.append(PrintAfter(which, sys.stderr if to_stderr else sys.stdout))
    if dump is not None:
        found += [Dump(dump), Reproducer(dump)]
    return found


def _summary(found: dict[str, Any], out: Path) -> None:
    model, console = found["model"], stdout()
    console.print(f"{out}: {model['name']}, context {model['max_model_len']}, {size(found['bytes'])}", style="bold")
    for block in found["programs"][0]["blocks"] if found["programs"] else ():
        if block["layers"]:
            console.print(f"  {block['name']}: layers {ranges(block['layers'])}, {block['nodes']} nodes")
    console.print(f"  programs: {', '.join(p['name'] for p in found['programs'])}")
    for target, variant in found["variants"].items():
        kind = "native code" if variant["native"] else "graphs only (reference operations, slow)"
        needs = " ".join(str(v) for k, v in variant["requires"].items() if k == "isa")
        console.print(f"  {target}: {kind} {needs}".rstrip())
    if found["experts"]:
        console.print(f"  experts: {experts_in_words(found['experts'])}", soft_wrap=True)
    applied = sum(p["applied"] for p in found["passes"])
    missed = sum(len(p["missed"]) for p in found["passes"])
    console.print(f"  {plural(len(found['passes']), 'pass')}: {applied} applied, {missed} missed (report.md says why)")
    for waiver in found["waivers"]:
        console.print(f"  waived: {waiver}", style="yellow")
    for note in found["weights"]["notes"]:
        console.print(f"  {note}")
    ranks = ranks_of(found["experts"])
    start = "deepinfer-compile" if ranks == 1 else f"torchrun --nproc-per-node {ranks} -m deepinfer_compile.cli"
    console.print(f"  try: {start} run {out} --prompt 'Hello'")


__all__ = ["JSON_OPTION", "build", "known_pass", "waived", "watchers"]
