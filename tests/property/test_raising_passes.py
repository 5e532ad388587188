"""Every raising pass alone, on the functional graphs of random programs: the values stay what they were.

`test_backend_programs` does the same with all its programs.
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_compile.presets import BACKEND, RAISE
from tests.property.alone import ALONE, door_and_passes
from tests.property.checking import Report, check
from tests.property.patterns import PATTERNS
from tests.property.writing import write

SOME = [p for i, p in enumerate(PATTERNS) if i % 19 == 0 or p.name in ("latent ", "experts by_stack")]


def test_every_raising_pass_of_the_presets_is_here() -> None:
    """But one that changes what a program returns, which `test_raise_output_projection` compares, and those that only
    bundles have, which `test_raise_rotary_table` and so on compare on every spelling."""
    elsewhere = {"raise-output-projection", "raise-rotary-table", "raise-recent", "raise-selected-attention"}
    elsewhere |= {"raise-hyper-connections", "raise-packed-rows"}
    named = {p.name for p in (*RAISE, *BACKEND) if p.name.startswith("raise-")} - elsewhere
    assert {p.name for passes in ALONE.values() for p in passes} == named


def test_passes_alone() -> None:
    """Programs around enough patterns that every pass has something to do."""
    rewrites: Counter[str] = Counter()
    for i, pattern in enumerate(SOME):
        program = write(70_000 + i, (pattern,), lines=3)
        check(program, door_and_passes(rewrites))
    assert all(rewrites[name] for name in ALONE), rewrites


def test_a_mask_of_one_length() -> None:
    """A graph traced for one length has a mask that cannot be tried at others: it stays an operand."""

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(5, 5).tril().flip(0).bool())

    torch._dynamo.reset()
    rewrites: Counter[str] = Counter()
    q = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    run = torch.compile(attend, backend=door_and_passes(rewrites)(Report()), dynamic=False)
    assert torch.allclose(run(q), attend(q), rtol=0, atol=1e-6)
    assert rewrites["packed attention"] == 1
