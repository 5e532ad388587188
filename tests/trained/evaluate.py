"""What the trained models reach on held-out files: `python -m tests.trained.evaluate ced v3`.

Bits a byte: each held-out file alone, in windows of 1024 tokens that advance by 512, every token of the file counted
once, with at least 512 tokens (or all there are) before it; the sum of all costs over the sum of all bytes. `xz -9e`
file by file takes 1.61 on the same files. Weights are the saved ones (bf16), arithmetic is fp32, and the forward is
the model's own, not the one that trained it.

Drafts: prompts of 128 tokens from held-out files continued greedily; at each step a block of 5 is drafted, the longest
agreeing prefix accepted, and the model adds one. Calibration: over drafted tokens whose predecessors were accepted, ten
bins of equal width of the confidence, the mean distance between confidence and share accepted (expected calibration
error). Router: tokens per expert over held-out text, the busiest and the idlest over the mean, by layer.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from deepinfer_compile.models.deepseek_v41.generate import prefill, propose, step
from deepinfer_compile.models.deepseek_v41.model import DeepseekV41
from tests.trained import ced_model, data

WINDOW, STRIDE = 1024, 512
PROMPT = 128
BINS = 10
Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Amount:
    """How much is measured: every n-th held-out file, windows of each from its start (0: all), prompts, tokens each."""

    every: int = 1
    windows: int = 0
    prompts: int = 64
    continued: int = 256
    batch: int = 16


class Piece(NamedTuple):
    """One window of a file's tokens, BEGIN included; targets before index `first` are counted by an earlier window."""

    ids: np.ndarray
    first: int


def pieces(ids: np.ndarray, limit: int = 0) -> Iterator[Piece]:
    """The windows of one file of more than one token, `limit` of them at most (0: all)."""
    for number, start in enumerate(range(0, max(len(ids) - 1 - (WINDOW - STRIDE), 1), STRIDE)):
        if limit and number == limit:
            return
        yield Piece(ids[start : start + WINDOW + 1], 1 if start == 0 else WINDOW - STRIDE + 1)


