"""The stage that trains the V3-form model and its extra layer together."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tests.trained import v3_forward, v3_model
from tests.trained.fast import cross_entropy, move_bias
from tests.trained.jobs import BIAS_STEP, Crops, precision, skew

AHEAD = 0.3
"""Weight of the extra layer's loss."""


class V3Job:
    """Next tokens, and the tokens after those."""

    name = "v3"
    curve = "loss.csv"
    columns: tuple[str, ...] = ("loss", "nats", "nats_ahead", "skew")

    def __init__(
        self, model: v3_model.V3, tokenizer: Tokenizer, folder: Path, crops: Crops, batch: int, length: int
    ) -> None:
        self.model, self.tokenizer, self.folder, self.crops = model, tokenizer, folder, crops
        self.trained: dict[str, Tensor] = dict(model.named_parameters())
        self.biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
        self.kept = {**self.trained, **self.biases}
        self.ids = crops.draw(batch, length + 2)
        self.tokens = batch * length
        self.device = self.ids.device
        self.angles = v3_forward.angles_of(model, length, self.device)
        self.loads: dict[str, Tensor] = {}

    def draw(self, fraction: float) -> None:
        self.ids.copy_(self.crops.draw(*self.ids.shape))

    def loss(self) -> Tensor:
        now, following, later = self.ids[:, :-2], self.ids[:, 1:-1], self.ids[:, 2:]
        head = self.model.main.lm_head
        with precision(self.device):
            hidden, loads = v3_forward.run(self.model, now, self.angles)
            nats = cross_entropy(head, hidden, following)
            ahead = cross_entropy(head, v3_forward.ahead(self.model, hidden, following, self.angles, loads), later)
        self.loads = loads
        return torch.stack((nats + AHEAD * ahead, nats, ahead, skew(loads)))

    def settle(self) -> None:
        for name, load in self.loads.items():
            move_bias(self.biases[f"{name}.mlp.gate.e_score_correction_bias"], load, BIAS_STEP)

    def export(self) -> None:
        v3_model.save(self.model, self.tokenizer, self.folder)
