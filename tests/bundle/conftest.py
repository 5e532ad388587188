from pathlib import Path

import pytest

from tests.bundle.support import write_small


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A complete bundle at tmp_path/b."""
    return write_small(tmp_path / "b")
