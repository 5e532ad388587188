"""Whose turn it is to run the engine.

There is no background thread. Whoever waits for results runs the next step, and whoever finds another thread at it
waits for that step and looks again; so several threads may generate, stream and cancel at once, and all their requests
share the batch. A stream that nobody reads advances only while others are read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from deepinfer_compile.runtime.call import Call, Parent
from deepinfer_compile.runtime.engine import Engine


class Driver:
    """Runs an engine for the calls of any number of threads."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.Condition()
        self._busy = False
        self._calls: dict[int, Call] = {}

    def parents(self) -> list[Parent]:
        """The prompts of all open calls, in order of arrival."""
        return [parent for call in list(self._calls.values()) for parent in call.parents]

    def submit(self, call: Call) -> None:
        """Queue all requests of a call."""
        self._calls[id(call)] = call
        for parent in call.parents:
            for child in parent.children:
                child.sink = call.sink
                self._engine.add(child)

    def advance(self, call: Call) -> None:
        """Run a step, or wait for the one another thread is running; return at once if `call` has news."""
        with self._turn:
            if call.sink:
                return
            if self._busy:
                self._turn.wait()
                return
            self._busy = True
        self._run(self._engine.step)

    def drop(self, call: Call) -> None:
        """Forget a call, cancel what is left of it and free its pages before returning."""
        self.abandon(call)
        self.reap(call.unfinished)

    def reap(self, needed: Callable[[], object] = lambda: True) -> None:
        """Take up what waits for the next step without running one, unless it is not `needed` any more."""
        with self._turn:
            while self._busy and needed():
                self._turn.wait()
            if not needed():
                return
            self._busy = True
        self._run(self._engine.reap)

    def abandon(self, call: Call) -> None:
        """Forget a call and ask for the end of what is left of it; pages are freed when someone next runs the engine.

        Never waits, so it may run inside the garbage collector.
        """
        self._calls.pop(id(call), None)
        for child in call.unfinished():
            self._engine.cancel(child.id)

    def _run(self, action: Callable[[], None]) -> None:
        """Run an engine action as the one thread at it, then wake the others."""
        try:
            action()
        finally:
            with self._turn:
                self._busy = False
                self._turn.notify_all()
