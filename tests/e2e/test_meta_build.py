"""A bundle of a model that nowhere has weights: built on the meta device, given a checkpoint when it is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import deepinfer_compile as dc
from deepinfer_compile.capture.source import meta_model
from deepinfer_compile.errors import BadOption
from deepinfer_compile.runtime import loading
from tests import models
from tests.e2e.parity import bundle_tokens, eager_tokens, prompts


def test_weights_come_with_the_load(tmp_path: Path) -> None:
    dc.build(meta_model(models.config("deepseek_v3"), torch.float32), tmp_path / "bundle", weights="none")
    model = models.make("deepseek_v3")
    (tmp_path / "checkpoint").mkdir()
    held = {name: t.contiguous() for name, t in model.state_dict().items()}
    save_file(held, tmp_path / "checkpoint" / "model.safetensors")
    llm: Any = dc.load(tmp_path / "bundle", checkpoint=tmp_path / "checkpoint", native=False)
    given = prompts(lengths=(5, 1, 17))
    assert bundle_tokens(llm, given, 6) == [eager_tokens(model, p, 6) for p in given]


def test_weights_made_for_a_device_are_copied_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts of a layer are stacked in memory that those of the next layer may get again."""
    models.make("qwen3_moe").save_pretrained(tmp_path / "hf")
    files = dc.build(str(tmp_path / "hf"), tmp_path / "bundle", weights="link", native=False)
    monkeypatch.setattr(loading, "device_of", lambda variant: torch.device("meta"))
    _, there = loading.open_executor(files, native=False, checkpoint=tmp_path / "hf")
    mains = {files.weights(tmp_path / "hf").main(name) for name in there}
    assert len({id(t) for t in there.values()}) == len(mains)


def test_weights_that_are_nowhere_are_not_copied(tmp_path: Path) -> None:
    with pytest.raises(BadOption, match=r"(?s)embed_tokens.*meta device.*weights=\"none\""):
        dc.build(meta_model(models.config("llama"), torch.float32), tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()
