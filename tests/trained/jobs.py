"""The stages that are trained: the V4.1-form model, its drafter on the frozen model, the V3-form model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained import ced_draft, ced_forward, ced_model
from tests.trained.fast import cross_entropy, move_bias, normed

BIAS_STEP = 0.002
DENSE_UNTIL = 0.15
"""Until this fraction of the time attention sees all rows, so that indexers have something to learn from."""


class Crops:
    """Random pieces of one long line of tokens, drawn on the device."""

    def __init__(self, line: np.ndarray, device: torch.device, seed: int = 0) -> None:
        self.line = torch.from_numpy(line.astype(np.int32)).to(device)
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def draw(self, count: int, length: int) -> Tensor:
        """i64 [count, length]."""
        top = len(self.line) - length + 1
        at = torch.randint(top, (count, 1), device=self.line.device, generator=self.generator)
        return self.line[at + torch.arange(length, device=self.line.device)].long()


def precision(device: torch.device) -> Any:
    """bf16 products on a GPU, fp32 on a CPU. No cache of cast weights: each is used once a step, and graphs need it."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


def skew(loads: dict[str, Tensor]) -> Tensor:
    """The busiest expert's load over the mean load, mean over layers."""
    return torch.stack([load.max() / load.mean() for load in loads.values()]).mean()


class Saved:
    """What the exporting stages share: where and under which configuration the model is written."""

    def __init__(self, model: DeepseekV41, raw: dict[str, Any], tokenizer: Tokenizer, folder: Path) -> None:
        self.model, self.raw, self.tokenizer, self.folder = model, raw, tokenizer, folder
        self.kept: dict[str, Tensor] = dict(model.named_parameters())
        self.device = model.token_map.device

    def only(self, drafter: bool) -> dict[str, Tensor]:
        """The parameters of the drafter, or all others, router biases left out; the rest gets no gradients."""
        trained: dict[str, Tensor] = {
            name: p
            for name, p in self.model.named_parameters()
            if name.startswith("mtp.") == drafter and not name.endswith("gate.bias")
        }
        for name, p in self.model.named_parameters():
            p.grad = None
            p.requires_grad_(name in trained)
        return trained

    def export(self) -> None:
        """Writes the model as it is now."""
        ced_model.save(self.model, self.raw, self.tokenizer, self.folder)


class CedJob(Saved):
    """Everything but the drafter: next tokens, and the indexers' own loss."""

    name = "ced"
    curve = "loss.csv"
    columns: tuple[str, ...] = ("loss", "nats", "index", "skew")

    def __init__(self, *saved: Any, crops: Crops, batch: int, length: int) -> None:
        super().__init__(*saved)
        self.crops, self.batch, self.tokens = crops, batch, batch * length
        self.trained = self.only(drafter=False)
        self.tables = ced_forward.Tables(self.model, length, self.device)
        self.ids = crops.draw(batch, length + 1)
        self.grams = ced_forward.gram_rows(self.model, self.ids[:, :-1])
        self.dense = torch.tensor(True, device=self.device)
        self.loads: dict[str, Tensor] = {}

    def draw(self, fraction: float) -> None:
        self.ids.copy_(self.crops.draw(*self.ids.shape))
        for i, rows in ced_forward.gram_rows(self.model, self.ids[:, :-1]).items():
            self.grams[i].copy_(rows)
        self.dense.fill_(fraction < DENSE_UNTIL)

    def loss(self) -> Tensor:
        taught = max(self.batch // 4, 1)
        with precision(self.device):
            out, notes = ced_forward.run(self.model, self.ids[:, :-1], self.grams, self.tables, self.dense, taught)
            hidden = normed(out.hidden, self.model.norm.weight, self.model.norm.eps)
            nats = cross_entropy(self.model.head, hidden, self.ids[:, 1:])
        index = torch.stack(notes.index).mean()
        self.loads = notes.loads
        return torch.stack((nats + index, nats, index, skew(notes.loads)))

    def settle(self) -> None:
        for layer, load in zip(self.model.blocks, self.loads.values()):
            move_bias(layer.ffn.gate.bias, load, BIAS_STEP)


class DraftJob(Saved):
    """The drafter alone. A batch: text, then greedy continuations of training text, then of text that only tunes."""

    name = "draft"
    curve = "loss_draft.csv"
    columns: tuple[str, ...] = ("loss", "nats", "doubt", "accepted", "accepted_new")

    def __init__(self, *saved: Any, crops: Crops, known: Tensor, new: Tensor, batch: int, prompt: int) -> None:
        super().__init__(*saved)
        assert self.model.mtp is not None
        self.crops, self.known, self.new = crops, known, new
        length = known.shape[1]
        self.quarter, self.tokens = max(batch // 4, 1), batch * length
        self.trained = self.only(drafter=True)
        self.prompt = prompt
        self.tables = ced_forward.Tables(self.model, length, self.device)
        self.drafting = ced_draft.DraftTables(self.model.mtp, length, self.device)
        self.ids = crops.draw(4 * self.quarter, length)
        self.grams = ced_forward.gram_rows(self.model, self.ids)
        self.phase = torch.zeros((), dtype=torch.int64, device=self.device)
        self.sparse = torch.tensor(False, device=self.device)
        self.loads: dict[str, Tensor] = {}

    def draw(self, fraction: float) -> None:
        text = self.crops.draw(2 * self.quarter, self.ids.shape[1])
        picked = [self._some(rollouts) for rollouts in (self.known, self.new)]
        self.ids.copy_(torch.cat([text, *picked]))
        for i, rows in ced_forward.gram_rows(self.model, self.ids).items():
            self.grams[i].copy_(rows)
        self.phase.random_(0, ced_draft.STRIDE)

    def _some(self, rollouts: Tensor) -> Tensor:
        return rollouts[torch.randint(len(rollouts), (self.quarter,), device=self.device)]

    def loss(self) -> Tensor:
        with precision(self.device):
            with torch.no_grad():
                out, _ = ced_forward.run(self.model, self.ids, self.grams, self.tables, self.sparse)
                hidden = normed(out.hidden, self.model.norm.weight, self.model.norm.eps)
                likely = self.model.head(hidden).argmax(-1)
            at = self.drafting.anchors + self.phase
            made, notes = ced_draft.drafts(self.model, self.ids, out.features, at, self.drafting)
        self.loads = notes.loads
        nats, doubt, *accepted = ced_draft.losses(made, self.ids, likely, at, self.drafting, self.quarter, self.prompt)
        return torch.stack((nats + doubt, nats, doubt, *accepted))

    def settle(self) -> None:
        assert self.model.mtp is not None
        for layer, load in zip(self.model.mtp.blocks, self.loads.values()):
            move_bias(layer.ffn.gate.bias, load, BIAS_STEP)
