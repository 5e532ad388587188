"""`explain`: for each kind of layer, what each pass rewrote, what it left alone, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION, WAIVE_OPTION, waived
from deepinfer_compile.cli.kernel_words import choice_words
from deepinfer_compile.cli.show import plural, ranges, short_place, stdout
from deepinfer_compile.cli.stages import Stages
from deepinfer_compile.errors import BadOption
from deepinfer_compile.remarks import remarks, split_remarks

if TYPE_CHECKING:
    from rich.console import Console

    from deepinfer_compile.builder import Compiled
    from deepinfer_compile.bundle import BundleFiles
    from deepinfer_compile.models.own import Own

WHOLE = "whole model"
MEASURE_HELP = "Also time the bundle's kernels on this machine's GPU."
SUBJECT_HELP = "A model folder or config.json (no weights needed), a bundle, or an architecture such as deepseek_v3."


@guarded
def explain(
    subject: Annotated[str, typer.Argument(metavar="MODEL_DIR|BUNDLE|ARCH", help=SUBJECT_HELP)],
    waive: Annotated[list[str] | None, WAIVE_OPTION] = None,
    measured: Annotated[bool, typer.Option("--measure", help=MEASURE_HELP)] = False,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Say what each pass applied and missed, per kind of layer, and why; of a bundle also the kernel of each node."""
    if (Path(subject) / "manifest.json").is_file():
        from deepinfer_compile.bundle import read_bundle
        from deepinfer_compile.cli.measuring import measure

        files = read_bundle(Path(subject))
        found = explain_bundle(files)
        if measured:
            measure(files, found["kernels"])
    elif measured:
        reason = f"{subject} is not a bundle"
        raise BadOption(name="measure", value=True, reason=reason, fix="build one, and explain that")
    elif (own := _own(subject)) is not None:
        from deepinfer_compile.cli.explain_prefill import explain_own, print_own

        found = explain_own(own)
        if not as_json:
            print_own(found, stdout())
            return
    else:
        from deepinfer_compile.cli.opening import compile_source, open_graph

        with Stages() as stages:
            stages("open")
            source = open_graph(subject)
            stages("capture and passes")
            found = explain_compiled(compile_source(source, waived(waive)))
    if as_json:
        print_json(found)
        return
    _print(found, stdout())


def _own(subject: str) -> Own | None:
    from deepinfer_compile.models import own

    return own.find(subject)


def explain_compiled(compiled: Compiled) -> dict[str, Any]:
    """All remarks by kind of layer, program and pass, with their reasons counted."""
    layers = {block: program.layers_of(block) for program in compiled.programs.values() for block in program.blocks}
    kinds: dict[str, dict[str, Any]] = {block: _kind(block, at) for block, at in layers.items()}
    for program, records in compiled.records.items():
        for record in records:
            for graph in dict.fromkeys(r.graph for r in record.remarks):
                remarks = [r for r in record.remarks if r.graph == graph]
                kind = kinds.setdefault(graph or WHOLE, _kind(graph or WHOLE, list(remarks[0].layers)))
                applied = Counter(r.reason for r in remarks if r.kind == "applied")
                missed = [{"node": r.node, "reason": r.reason, "place": r.place} for r in remarks if r.kind == "missed"]
                entry = {"program": program, "pass": record.name, "applied": sum(applied.values())}
                kind["passes"].append({**entry, "reasons": dict(applied), "missed": missed})
    quiet = [f"{p}/{r.name}" for p, records in compiled.records.items() for r in records if not r.remarks]
    info = {k: v for k, v in compiled.captured.info.items() if k != "tied"}
    waivers = [r.waived for records in compiled.records.values() for r in records if r.waived]
    split = split_remarks({name: program.info for name, program in compiled.programs.items()})
    found = {"model": compiled.source.name, "info": info, "split": split, "kinds": _ordered(kinds)}
    return {**found, "quiet": quiet, "waivers": waivers}


