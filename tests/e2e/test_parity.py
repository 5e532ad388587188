"""Acceptance: greedy tokens equal eager Transformers for every architecture. Three of them natively, the rest natively
too in `make test-all`."""

from pathlib import Path

import pytest

from tests import models
from tests.e2e.parity import check_parity

NATIVE = ("llama", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("name", models.CONFIGS)
def test_graph_programs_equal_eager(name: str, tmp_path: Path) -> None:
    check_parity(models.make(name), tmp_path / "b", native=False, count=32)


# gemma4_text hands parts of one rotary table from block to block
@pytest.mark.parametrize(
    "name", [n if n in NATIVE else pytest.param(n, marks=pytest.mark.slow) for n in (*models.CONFIGS, "gemma4_text")]
)
def test_native_programs_equal_eager(name: str, tmp_path: Path) -> None:
    check_parity(models.make(name), tmp_path / "b", native=True)
