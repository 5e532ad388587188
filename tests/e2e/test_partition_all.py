"""Every architecture with experts over two to four processes, with copies and without; native code; eight processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import deepinfer_compile as dc
from deepinfer_compile.settings import ExpertPlan
from tests import models, v41
from tests.e2e.parity import bundle_tokens, prompts
from tests.e2e.partitioned import check_all
from tests.e2e.rank_worker import SIZES
from tests.plain_model import VOCAB as PLAIN_VOCAB
from tests.plain_model import make_plain
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

ARCHITECTURES = (
    *("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "afmoe", "cohere2_moe", "dots1"),
    *("ernie4_5_moe", "flex_olmo", "granitemoe", "granitemoeshared", "hunyuan_v1_moe", "hy_v3", "laguna"),
    *("mimo_v2_flash", "minimax_m2", "phimoe", "qwen2_moe", "solar_open", "glm4_moe_lite"),
)


@pytest.mark.parametrize("place", range(len(ARCHITECTURES)), ids=ARCHITECTURES)
def test_every_architecture(place: int, tmp_path: Path) -> None:
    model = models.make(ARCHITECTURES[place])
    experts = next(p.shape[0] for n, p in model.named_parameters() if n.endswith("experts.gate_up_proj"))
    plan = ExpertPlan(2 + place % 3, experts + place % 4)
    check_all(model, tmp_path, plan, models.VOCAB, 96)


@pytest.mark.parametrize("more", [0, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_deepseek(ranks: int, more: int, tmp_path: Path) -> None:
    check_all(models.make("deepseek_v3"), tmp_path, ExpertPlan(ranks, 12 + more), models.VOCAB, 96)


def one_sided(bias: float) -> Any:
    """DeepSeek-V3's form; with a large bias all tokens go to the experts of the last rank."""
    model = models.make("deepseek_v3")
    with torch.no_grad():
        for name, held in model.named_buffers():
            if "e_score_correction_bias" in name:
                held[-4:] += bias
    return model


@pytest.mark.parametrize("bias", [0.0, 100.0])
def test_native_code(bias: float, tmp_path: Path) -> None:
    check_all(one_sided(bias), tmp_path, ExpertPlan(2, 12), models.VOCAB, 96, native=True)


def test_a_causal_encoder_decoder(tmp_path: Path) -> None:
    model = v41.make()
    check_all(model, tmp_path, ExpertPlan(2, 9), model.config.vocab_size, model.config.hidden_size)


def test_a_decoder_that_reads_the_last_rows_of_a_prompt(tmp_path: Path) -> None:
    """Ranks, one of them with nothing to do, against one process that reads as few rows."""
    model, keep = v41.make(), 64
    dc.build(model, tmp_path / "one", native=False, keep=keep)
    dc.build(model, tmp_path / "two", native=False, keep=keep, experts=ExpertPlan(2))
    given = prompts(model.config.vocab_size, (150, 70))
    want = bundle_tokens(dc.load(tmp_path / "one", native=False, **SIZES), given, 6)
    job = {"bundle": str(tmp_path / "two"), "prompts": [given, []], "count": 6}
    first, second = run_ranks(2, tmp_path / "run", [job])
    assert first[0]["tokens"] == want
    assert second[0]["tokens"] == []


def test_stacked_weights_that_the_model_joins(tmp_path: Path) -> None:
    check_all(make_plain("einsum"), tmp_path, ExpertPlan(2, 8), PLAIN_VOCAB, 44)


def test_a_linked_checkpoint(tmp_path: Path) -> None:
    """A rank reads its experts' tensors from the model's folder."""
    model = models.make("mixtral")
    model.save_pretrained(tmp_path / "hf")
    check_all(model, tmp_path, ExpertPlan(2, 6), models.VOCAB, 96, source=tmp_path / "hf", weights="link")


def test_all_tokens_to_the_experts_of_one_rank(tmp_path: Path) -> None:
    check_all(one_sided(100.0), tmp_path, ExpertPlan(2), models.VOCAB, 96)


def test_thirty_experts_on_eight_ranks(tmp_path: Path) -> None:
    model = models.make("mixtral", num_local_experts=30, num_experts_per_tok=4, num_hidden_layers=2)
    check_all(model, tmp_path, ExpertPlan(8), models.VOCAB, 96)
