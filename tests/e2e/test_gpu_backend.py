"""torch.compile(model, backend="deepinfer") on a GPU: eager's tokens, and no more error in bf16 than eager itself."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from deepinfer_compile import backend
from deepinfer_compile.backend import counters, deepinfer, executed
from tests import models

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("llama", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
LONGEST = 300


@pytest.fixture(autouse=True)
def from_nothing() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    executed.clear()
    yield
    torch._dynamo.reset()


def on_device(name: str, **changes: Any) -> Any:
    return models.make(name, max_position_embeddings=1024, **changes).to(DEVICE)


def padded(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Prompts padded on the left, and their mask."""
    ids = torch.randint(3, models.VOCAB, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length], mask[row, : max(lengths) - length] = 0, 0
    return ids.to(DEVICE), mask.to(DEVICE)


@pytest.mark.parametrize("name", NAMES)
def test_generate_with_a_static_cache_and_left_padding_equals_eager(name: str) -> None:
    model = on_device(name)
    ids, mask = padded((17, LONGEST, 64, 129))
    how = {
        "attention_mask": mask,
        "max_new_tokens": 16,
        "min_new_tokens": 16,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
        "cache_implementation": "static",
        "disable_compile": True,
    }
    want = model.generate(ids, **how)
    model.forward = torch.compile(model.forward, backend=deepinfer)
    assert torch.equal(model.generate(ids, **how), want)
    latent = name.startswith("deepseek")
    assert executed["latent_attention" if latent else "attention"] > 0


def steps(run: Any, model: Any, ids: Tensor, start: int) -> list[Tensor]:
    """fp32 logits of decode steps that are told their tokens."""
    cache = StaticCache(config=model.config, max_cache_len=ids.shape[1])
    made = []
    with torch.no_grad():
        model(ids[:, :start], past_key_values=cache, use_cache=True)
        for at in range(start, ids.shape[1]):
            place = torch.full((ids.shape[0], 1), at, device=ids.device)
            out = run(ids[:, at : at + 1], past_key_values=cache, use_cache=True, position_ids=place)
            made.append(out.logits.float())
    return made


@pytest.mark.parametrize("name", NAMES)
def test_bf16_errs_no_more_than_eager(name: str) -> None:
    """64 steps of 24 sequences (a flipped expert decides a maximum), told their tokens: largest and mean square error
    against fp32 within 1.25 of eager bf16's own."""
    exact = on_device(name)
    model = copy.deepcopy(exact).bfloat16()
    ids = torch.randint(3, models.VOCAB, (24, 74), generator=torch.Generator().manual_seed(7)).to(DEVICE)
    want = steps(exact, exact, ids, 10)
    theirs = steps(model, model, ids, 10)
    ours = steps(torch.compile(model, backend=deepinfer), model, ids, 10)

    def errors(found: list[Tensor]) -> tuple[float, float]:
        off = torch.stack(found) - torch.stack(want)
        return float(off.abs().max()), float(off.square().mean().sqrt())

    (most, mean), (most_allowed, mean_allowed) = errors(ours), errors(theirs)
    print(f"{name}: max {most:.2e} / {most_allowed:.2e}, rms {mean:.2e} / {mean_allowed:.2e}", dict(kernels()))
    assert most <= 1.25 * most_allowed
    assert mean <= 1.25 * mean_allowed
    if DEVICE == "cuda" and name.startswith("deepseek"):
        assert kernels()["latent_attention"] > 0
        assert kernels()["experts"] > 0


def kernels() -> Counter[str]:
    """Kernels that the backend put into graphs."""
    return Counter({k.removeprefix("kernel: "): n for k, n in backend.counters.items() if k.startswith("kernel: ")})
