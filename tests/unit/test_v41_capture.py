"""DeepSeek-V4.1 as graphs: one export of the sequence for every length, one of a step for every position."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.models.deepseek_v41.generate import State, prefill, step
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41

# every role once: a window, pooled rows and a reader, the boundary, a layer that chooses anew
SHORT: dict[str, Any] = {
    "num_hidden_layers": 5,
    "compress_ratios": (0, 2, 2, 1, 1),
    "kv_source_layer_ids": (1, 3),
    "index_source_layer_ids": (1, 3, 4),
    "candidate_source_layer_id": 3,
    "engram_layer_ids": (1,),
    "dspark_target_layer_ids": (3, 4),
    "hc_sinkhorn_iters": 3,
}


@pytest.fixture(scope="module")
def model() -> DeepseekV41:
    return tiny.make(dtype=torch.float64, **SHORT).requires_grad_(False)


def test_one_graph_serves_every_length(model: DeepseekV41) -> None:
    length = torch.export.Dim("length", min=1, max=512)
    ids, places = torch.arange(37).unsqueeze(0), torch.arange(37).unsqueeze(0)
    shapes = ({1: length}, {1: length})
    graph = torch.export.export(model, (ids, places), dynamic_shapes=shapes, strict=False).module()
    for n in (1, 2, 3, 16, 65, 130):
        other, positions = torch.randint(0, 307, (1, n)), torch.arange(n).unsqueeze(0)
        torch.testing.assert_close(graph(other, positions), model(other), rtol=1e-10, atol=1e-10)


class Step(nn.Module):
    """One step as a module, for export."""

    def __init__(self, model: DeepseekV41) -> None:
        super().__init__()
        self.model = model

    def forward(self, token: Tensor, state: State) -> tuple[Tensor, State]:
        return step(self.model, token, state)


def test_one_graph_serves_every_step(model: DeepseekV41) -> None:
    ids = torch.randint(0, 307, (3, 40))
    _, state = prefill(model, ids[:, :1], 40)
    graph = torch.export.export(Step(model), (ids[:, 0], state), strict=False).module()
    whole = model(ids)
    for p in range(1, 40):
        logits, state = graph(ids[:, p], state)
        torch.testing.assert_close(logits, whole[:, p], rtol=1e-10, atol=1e-10)