@torch.no_grad()
def bits(logits: Logits, found: list[Piece], batch: int, device: torch.device) -> float:
    """The cost of all counted tokens in bits; logits [B, T, V] of ids i64 [B, T]."""
    total = 0.0
    found = sorted(found, key=lambda piece: len(piece.ids))
    for at in range(0, len(found), batch):
        some = found[at : at + batch]
        longest = max(len(piece.ids) for piece in some)
        padded = [
            np.pad(piece.ids.astype(np.int64), (0, longest - len(piece.ids)), constant_values=-1) for piece in some
        ]
        ids = torch.from_numpy(np.stack(padded)).to(device)
        targets = ids[:, 1:].clone()
        for row, piece in enumerate(some):
            targets[row, : piece.first - 1] = -1
        made = logits(ids[:, :-1].clamp(min=data.PAD)).float()
        nats = F.cross_entropy(made.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum")
        total += nats.item() / math.log(2)
    return total


def counted_bytes(tokenizer: Tokenizer, found: list[Piece]) -> int:
    """The bytes of all counted tokens: of whole files, their size."""
    kept = [piece.ids[piece.first :].tolist() for piece in found]
    alphabet = {token: len(token) for token in tokenizer.get_vocab()}
    names = {i: alphabet[token] for token, i in tokenizer.get_vocab().items()}
    return sum(names[i] for ids in kept for i in ids)


class Loads:
    """Counts tokens per expert of each router while it is open. `read(output)`: the ids a router chose."""

    def __init__(self, gates: dict[str, nn.Module], read: Callable[[Any], Tensor], counts: int) -> None:
        self.total = {name: torch.zeros(counts) for name in gates}
        self.hooks = [gate.register_forward_hook(self._hook(name, read, counts)) for name, gate in gates.items()]

    def _hook(self, name: str, read: Callable[[Any], Tensor], counts: int) -> Callable[..., None]:
        def count(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.total[name] += torch.bincount(read(output).flatten().cpu(), minlength=counts).float()

        return count

    def close(self) -> dict[str, dict[str, float]]:
        """By layer, the busiest and the idlest expert's load over the mean."""
        for hook in self.hooks:
            hook.remove()
        return {
            name: {"busiest": round((t.max() / t.mean()).item(), 3), "idlest": round((t.min() / t.mean()).item(), 3)}
            for name, t in self.total.items()
        }


class Drafted(NamedTuple):
    """Of a greedy run: `accepted` a step, calibration `error`, `tried` tokens it was taken over."""

    accepted: float
    error: float
    tried: int


@torch.no_grad()
def drafted(model: DeepseekV41, prompts: Tensor, count: int) -> Drafted:
    """Greedy continuations of prompts i64 [B, P] by `count` tokens, with a block drafted at every position."""
    size = model.config.dspark_block_size
    logits, state = prefill(model, prompts, prompts.shape[1] + count)
    tokens, proposed, sure = [], [], []
    for _ in range(count):
        tokens.append(logits.argmax(-1))
        draft = propose(model, tokens[-1], state)
        proposed.append(draft.tokens)
        sure.append(draft.confidence)
        logits, state = step(model, tokens[-1], state)
    line = torch.stack(tokens, 1).cpu()
    blocks, confidence = torch.stack(proposed, 1).cpu(), torch.stack(sure, 1).cpu()
    steps, outcomes = [], []
    for row in range(len(line)):
        at = 0
        while at + size < count:
            right = (blocks[row, at] == line[row, at + 1 : at + 1 + size]).tolist()
            taken = right.index(False) if False in right else size
            outcomes += list(zip(confidence[row, at].tolist(), right))[: taken + 1]
            steps.append(taken)
            at += taken + 1
    return Drafted(sum(steps) / len(steps), calibration_error(outcomes), len(outcomes))


def calibration_error(outcomes: list[tuple[float, bool]]) -> float:
    """Expected calibration error of (confidence, right) pairs over BINS bins of equal width."""
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(BINS)]
    for sure, right in outcomes:
        bins[min(int(sure * BINS), BINS - 1)].append((sure, right))
    gaps = [abs(sum(s for s, _ in some) - sum(r for _, r in some)) for some in bins]
    return sum(gaps) / len(outcomes)


def prompts_of(tokens: data.Tokens, count: int) -> Tensor:
    """i64 [count, PROMPT]: from the middle of held-out files that are long enough, one each, then again further on."""
    found: list[np.ndarray] = []
    for place in (0.5, 0.25, 0.75):
        for index in range(len(tokens.names)):
            ids = tokens.file(index)
            at = int(len(ids) * place)
            if at + PROMPT <= len(ids) and len(found) < count:
                found.append(ids[at : at + PROMPT])
    return torch.from_numpy(np.stack(found).astype(np.int64))


def measure(name: str, folder: Path, amount: Amount, held: data.Tokens, device: torch.device) -> dict[str, Any]:
    """All numbers of one saved model on the tokens of held-out files."""
    return (measure_ced if name == "ced" else measure_v3)(folder, amount, held, device)


def measure_ced(folder: Path, amount: Amount, held: data.Tokens, device: torch.device) -> dict[str, Any]:
    """Of the V4.1-form model."""
    model, tokenizer = ced_model.load(folder)
    model.to(device)
    gates = {f"layers.{i}": layer.ffn.gate for i, layer in enumerate(model.blocks)}
    loads = Loads(dict(gates), lambda output: output[0], model.config.n_routed_experts)
    found = some_pieces(held, amount)
    cost = bits(model, found, amount.batch, device) / counted_bytes(tokenizer, found)
    balance = loads.close()
    drafts = drafted(model, prompts_of(held, amount.prompts).to(device), amount.continued)
    return {
        "bits_per_byte": round(cost, 4),
        "accepted_per_step": round(drafts.accepted, 3),
        "calibration_error": round(drafts.error, 4),
        "drafted_tokens": drafts.tried,
        "parameters": ced_model.counts(model),
        "router": balance,
    }


def measure_v3(folder: Path, amount: Amount, held: data.Tokens, device: torch.device) -> dict[str, Any]:
    """Of the V3-form model; `ahead`: how often the extra layer's token is the one the main model then says."""
    from tests.trained import v3_model

    model, tokenizer = v3_model.load(folder)
    model.to(device)
    found = some_pieces(held, amount)
    gates = {n: m for n, m in model.main.named_modules() if n.endswith("mlp.gate")}
    loads = Loads(gates, lambda output: output[2], model.main.config.n_routed_experts)
    agreed: list[Tensor] = []

    def logits(ids: Tensor) -> Tensor:
        made, agrees = v3_model.both(model, ids)
        agreed.append(agrees)
        return made

    cost = bits(logits, found, amount.batch, device) / counted_bytes(tokenizer, found)
    return {
        "bits_per_byte": round(cost, 4),
        "ahead": round(torch.cat(agreed).float().mean().item(), 4),
        "parameters": v3_model.counts(model),
        "router": loads.close(),
    }


def some_pieces(tokens: data.Tokens, amount: Amount) -> list[Piece]:
    """The windows that are measured."""
    picked = range(0, len(tokens.names), amount.every)
    return [piece for index in picked for piece in pieces(tokens.file(index), amount.windows)]


def held_out(folder: Path) -> data.Tokens:
    """This interpreter's held-out files in a saved model's tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return data.tokenize(tokenizer, data.of_kind(data.sources(), "held"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=("ced", "v3"))
    parser.add_argument("--out", type=Path, default=data.HERE)
    for name, value in vars(Amount()).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    amount = Amount(**{name: getattr(options, name) for name in vars(Amount())})
    for name in options.models:
        folder = options.out / name
        print(json.dumps(measure(name, folder, amount, held_out(folder), torch.device(options.device)), indent=1))


if __name__ == "__main__":
    main()
