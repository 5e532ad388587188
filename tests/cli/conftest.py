"""Tiny model folders and their bundles, built once: graph-only, since kernels have their own tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from typer.testing import CliRunner, Result

import deepinfer_compile
from deepinfer_compile.cli import app
from tests import models

TEMPLATE = "{% for m in messages %}w9 {{ m.content }} w8 {% endfor %}{% if add_generation_prompt %}w7{% endif %}"
Run = Callable[..., Result]


@dataclass(frozen=True)
class Toy:
    """A model in memory, its folder, and a bundle built from the folder."""

    model: Any
    folder: Path
    bundle: Path

    def greedy(self, ids: list[int], count: int) -> list[int]:
        """What the model itself would answer, one eager forward a token."""
        found = list(ids)
        with torch.no_grad():
            for _ in range(count):
                found.append(int(self.model(torch.tensor([found]), use_cache=False).logits[0, -1].argmax()))
        return found[len(ids) :]


def save(model: Any, folder: Path, *, tokenizer: bool) -> None:
    """A Hugging Face folder; words are w3, w4, ... for ids 3, 4, ..."""
    model.save_pretrained(folder)
    if not tokenizer:
        return
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, models.VOCAB)}}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Three layers of one kind, a tokenizer with a chat template."""
    root = tmp_path_factory.mktemp("toy")
    model = models.make("llama")
    save(model, root / "model", tokenizer=True)
    deepinfer_compile.build(root / "model", root / "toy.bundle", native=False)
    return Toy(model, root / "model", root / "toy.bundle")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """One layer with another epsilon, no tokenizer."""
    root = tmp_path_factory.mktemp("plain")
    model = models.make("llama", seed=1, num_hidden_layers=1, rms_norm_eps=1e-3)
    save(model, root / "model", tokenizer=False)
    deepinfer_compile.build(root / "model", root / "plain.bundle", native=False)
    return Toy(model, root / "model", root / "plain.bundle")


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command in this process; stdout and stderr are kept apart."""
    monkeypatch.delenv("DEEPINFER_TRACEBACK", raising=False)

    def run(*args: object, **options: Any) -> Result:
        return CliRunner().invoke(app, [str(a) for a in args], **options)

    return run


def document(result: Result) -> Any:
    """The one JSON document on stdout."""
    return json.loads(result.stdout)
