"""A bundle for a GPU, its kernels run by Triton's interpreter on the CPU: the same tokens as eager.

Run by test_interpreted.py in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import deepinfer_compile as dc
from deepinfer_compile import LLM
from deepinfer_compile.bundle import BundleFiles, read_bundle
from deepinfer_compile.passes import merge_linears
from deepinfer_compile.runtime import cubins, loading, variants
from deepinfer_compile.runtime.launch import buffer_shape, check_operands, evaluate, plan_from_json, values_of
from deepinfer_compile.runtime.loading import open_executor
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.targets import nvidia
from tests import models, v41, yoco_model
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts
from tests.runtime.test_small_graphs import Stand
from tests.triton_interpreter import load


class Interpreted:
    """Stands for `Cubin`: the source that lies beside the binary."""

    folder: Path
    ran: set[str] = set()
    earlier: set[str] = set()
    """Kernels that ran for requests of several new tokens with others before them."""

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
        if "seq_len" in operands:
            new = operands["query_start"].diff()
            later = (new > 1) & (operands["seq_len"] > new)
            self.earlier.update({self.name} if later.any() else ())


MODELS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "llama": ({"num_hidden_layers": 1}, {"rms_norm", "paged_attention", "rope", "rotary_table", "gated_act", "sample"}),
    "deepseek_v3": (
        {"num_hidden_layers": 2, "first_k_dense_replace": 1},
        {"rms_norm", "latent_attention", "rope", "rotary_table", "gated_act", "route", "experts", "sample"},
    ),
}


@pytest.fixture
def interpreted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles for a GPU run here."""
    Interpreted.folder, Interpreted.ran, Interpreted.earlier = tmp_path, set(), set()
    monkeypatch.setattr(cubins, "Cubin", Interpreted)
    monkeypatch.setattr(variants, "_has_device", lambda requires: True)
    monkeypatch.setattr(loading, "device_of", lambda variant: torch.device("cpu"))


@pytest.mark.parametrize("name", MODELS)
def test_programs_with_kernels_equal_eager(name: str, tmp_path: Path, interpreted: None) -> None:
    changes, wanted = MODELS[name]
    model = models.make(name, **changes)
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    given = prompts(lengths=(5, 1, 70))
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


@pytest.mark.parametrize("name", ["llama", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_linear_layers_of_few_tokens_equal_eager(
    name: str, tmp_path: Path, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if every weight were large: decode steps run kernels, the prompts are the library's."""
    for module in (merge_linears, nvidia):
        monkeypatch.setattr(module, "is_large", lambda *weights: True)
    model = models.make(name, num_hidden_layers=1, **({} if name == "llama" else {"first_k_dense_replace": 0}))
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    given = prompts(lengths=(5, 1))
    llm = dc.load(tmp_path / "bundle", target="nvidia-sm90")
    assert bundle_tokens(llm, given, 3) == [eager_tokens(model, p, 3) for p in given]
    assert Interpreted.ran == MODELS[name][1] | {"linear", "linears"}


def test_a_latent_prompt_in_chunks_equals_eager(tmp_path: Path, interpreted: None) -> None:
    """The prefill program computes the expanded form; a chunk after the first finds earlier tokens in the cache."""
    model = models.make("deepseek_v3", num_hidden_layers=1, first_k_dense_replace=1)
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    given = prompts(lengths=(120, 3))
    llm = dc.load(tmp_path / "bundle", target="nvidia-sm90", max_num_batched_tokens=60, max_num_seqs=2)
    assert bundle_tokens(llm, given, 2) == [eager_tokens(model, p, 2) for p in given]
    assert "latent_prefill" in Interpreted.earlier
    files = read_bundle(tmp_path / "bundle")
    variant = files.manifest.variants["nvidia-sm90"]
    bound = {
        (program, entry["kernel"])
        for path in variant["blocks"].values()
        for program, block in files.json(path)["programs"].items()
        for entry in block["kernels"].values()
        if entry["op"] == "deepinfer.cached_latent_attention"
    }
    assert bound == {("prefill", "latent_prefill"), ("decode", "latent_attention"), ("verify", "latent_attention")}


@pytest.mark.slow
def test_shared_keys_are_written_once_and_read_by_kernels(tmp_path: Path, interpreted: None) -> None:
    """A decoder whose upper half reads keys of the lower one, prompts in chunks: some have no wanted row."""
    model = yoco_model.make_yoco(yoco_model.Form(lower=(0,), upper=(0, 0)))
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    given = prompts(yoco_model.VOCAB, (5, 1, 60))
    llm = dc.load(
        tmp_path / "bundle", target="nvidia-sm90", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=24
    )
    assert bundle_tokens(llm, given, 3) == [yoco_model.eager_tokens(model, p, 3) for p in given]
    assert Interpreted.ran >= {"paged_attention", "shared_attention"}


@pytest.mark.slow
def test_streams_rows_and_partly_turned_heads_equal_eager(tmp_path: Path, interpreted: None) -> None:
    """Every operation of the DeepSeek-V4.1 form but products has a kernel."""
    model = v41.make()
    dc.build(model, tmp_path / "bundle", target="nvidia-sm90")
    variant = read_bundle(tmp_path / "bundle").manifest.variants["nvidia-sm90"]
    assert all(note.endswith("without: deepinfer.output_projection 1") for note in variant["notes"] if ":" in note)
    given = prompts(300, (5, 1, 20))
    llm = dc.load(tmp_path / "bundle", target="nvidia-sm90", max_num_batched_tokens=16, max_num_seqs=3)
    assert bundle_tokens(llm, given, 3) == [v41.eager_tokens(model, p, 3) for p in given]
    assert {"mix_streams", "join_streams", "rope", "rotary_table", "select_rows"} <= Interpreted.ran


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v3", "yoco", "v41"])
def test_small_steps_are_filled_up_for_kernels(
    name: str, tmp_path: Path, interpreted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As graphs replay them: tokens of requests of length 0 behind those of the step, for every kernel."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    made: Any = {
        "deepseek_v3": lambda: models.make(name, num_hidden_layers=2, first_k_dense_replace=1),
        "yoco": lambda: yoco_model.make_yoco(yoco_model.Form(lower=(0,), upper=(0, 5))),
        "v41": v41.make,
    }[name]()
    eager = {"deepseek_v3": eager_tokens, "yoco": yoco_model.eager_tokens, "v41": v41.eager_tokens}[name]
    dc.build(made, tmp_path / "bundle", target="nvidia-sm90")
    executor, _ = open_executor(read_bundle(tmp_path / "bundle"), "nvidia-sm90")
    executor.make_graphs = stand = Stand(executor)
    llm = LLM(executor, max_num_seqs=3, max_num_batched_tokens=24, max_model_len=128)
    given = prompts(200, (5, 1, 30))
    assert bundle_tokens(llm, given, 3) == [eager(made, p, 3) for p in given]
    assert any(tokens < size for steps in stand.made.values() for size, tokens in steps.ran)
