"""One spelling: no assertions, no copies, reshapes with -1, and nothing that means something removed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import to_text
from deepinfer_compile.passes.canonicalize import Canonicalize
from tests.golden_text import check_golden
from tests.passes.harness import calls, check_equal, run_passes
from tests.passes.stages import captured


@pytest.mark.parametrize("name", ["llama", "deepseek_v2", "gpt_oss"])
def test_canonical_equals_eager(name: str) -> None:
    model, before = captured(name)
    program, _ = run_passes(model, Canonicalize(), program=before)
    for gone in ("aten._assert_tensor_metadata", "aten.view", "aten.clone", "aten.contiguous"):
        assert calls(program, gone) == 0
    check_equal(program, model)
    _, records = run_passes(model, Canonicalize(), program=program)
    assert records[-1].count("applied") == 0


class Toy(nn.Module):
    """Views, casts and slices of which only some do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.w[input_ids % 8]
        x = x.to(torch.float32).contiguous().clone()
        x = x.view(input_ids.shape[0], input_ids.shape[1], 2, 4).flatten(2)
        x = x[:, :, 0:] + x[:, :, :4].repeat(1, 1, 2)
        return torch.dropout(x, 0.5, False).double().float()


def test_only_what_does_nothing_goes() -> None:
    program, _ = run_passes(Toy(), Canonicalize())
    text = "\n".join(to_text(gm) for gm in program.blocks.values())
    check_golden("canonicalize", text)
    assert "f64" in text, "a cast that rounds is no identity"
    model = Toy()
    captured = capture(model)
    ids = torch.tensor([[1, 5, 3]])
    bound = {name: model.w.detach() for name in captured.weights}
    assert torch.equal(captured.run({**bound, "input_ids": ids}), model(ids))


class Guarded(nn.Module):
    """What a partitionable expert block does with ids: mask and clamp those of other ranks. `width` scores."""

    def __init__(self, width: int, bound: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(7, width))
        self.bound = bound

    def forward(self, input_ids: Tensor) -> Tensor:
        scores = self.w[input_ids[0] % 7]
        ids = scores.topk(2, dim=-1).indices.reshape(-1).sort().values
        x = scores.sum(-1, keepdim=True).repeat_interleave(2, 0).masked_fill((ids >= self.bound).unsqueeze(-1), 0.0)
        return (x[:, 0] * ids.clamp(max=self.bound - 1))[None]


@pytest.mark.parametrize(("width", "bound", "left"), [(5, 5, 0), (5, 6, 0), (5, 4, 1), (5, 1, 1)])
def test_guards_against_ids_that_a_top_k_never_gives(width: int, bound: int, left: int) -> None:
    model = Guarded(width, bound)
    program, _ = run_passes(model, Canonicalize())
    text = "".join(to_text(gm) for gm in program.blocks.values())
    assert text.count("aten.masked_fill.Scalar(") == text.count("aten.clamp(") == left
    ids = torch.tensor([[1, 5, 3, 6, 2]])
    bound_weights = {name: model.w.detach() for name in program.weights}
    assert torch.equal(program.run({**bound_weights, "input_ids": ids}), model(ids))
