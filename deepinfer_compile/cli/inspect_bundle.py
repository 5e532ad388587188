"""`inspect`: what is in a bundle, verified but not loaded."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.kernel_words import choice_words
from deepinfer_compile.cli.show import experts_in_words, plural, ranges, size, stdout, table
from deepinfer_compile.remarks import remarks

if TYPE_CHECKING:
    from rich.console import Console


@guarded
def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Show a bundle: model, programs, caches, variants, passes, weights, files."""
    from deepinfer_compile.bundle import read_bundle
    from deepinfer_compile.cli.facts import describe_bundle

    found = describe_bundle(read_bundle(bundle))
    if as_json:
        print_json(found)
        return
    console = stdout()
    for part in (_model, _programs, _experts, _caches, _variants, _kernels, _passes, _weights, _files):
        part(found, console)


def _model(found: dict[str, Any], console: Console) -> None:
    model, made = found["model"], found["build"]
    console.print(f"{model['name']}  {found['path']}  {size(found['bytes'])}", style="bold", soft_wrap=True)
    ends = ", ".join(map(str, model.get("eos_token_ids", ()))) or "none"
    console.print(f"vocabulary {model['vocab_size']}, context {model['max_model_len']}, end-of-text ids {ends}")
    tokenizer = found["tokenizer"]
    chat = "with a chat template" if tokenizer["chat"] else "without a chat template"
    console.print(f"tokenizer {chat}" if tokenizer["present"] else "no tokenizer: prompts are token ids")
    console.print(f"built by deepinfer-compile {made.get('version', '?')} with torch {made.get('torch', '?')}")
    for remark in remarks(model.get("info", {})):
        console.print(remark, soft_wrap=True)


def _programs(found: dict[str, Any], console: Console) -> None:
    shown = table("program", "block", "layers", "calls", "nodes", "operations", numbers=("calls", "nodes"))
    for program in found["programs"]:
        for b in program["blocks"]:
            ops = ", ".join(f"{name.split('.', 1)[1]} {count}" for name, count in b["operations"].items())
            shown.add_row(program["name"], b["name"], ranges(b["layers"]), str(b["calls"]), str(b["nodes"]), ops or "-")
    console.print("\nPrograms", style="bold")
    console.print(shown)


def _experts(found: dict[str, Any], console: Console) -> None:
    if found["experts"]:
        console.print("\nExperts", style="bold")
        console.print(experts_in_words(found["experts"]), soft_wrap=True)


def _caches(found: dict[str, Any], console: Console) -> None:
    numbers = ("bytes a token and layer",)
    shown = table("kind", "layers", "window", "type", "page shape", "bytes a token and layer", numbers=numbers)
    for c in found["caches"]:
        window = str(c["window"]) if c["window"] else "-"
        shape = " x ".join(map(str, c["shape"]))
        shown.add_row(c["kind"], ranges(c["layers"]), window, c["dtype"], shape, f"{c['bytes_per_token']:g}")
    console.print("\nCaches", style="bold")
    console.print(shown)
    limit = found["model"]["max_model_len"]
    whole = f"one request of {limit} tokens {size(found['cache_bytes_per_request'])}"
    console.print(f"{found['cache_bytes_per_token']:g} bytes a token over all layers, {whole}")


def _variants(found: dict[str, Any], console: Console) -> None:
    console.print("\nVariants", style="bold")
    for target, v in found["variants"].items():
        needs = ", ".join(f"{k} {value}" for k, value in v["requires"].items())
        kind = f"native, {plural(len(v['blocks']), 'block')}, needs {needs}" if v["native"] else "graphs only"
        console.print(f"{target}: {kind}")
        for note in v["notes"]:
            console.print(f"  {note}")


def _kernels(found: dict[str, Any], console: Console) -> None:
    """Kernels of every node by number of tokens, one figure a launch, and what was left, with the reason; programs with
    equal lines share them."""
    for target in dict.fromkeys(row["target"] for row in found["kernels"]):
        bound: dict[tuple[str, ...], list[str]] = {}
        left: dict[tuple[str, str], Counter[str]] = {}
        for row in (r for r in found["kernels"] if r["target"] == target):
            if "left" in row:
                left.setdefault((row["op"], row["left"]), Counter())[row["program"]] += 1
                continue
            lines = tuple(choice_words(choice) for choice in row["choices"])
            bound.setdefault((f"{row['block']} {row['node']}: {row['kernel']}", *lines), []).append(row["program"])
        console.print(f"\nKernels of {target}", style="bold")
        console.print(f"work: a token a request with {found['context']} of context, in prefill one prompt")
        for (head, *choices), programs in bound.items():
            console.print("\n  ".join((f"{', '.join(programs)}: {head}", *choices)), soft_wrap=True)
        shown = table("without a kernel", "because", "nodes")
        for (op, reason), counts in left.items():
            shown.add_row(op, reason, ", ".join(f"{count} in {program}" for program, count in counts.items()))
        console.print(shown)


def _passes(found: dict[str, Any], console: Console) -> None:
    shown = table("program", "pass", "nodes", "applied", "missed", "seconds", numbers=("applied", "missed", "seconds"))
    for p in found["passes"]:
        before, after = p["nodes"]
        counts = (str(p["applied"]), str(len(p["missed"])), f"{p['seconds']:.3f}")
        shown.add_row(p["program"], p["name"], f"{before} -> {after}", *counts)
    console.print("\nPasses", style="bold")
    console.print(shown)
    for waiver in found["waivers"]:
        console.print(f"waived: {waiver}", style="yellow", soft_wrap=True)
    if not found["waivers"]:
        console.print("no waivers")


def _weights(found: dict[str, Any], console: Console) -> None:
    w = found["weights"]
    where = {"copy": "in the bundle", "link": f"linked to {w['folder']}", "none": "not in the bundle"}[w["mode"]]
    console.print("\nWeights", style="bold")
    console.print(f"{plural(w['tensors'], 'tensor')}, {size(w['bytes'])}, {where}", soft_wrap=True)
    kinds = ", ".join(f"{name} {count}" for name, count in w["recipes"].items())
    console.print(f"recipes: {kinds or 'none'}; computed at capture: {w['constants']}; not used: {w['ignored']}")
    for group in w["tied"]:
        console.print(f"tied: {' = '.join(group)}", soft_wrap=True)
    for note in w["notes"]:
        console.print(note, soft_wrap=True)


def _files(found: dict[str, Any], console: Console) -> None:
    shown = table("file", "size", numbers=("size",))
    for name, count in found["files"].items():
        shown.add_row(name, size(count))
    console.print("\nFiles", style="bold")
    console.print(shown)


__all__ = ["inspect"]
