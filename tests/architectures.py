"""Which architectures a test of each of them always runs on."""

import pytest

from tests.models import ALIKE, CONFIGS

FIRST = [pytest.param(name, marks=pytest.mark.slow) if name in ALIKE else name for name in CONFIGS]
"""All of them, those that are like others in `make test-all` only."""
