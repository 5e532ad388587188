"""A model and prompts of which a few experts get most of the load.

It is DeepSeek-V3's form with more experts than the tiny one has, and a bias of its router that prefers six neighbours,
which experts in order put on one rank; prompts are of four different tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests import models

HOT, CHOSEN = range(3, 9), 2


def skewed(experts: int, **changes: Any) -> Any:
    """A model whose experts 3 to 8 get most of the load. changes: of its configuration."""
    model = models.make(
        "deepseek_v3", n_routed_experts=experts, num_experts_per_tok=CHOSEN, n_group=1, topk_group=1, **changes
    )
    with torch.no_grad():
        for name, held in model.named_buffers():
            if "e_score_correction_bias" in name:
                held.normal_(0, 0.05)
                held[HOT.start : HOT.stop] += 0.3
    return model


def some_prompts(ranks: int, count: int) -> list[list[list[int]]]:
    """Prompts of each rank, of four different tokens."""
    draw = np.random.default_rng(0)
    few = draw.integers(3, models.VOCAB, 4)
    return [[draw.choice(few, 12 + (i + rank) % 9).tolist() for i in range(count)] for rank in range(ranks)]
