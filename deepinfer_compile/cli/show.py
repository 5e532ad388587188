"""How things are printed: results on stdout, everything about the work on stderr, numbers in units people read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_compile.runtime.roles import plans_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 120
"""Columns where the output is no terminal."""


def stdout() -> Console:
    """The console for results."""
    return _console(stderr=False)


def stderr() -> Console:
    """The console for progress, timings and errors."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    found = Console(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not found.is_terminal:
        found.width = WIDTH
    return found


def table(*columns: str, numbers: Sequence[str] = ()) -> Table:
    """An empty table without borders; columns named in `numbers` are set to the right."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    return made


def size(count: float) -> str:
    """Bytes as `512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5, 7-8`, or `-` for none."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "-"


def short_place(text: str) -> str:
    """Text without the folder that packages are installed in, which is particular to one machine."""
    return re.sub(r"[^\s\"'(]*/site-packages/", "", text)


def plural(count: int, word: str) -> str:
    """`1 layer`, `3 layers`, `2 passes`."""
    end = "es" if word.endswith(("s", "x", "ch")) else "s"
    return f"{count} {word}" if count == 1 else f"{count} {word}{end}"


def experts_in_words(section: Mapping[str, Any]) -> str:
    """Where the experts of a bundle go."""
    words = [_plan_in_words(plan) for plan in plans_of(section).values()]
    return words[0] if len(words) == 1 else f"to read prompts {words[0]}; to decode {words[1]}"


def _plan_in_words(plan: Mapping[str, int]) -> str:
    where = f"{plural(plan['layers'], 'layer')} over {plural(plan['ranks'], 'rank')}"
    return f"{plan['experts']} in {plural(plan['slots'], 'slot')} of {where}, at most {plan['room']} of a layer on each"


def ranks_of(section: Mapping[str, Any]) -> int:
    """How many processes a bundle runs as."""
    return sum(plan["ranks"] for plan in plans_of(section).values()) if section else 1


__all__ = ["experts_in_words", "plural", "ranges", "ranks_of", "short_place", "size", "stderr", "stdout", "table"]
