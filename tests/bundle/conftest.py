import os
from pathlib import Path

import pytest

from tests.bundle.support import write_small


@pytest.fixture(autouse=True)
def _no_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flushing to the disk costs most of the time of these tests and no kill of a process can show it."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A complete bundle at tmp_path/b."""
    return write_small(tmp_path / "b")
