"""A progress bar on stderr, drawn by rich, which is imported only when a bar is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, int], None]
"""Called with the number of ended requests and of their output tokens."""


@contextmanager
def progress_bar(wanted: bool, total: int) -> Iterator[Show]:
    """A function to report progress to, for the time of the block."""
    if not wanted:
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[tokens]} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("requests", total=total, tokens=0)
        yield lambda ended, tokens: progress.update(task, completed=ended, tokens=tokens)
