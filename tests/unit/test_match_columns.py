"""A few columns show what a graph does to all of them only where each column is treated alone and alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from deepinfer_compile.capture import capture
from deepinfer_compile.match_columns import by_column
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.moe import MoE
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_experts import RaiseExperts
from deepinfer_compile.pipeline import Pipeline
from tests.passes.toys import Around, ops

Form = Callable[[Tensor, Tensor, Tensor], Tensor]

APART: dict[str, Form] = {
    "summed over experts": lambda x, share, scale: (x * share).sum(1),
    "cast": lambda x, share, scale: (x.double() * share).sum([0, 1]).float(),
    "added twice": lambda x, share, scale: (x + x * share).sum(-2),
}
MIXED: dict[str, Form] = {
    "one scale a column": lambda x, share, scale: (x * share * scale).sum(1),
    "summed over columns": lambda x, share, scale: (x * share).sum(-1, keepdim=True).sum(1),
    "columns in another order": lambda x, share, scale: (x.flip(-1) * share).sum(1),
    "columns of their neighbours": lambda x, share, scale: (x.roll(1, -1) * share).sum(1),
    "one column for all": lambda x, share, scale: (x[..., :1] * share + x).sum(1),
    "a running sum": lambda x, share, scale: (x.cumsum(-1) * share).sum(1),
    "what is made without it": lambda x, share, scale: share * scale,
}


def ends(form: Form) -> tuple[Node, Node]:
    """The tensor [tokens, experts, H] of a form's graph and what the form makes of it."""
    given = torch.rand(3, 4, 8), torch.rand(3, 4, 1), torch.rand(8)
    nodes = list(make_fx(form, tracing_mode="fake")(*given).graph.nodes)
    return nodes[0], nodes[-1].args[0]


@pytest.mark.parametrize("name", APART)
def test_columns_apart(name: str) -> None:
    assert by_column(*ends(APART[name]))


@pytest.mark.parametrize("name", MIXED)
def test_columns_that_meet(name: str) -> None:
    assert not by_column(*ends(MIXED[name]))


def test_experts_of_published_widths_are_raised() -> None:
    """All outputs for the tokens of a try would be larger than what a try may hold."""
    config = tiny.config().with_(n_routed_experts=384, num_experts_per_tok=6, hidden_size=5120, moe_intermediate_size=8)
    with torch.device("meta"):
        model = Around(MoE(config, 384, 6), config.hidden_size, torch.bfloat16).to(torch.bfloat16).eval()
    program, records = Pipeline((Canonicalize(), RaiseExperts())).run(capture(model.requires_grad_(False)))
    assert ops(program) == ["deepinfer.experts"]
    assert [r.reason for r in records[-1].remarks] == ["every expert on every token, 384 experts, swiglu_clamp"]