def explain_bundle(files: BundleFiles) -> dict[str, Any]:
    """What a bundle recorded: misses per graph, and how often each pass applied over all graphs."""
    from deepinfer_compile.cli.facts import describe_kernels
    from deepinfer_compile.runtime.stored import read_programs

    manifest = files.manifest
    kinds: dict[str, dict[str, Any]] = {}
    programs = read_programs(files).programs
    for program_data in programs.values():
        for node in program_data["skeleton"]["nodes"]:
            if node["op"] == "block":
                kind = kinds.setdefault(node["target"], _kind(node["target"], []))
                kind["layers"] += [node["layer"]] if node.get("layer") is not None else []
    whole = _kind(WHOLE, [])
    quiet: list[str] = []
    for program, records in manifest.build.get("passes", {}).items():
        for record in records:
            base = {"program": program, "pass": record["name"]}
            for graph in dict.fromkeys(g for g, *_ in record["missed"]):
                missed = [{"node": n, "reason": why, "place": ""} for g, n, why in record["missed"] if g == graph]
                kind = kinds.setdefault(graph or WHOLE, _kind(graph or WHOLE, []))
                kind["passes"].append({**base, "applied": 0, "reasons": {}, "missed": missed})
            if record["applied"]:
                whole["passes"].append({**base, "applied": record["applied"], "reasons": {}, "missed": []})
            elif not record["missed"]:
                quiet.append(f"{program}/{record['name']}")
    for kind in kinds.values():
        kind["layers"] = sorted(set(kind["layers"]))
    model = str(manifest.model["name"])
    info = {k: v for k, v in manifest.model.get("info", {}).items() if k != "tied"}
    found = _ordered({**kinds, WHOLE: whole})
    kernels = describe_kernels(files, programs)
    split = split_remarks({name: data["info"] for name, data in programs.items()})
    made = {"model": model, "info": info, "split": split, "kinds": found, "quiet": quiet}
    made["waivers"] = list(manifest.waivers)
    return {**made, "kernels": kernels}


def _kind(name: str, layers: list[int]) -> dict[str, Any]:
    return {"name": name, "layers": layers, "passes": []}


def _ordered(kinds: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Layers first, by their first layer; then what is outside layers and has something to say."""
    inside = sorted((k for k in kinds.values() if k["layers"]), key=lambda k: int(k["layers"][0]))
    return inside + [k for k in kinds.values() if not k["layers"] and k["passes"]]


def _print(found: dict[str, Any], console: Console) -> None:
    console.print(found["model"], style="bold")
    for remark in (*remarks(found["info"]), *found["split"]):
        console.print(remark, soft_wrap=True)
    for kind in found["kinds"]:
        at = (
            f"layers {ranges(kind['layers'])} ({len(kind['layers'])}), {kind['name']}"
            if kind["layers"]
            else kind["name"]
        )
        console.print(f"\n{at}", style="bold")
        if not kind["passes"]:
            console.print("  no pass had anything to do here")
        for p in kind["passes"]:
            _print_pass(p, console)
        _print_kernels([k for k in found.get("kernels", ()) if k["block"] == kind["name"]], console)
    shown = {kind["name"] for kind in found["kinds"]}
    for block in dict.fromkeys(k["block"] for k in found.get("kernels", ()) if k["block"] not in shown):
        console.print(f"\n{block}", style="bold")
        _print_kernels([k for k in found["kernels"] if k["block"] == block], console)
    if found["quiet"]:
        console.print(f"\nfound no candidate: {', '.join(found['quiet'])}", soft_wrap=True)
    for waiver in found["waivers"]:
        console.print(f"waived: {waiver}", style="yellow", soft_wrap=True)


def _print_pass(p: dict[str, Any], console: Console) -> None:
    said = [(f"{count} x {reason}", "") for reason, count in p["reasons"].items()]
    if p["applied"] and not said:
        said.append((f"{p['applied']} applied", ""))
    for reason, nodes, place in _grouped(p["missed"]):
        at = f" ({short_place(place)})" if place else ""
        said.append((f"missed {plural(len(nodes), 'node')}: {reason}: {nodes[0]}{at}", "yellow"))
    for i, (words, style) in enumerate(said):
        head = f"{p['program']:<8} {p['pass']:<24}" if i == 0 else ""
        console.print(f"  {head:<33} {words}", style=style, soft_wrap=True)


def _print_kernels(kernels: list[dict[str, Any]], console: Console) -> None:
    """The kernels of each node of a block; programs with equal lines share them."""
    shown: dict[tuple[str, ...], list[str]] = {}
    for k in kernels:
        head = f"{k['node']}: {k.get('kernel') or 'no kernel, ' + k['left']} on {k['target']}"
        shown.setdefault((head, *map(choice_words, k.get("choices", ()))), []).append(k["program"])
    for (head, *choices), programs in shown.items():
        console.print("\n    ".join((f"  {', '.join(programs)} {head}", *choices)), soft_wrap=True)


def _grouped(missed: Iterable[dict[str, str]]) -> list[tuple[str, list[str], str]]:
    """Misses of one reason together: reason, nodes, place of the first."""
    found: dict[str, tuple[list[str], str]] = {}
    for m in missed:
        found.setdefault(m["reason"], ([], m["place"]))[0].append(m["node"])
    return [(reason, nodes, place) for reason, (nodes, place) in found.items()]


__all__ = ["explain", "explain_bundle", "explain_compiled"]
