"""`render`: print the source of a kernel again from its stamp."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_compile.cli.boundary import guarded


@guarded
def render(
    stamp: Annotated[str, typer.Argument(metavar="STAMP", help="First line of a rendered source, or the file.")],
) -> None:
    """Print the source that a stamp describes, byte for byte, if this version has the same template."""
    from deepinfer_compile.kernels import render_stamp

    print(render_stamp(_line(stamp)), end="")


def _line(stamp: str) -> str:
    """The stamp itself, or the first line of the file of that name."""
    if "{" in stamp or not Path(stamp).is_file():
        return stamp
    with Path(stamp).open(encoding="utf-8", errors="replace") as file:
        return file.readline(1 << 16)


__all__ = ["render"]
