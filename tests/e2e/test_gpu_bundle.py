"""Bundles for a GPU on the GPU of this machine: eager's tokens for every architecture, with and without graphs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.passes import merge_linears
from deepinfer_compile.runtime.cuda_graphs import LADDER, bucket_of
from deepinfer_compile.runtime.params import SamplingParams
from deepinfer_compile.targets import TARGETS, nvidia
from tests import models, yoco_model
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts

LENGTHS = (5, 1, 17, 64, 65, 3, 130)
COUNT = 24


def here() -> str:
    """The target that this GPU is."""
    have = torch.cuda.get_device_capability()
    return next(name for name, t in TARGETS.items() if isinstance(t, nvidia.NvidiaTarget) and t.capability == have)


def test_every_number_of_requests_has_the_smallest_graph_that_holds_it() -> None:
    assert list(LADDER) == sorted(set(LADDER))
    for requests in range(1, LADDER[-1] + 1):
        size = bucket_of(requests)
        assert size is not None
        assert size >= requests
        assert not [other for other in LADDER if requests <= other < size]
    assert bucket_of(LADDER[-1] + 1) is None


def count_started(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(rows, whether it followed) of each step that the device draws within."""
    started: list[tuple[int, bool]] = []
    executor = llm.engine._executor
    whole = executor.start

    def counting(inputs: Any, numbers: Any, *, following: bool = False) -> Any:
        flight = whole(inputs, numbers, following=following)
        if flight is not None:
            started.append((len(inputs.rows), following))
        return flight

    monkeypatch.setattr(executor, "start", counting)
    return started


@pytest.mark.gpu
@pytest.mark.parametrize("name", models.CONFIGS)
def test_tokens_equal_eager(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.make(name)
    dc.build(model, tmp_path / "bundle", target=here())
    given = prompts(lengths=LENGTHS)
    llm: Any = dc.load(tmp_path / "bundle", target=here(), max_num_seqs=5)
    started = count_started(llm, monkeypatch)
    assert bundle_tokens(llm, given, COUNT) == [eager_tokens(model, p, COUNT) for p in given]
    graphs = llm.engine._executor.graphs
    # seven prompts in five seats: every decode step was a replay, and most began before the last one's tokens were here
    assert sum(following for _, following in started) > COUNT
    assert graphs is not None
    assert 8 in graphs.captured


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_linear_layers_of_few_tokens_equal_eager(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every weight were large: each step of up to four requests runs our kernels."""
    for module in (merge_linears, nvidia):
        monkeypatch.setattr(module, "is_large", lambda *weights: True)
    model = models.make(name)
    dc.build(model, tmp_path / "bundle", target=here())
    given = prompts(lengths=LENGTHS)
    for seats in (1, 3):
        llm: Any = dc.load(tmp_path / "bundle", target=here(), max_num_seqs=seats)
        assert bundle_tokens(llm, given, COUNT) == [eager_tokens(model, p, COUNT) for p in given]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_drawn_on_the_device(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same tokens as when the host draws from the same logits, and when a request is alone."""
    model = models.make("llama").to(dtype)
    dc.build(model, tmp_path / "bundle", target=here(), dtype=str(dtype).removeprefix("torch."))
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"temperature": 0.0}]
    kinds += [{"top_p": 0.9, "presence_penalty": 0.4}, {"top_k": 30, "logprobs": 2}]
    drawn = [SamplingParams(**{"seed": i, "max_tokens": COUNT, "ignore_eos": True, **p}) for i, p in enumerate(kinds)]
    given = prompts(lengths=LENGTHS)
    llm: Any = dc.load(tmp_path / "bundle", target=here(), max_num_seqs=7)
    started = count_started(llm, monkeypatch)
    there = [o.outputs[0].token_ids for o in llm.generate(given, drawn)]
    assert sum(rows for rows, _ in started) == len(given) * (COUNT - 1)
    # a penalty takes the host after each step
    assert not any(following for _, following in started)
    if dtype == torch.float32:  # a library's products may round differently in another batch, in bf16 visibly
        assert there[2] == llm.generate([given[2]], [drawn[2]])[0].outputs[0].token_ids
    host: Any = dc.load(tmp_path / "bundle", target=here(), max_num_seqs=7)
    host.engine._executor.draw = host.engine._sampler._there = None
    assert there == [o.outputs[0].token_ids for o in host.generate(given, drawn)]


SCRIPT = """
import json, sys
sys.modules["triton"] = None
import deepinfer_compile as dc
from deepinfer_compile.runtime.params import SamplingParams
llm = dc.load(sys.argv[1], target=sys.argv[2])
given = json.loads(sys.argv[3])
made = llm.generate(given, SamplingParams(temperature=0.0, max_tokens=int(sys.argv[4]), ignore_eos=True))
print(json.dumps([list(m.outputs[0].token_ids) for m in made]))
"""


@pytest.mark.gpu
def test_a_bundle_from_another_machine_runs_without_triton() -> None:
    """GPU_BUNDLES names a folder of bundles, each with the tokens that it must give: {"prompts", "tokens"}."""
    folder = os.environ.get("GPU_BUNDLES")
    if folder is None:
        pytest.skip("GPU_BUNDLES names no bundles")
    found = sorted(Path(folder).glob("*.bundle"))
    assert found
    for bundle in found:
        wanted = json.loads(bundle.with_suffix(".json").read_text())
        count = str(len(wanted["tokens"][0]))
        command = [sys.executable, "-c", SCRIPT, str(bundle), here(), json.dumps(wanted["prompts"]), count]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        assert json.loads(done.stdout.splitlines()[-1]) == wanted["tokens"], bundle.name


@pytest.mark.gpu
@pytest.mark.parametrize("replay", ["off", "compact"])
def test_shared_keys_are_served_by_kernels(replay: str, tmp_path: Path) -> None:
    """A decoder whose upper half reads keys of the lower one: prompts by halves, decode steps as graphs."""
    model = yoco_model.make_yoco()
    dc.build(model, tmp_path / "bundle", target=here(), replay=replay)
    given = prompts(yoco_model.VOCAB, LENGTHS)
    llm: Any = dc.load(tmp_path / "bundle", target=here(), max_num_seqs=5, max_num_batched_tokens=48, max_model_len=256)
    assert bundle_tokens(llm, given, COUNT) == [yoco_model.eager_tokens(model, p, COUNT) for p in given]
    graphs = llm.engine._executor.graphs
    assert graphs is not None
    assert 8 in graphs.captured
