"""The kernel that chooses tokens, without running it: what it takes, one config for any number of rows, sound cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from deepinfer_compile import ops
from deepinfer_compile.kernels import Call, Case, Refused, specs
from deepinfer_compile.targets.nvidia import SM90, _Made
from tests import sampled

SPEC = next(s for s in specs() if s.op is ops.SAMPLE)
SMALL = [c for c in SPEC.cases if sum(c.lengths) <= 1000]


def operands(case: Case[Any]) -> dict[str, Any]:
    made: dict[str, Any] = SPEC.inputs(case, torch.Generator().manual_seed(0))
    return made


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logits": torch.ones(14, 1009).double()}, "logits of torch.float64"),
        ({"logits": torch.ones(1, 14, 1009)}, "not rows of one known length"),
        ({"logits": torch.ones(1009, 14).t()}, "side by side"),
        ({"logits": torch.empty(1, (1 << 20) + 1, device="meta")}, "not of 1 to 1048576"),
        ({"logits": torch.ones(14, 0)}, "rows of 0 logits"),
        ({"noise": torch.ones(14)}, "'noise' of torch.float32 instead of torch.float64"),
        ({"top_k": torch.ones(14).long()}, "'top_k' of torch.int64"),
        ({"top_p": torch.ones(28)[::2]}, "'top_p' is not one number a row"),
        ({"temperature": torch.ones(14, 1)}, "'temperature' is not one number a row"),
    ],
)
def test_logits_that_are_not_taken(change: dict[str, Any], reason: str) -> None:
    given = operands(SMALL[0])
    assert not isinstance(SPEC.bind(Call(SPEC.op, given, "decode")), Refused)
    found = SPEC.bind(Call(SPEC.op, {**given, **change}, "decode"))
    assert isinstance(found, Refused)
    assert reason in found.reason


def test_a_row_is_summed_in_one_order_whatever_the_batch() -> None:
    for case in SPEC.cases:
        assert len({SPEC.default(case.params, SM90.limits, tokens) for tokens in (1, 8, 64, 8192)}) == 1


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_rounding_decides_no_row_of_the_cases(case: Case[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a kernel must give the reference's ids; fp32 sums of a row are good to a few parts in 10 million."""
    monkeypatch.setattr(sampled, "NUDGE", 1e-6)
    for seed in (0, 1):
        _, certain = sampled.certain(SPEC.inputs(case, torch.Generator().manual_seed(seed)))
        assert certain.all()


def test_a_build_says_why_tokens_are_chosen_on_the_host() -> None:
    made = _Made(SM90, lambda text: None, None)
    assert made.sampler(torch.empty(3, 9, dtype=torch.float16), None) == ""  # type: ignore[arg-type]
    assert made.notes() == ("tokens are chosen on the host: sample: logits of torch.float16 have no kernel",)
