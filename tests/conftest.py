"""The order of the test files, and how often the garbage collector looks at what they hold."""

from __future__ import annotations

import gc

import pytest

LONGEST = ("test_interpreted.py",)
"""Files that take minutes: they go first, so that no worker is left alone with one at the end. xdist must be told not
to sort files by their number of tests."""


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end, so that the collector need not look for cycles among them at every turn."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 10)


def pytest_sessionfinish() -> None:
    """Extensions call what is still frozen at the end a leak."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
