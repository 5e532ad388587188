"""`support`: the table of architectures, made by trying each one on a tiny model. Nothing in it is written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import plural, short_place, stdout
from deepinfer_compile.cli.stages import Stages

if TYPE_CHECKING:
    from deepinfer_compile.cli.examine import Row


@guarded
def support(
    names: Annotated[list[str] | None, typer.Argument(metavar="[ARCH]...", help="Only these; default: all.")] = None,
    write: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as Markdown.")] = None,
    as_json: Annotated[bool, JSON_OPTION] = False,
) -> None:
    """Try every known architecture: capture, passes, and logits against eager; all of them take some minutes."""
    from deepinfer_compile.cli.examine import examine

    chosen = _chosen(names)
    rows = []
    with Stages() as stages:
        for name in chosen:
            stages(name)
            rows.append(examine(name))
    if write is not None:
        _write(write, markdown(rows))
    if as_json:
        print_json([row.as_json() for row in rows])
        return
    stdout().print(markdown(rows), soft_wrap=True)


def _chosen(names: list[str] | None) -> list[str]:
    """Names to try. Raises UnsupportedArchitecture for one that has no tiny model."""
    import difflib

    from deepinfer_compile.errors import UnsupportedArchitecture
    from deepinfer_compile.models import more, tiny

    known = [*tiny.CONFIGS, *more.MORE]
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, 3)
            fix = f"did you mean {' or '.join(near)}?" if near else f"use one of {', '.join(known)}"
            raise UnsupportedArchitecture(name=name, reason="there is no tiny model of it to try", fix=fix)
    return names or known


def markdown(rows: list[Row]) -> str:
    """The table, what runs before what does not, and where what does not stopped."""
    import torch

    good = sorted((r for r in rows if r.supported), key=lambda r: r.kind)
    bad = sorted((r for r in rows if not r.supported), key=lambda r: r.kind)
    versions = f"torch {torch.__version__}, transformers {_transformers()}"
    lines = [f"{len(good)} of {plural(len(rows), 'architecture')} ({versions}).", ""]
    if good:
        lines += ["| architecture | class | layers (distinct) | operations | error |", "|---|---|---|---|---|"]
        for r in good:
            ops = ", ".join(f"{name} {count}" for name, count in r.operations.items())
            lines.append(f"| {_name(r)} | {r.model} | {r.layers} ({r.blocks}) | {ops} | {r.error:.1e} |")
        lines.append("")
    if bad:
        lines += ["| not supported | class | stops at | because |", "|---|---|---|---|"]
        lines += [f"| {_name(r)} | {r.model} | {r.stage} | {_cell(r.problem)} |" for r in bad]
        lines.append("")
    return "\n".join(lines)


def _name(row: Row) -> str:
    return row.kind if row.kind == row.architecture else f"{row.kind or '?'} ({row.architecture})"


def _cell(text: str) -> str:
    """Text on one line, without what would end a cell or is particular to this machine."""
    return short_place(" ".join(text.split())).replace("|", "\\|")


def _transformers() -> str:
    from deepinfer_compile.capture import hf

    return str(hf.transformers().__version__)


def _write(file: Path, text: str) -> None:
    """Replace the file in one step. Raises OutputFailed."""
    from deepinfer_compile.errors import OutputFailed

    scratch = file.with_name(f".{file.name}.tmp")
    try:
        scratch.write_text(text)
        scratch.replace(file)
    except OSError as err:
        scratch.unlink(missing_ok=True)
        raise OutputFailed(path=file, reason=err.strerror or str(err)) from None


__all__ = ["markdown", "support"]
