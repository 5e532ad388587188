"""The report of a build: what was captured, what each pass did, what runs where. Markdown and one HTML page."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from deepinfer_compile.bundle import Manifest
from deepinfer_compile.remarks import remarks, split_remarks

if TYPE_CHECKING:
    from deepinfer_compile.builder import Compiled


def write_report(compiled: Compiled, manifest: Manifest) -> dict[str, str]:
    """report.md and report.html by path."""
    text = markdown(compiled, manifest)
    page = f"<!doctype html><meta charset=utf-8><title>Build report</title><pre>{html.escape(text)}</pre>\n"
    return {"report.md": text, "report.html": page}


def markdown(compiled: Compiled, manifest: Manifest) -> str:
    """The report as Markdown."""
    model = manifest.model
    lines = [f"# {model['name']}", "", f"vocabulary {model['vocab_size']}, context {model['max_model_len']}", ""]
    lines += [f"- {key}: {value:.2f} s" for key, value in compiled.seconds.items()]
    lines += [f"- {remark}" for remark in remarks(compiled.captured.info)]
    lines += [f"- {remark}" for remark in split_remarks({n: p.info for n, p in compiled.programs.items()})]
    lines += ["", "## Blocks", "", "| program | block | layers | nodes |", "|---|---|---|---|"]
    for name, program in compiled.programs.items():
        for block, gm in program.blocks.items():
            lines.append(f"| {name} | {block} | {program.layers_of(block) or '-'} | {len(gm.graph.nodes)} |")
    lines += [
        "",
        "## Passes",
        "",
        "| program | pass | seconds | nodes | applied | missed |",
        "|---|---|---|---|---|---|",
    ]
    for name, records in compiled.records.items():
        for r in records:
            nodes = f"{r.nodes_before} -> {r.nodes_after}"
            lines.append(
                f"| {name} | {r.name} | {r.seconds:.3f} | {nodes} | {r.count('applied')} | {r.count('missed')} |"
            )
    lines += ["", "## Missed", ""]
    for name, records in compiled.records.items():
        for r in records:
            lines += [f"- {name}, {r.name}, {m.graph}: {m.node}: {m.reason}" for m in r.remarks if m.kind == "missed"]
    lines += ["", "## Variants", ""]
    for target, variant in manifest.variants.items():
        kind = "native" if variant["native"] else "graph-only"
        lines.append(f"- {target}: {kind} {variant['requires'] or ''}".rstrip())
        lines += [f"  - {note}" for note in variant["notes"]]
        lines += [f"  - compiled {name[:12]} in {s:.1f} s" for name, s in variant["seconds"].items()]
        lines += _tuning(variant, manifest.tuning.get(target))
    if manifest.waivers:
        lines += ["", "## Waivers", "", *(f"- {w}" for w in manifest.waivers)]
    return "\n".join(lines) + "\n"


def _tuning(variant: dict[str, Any], tuning: dict[str, Any] | None) -> list[str]:
    """Where the configuration of each kernel is from, if any was measured."""
    lines = []
    for name in variant["kernels"] if tuning is not None else ():
        told = tuning["kernels"].get(name, ()) if tuning is not None else ()
        parts = [f"tuned, {t['us']:.1f} us at {t['tokens']} tokens on {tuning['device']}" for t in told if tuning]
        lines.append(f"  - configuration of {name[:12]}: {'; '.join(dict.fromkeys(parts)) or 'default'}")
    return lines
