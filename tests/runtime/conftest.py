"""Disks that wait until they are let through."""

from __future__ import annotations

import threading

import pytest

from deepinfer_compile.runtime import options
from tests.runtime.folders import Folder


class Slow(Folder):
    """A disk whose reads and writes wait until they are let through. entered: one of them has begun."""

    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.reads, self.writes, self.entered = threading.Event(), threading.Event(), threading.Event()
        self.reads.set()
        self.writes.set()
        self.error_to_raise: Exception | None = None

    def _pass(self, gate: threading.Event) -> None:
        self.entered.set()
        assert gate.wait(60)
        if self.error_to_raise is not None:
            raise self.error_to_raise

    def read_span(self, *args):
        self._pass(self.reads)
        return super().read_span(*args)

    def write_run(self, *args):
        self._pass(self.writes)
        super().write_run(*args)


@pytest.fixture
def slow(monkeypatch):
    """Engines get slow disks; those made are in the list, and let through at the end."""
    made: list[Slow] = []

    def make(*args, **named):
        made.append(Slow(*args, **named))
        return made[-1]

    monkeypatch.setattr(options, "DiskPages", make)
    yield made
    for disk in made:
        disk.reads.set()
        disk.writes.set()
