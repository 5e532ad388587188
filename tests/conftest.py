"""The order of the test files."""

from __future__ import annotations

import pytest

LONGEST = ("test_interpreted.py",)
"""Files that take minutes: they go first, so that no worker is left alone with one at the end. xdist must be told not
to sort files by their number of tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
