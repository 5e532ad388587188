"""A bundle for a GPU, its kernels run by Triton's interpreter on the CPU: the same tokens as eager.

Run by test_interpreted.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer_compile as dc
from deepinfer_compile.bundle import BundleFiles
from deepinfer_compile.runtime import cubins, loading
from deepinfer_compile.runtime.launch import buffer_shape, check_operands, evaluate, plan_from_json, values_of
from deepinfer_compile.runtime.params import SamplingParams
from tests import models
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts
from tests.triton_interpreter import load


class Interpreted:
    """Stands for `Cubin`: the source that lies beside the binary."""

    folder: Path
    ran: set[str] = set()

    def __init__(self, files: BundleFiles, path: str, device: torch.device) -> None:
        record = files.json(path)
        self.name, self.plan = record["kernel"], plan_from_json(record["plan"], path)
        self.module = load(files.bytes(path.replace("kernel.json", record["source"])).decode(), self.folder)

    def __call__(self, operands: Mapping[str, Tensor], results: Sequence[Tensor]) -> None:
        check_operands(self.name, self.plan, operands)
        tensors = dict(operands) | {b.name: t for b, t in zip(self.plan.results, results, strict=True)}
        for buffer in self.plan.scratch:
            tensors[buffer.name] = torch.empty(buffer_shape(buffer, tensors), dtype=getattr(torch, buffer.dtype))
        for launch in self.plan.launches:
            grid = tuple(evaluate(e, tensors) for e in launch.grid)
            if 0 not in grid:
                getattr(self.module, launch.entry)[grid](*values_of(self.name, launch, tensors))
        self.ran.add(self.name)


MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({"num_hidden_layers": 1}, {"rms_norm", "paged_attention", "rope", "gated_act", "sample"}),
    "deepseek_v3": (
        {"num_hidden_layers": 2, "first_k_dense_replace": 1},
        {"rms_norm", "latent_attention", "rope", "gated_act", "route", "experts", "sample"},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_programs_with_kernels_equal_eager(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, wanted = MODELS[name]
    model = models.make(name, **changes)
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    Interpreted.folder, Interpreted.ran = tmp_path, set()
    monkeypatch.setattr(cubins, "Cubin", Interpreted)
    monkeypatch.setattr(loading, "_has_device", lambda requires: True)
    monkeypatch.setattr(loading, "_device", lambda variant: torch.device("cpu"))
    given = prompts(lengths=(5, 1, 90))
    llm = dc.load(tmp_path / "bundle", target="nvidia-sm90")
    assert bundle_tokens(llm, given, 4) == [eager_tokens(model, p, 4) for p in given]
    assert Interpreted.ran == wanted
    if name != "llama":
        return  # logits are logits
    drawn = [
        SamplingParams(temperature=0.8, top_k=20, seed=1, max_tokens=4),
        SamplingParams(top_p=0.8, seed=2, max_tokens=4),
        SamplingParams(min_p=0.05, seed=3, max_tokens=4, presence_penalty=0.5, logprobs=2),
    ]
    graphs = dc.load(tmp_path / "bundle", native=False)
    there, here = (
        [(o.outputs[0].token_ids, o.outputs[0].finish_reason) for o in one.generate(given, drawn)]
        for one in (llm, graphs)
    )
    assert there == here
