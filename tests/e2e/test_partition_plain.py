"""A plain PyTorch model, one module an expert, over three processes."""

from __future__ import annotations

from pathlib import Path

from deepinfer_compile.settings import ExpertPlan
from tests.e2e.partitioned import check_all
from tests.plain_model import VOCAB, make_plain


def test_stacks_of_the_modules_of_a_rank(tmp_path: Path) -> None:
    """What a rank holds is stacked from the modules of its experts; the third rank has nothing to complete."""
    check_all(make_plain("loop"), tmp_path, ExpertPlan(ranks=3), VOCAB, 44)
