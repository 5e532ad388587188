"""The stages of a long command as they pass: a spinner with the elapsed time on a terminal, a line each elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING

from deepinfer_compile.cli.show import stderr

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class Stages:
    """Call it with the name of each stage as it begins; use it as a context manager, which ends the last one.

    All output goes to stderr. live False prints lines even on a terminal, for commands that print something else too.
    seconds: how long each ended stage took; a name that comes twice is added up.
    """

    def __init__(self, live: bool = True) -> None:
        self.seconds: dict[str, float] = {}
        self._console = stderr()
        self._live = live and self._console.is_terminal
        self._name = ""
        self._begin = 0.0
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Stages:
        if self._live:
            from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

            columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
            self._bar.start()
        return self

    def __call__(self, name: str) -> None:
        self._end()
        self._name, self._begin = name, time.perf_counter()
        if self._bar is not None:
            self._task = self._bar.add_task(name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._end()
        if self._bar is not None:
            self._bar.stop()

    def _end(self) -> None:
        if not self._name:
            return
        took = time.perf_counter() - self._begin
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + took
        if self._bar is not None and self._task is not None:
            self._bar.remove_task(self._task)
        self._console.print(f"{self._name:<24} {took:8.2f} s")
        self._name = ""
