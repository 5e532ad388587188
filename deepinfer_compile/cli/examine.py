"""Try one architecture end to end on a tiny random model: capture, passes, and the programs' logits against eager's.

What can go wrong with an architecture is exactly what the row must say, so every failure becomes the row's words.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import CompileError, UnsupportedConstruct
from deepinfer_compile.models import tiny
from deepinfer_compile.observe import TOLERANCES, relative
from deepinfer_compile.ops import find
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import logits_of, weights_from

TOKENS = 45
ROWS = (0, 7, 30, 44)
CHUNK = 13
LIMIT = TOLERANCES[torch.float32]


@dataclass
class Row:
    """What was found of one architecture.

    kind: Transformers' model type. stage: how far it came (eager, capture, passes, programs, done). blocks: distinct
    layer graphs. operations: calls of dialect operations over the whole model, in the decode program. error: largest
    difference of the programs' logits from eager's, over the largest logit. problem: why it stopped, and where.
    """

    architecture: str
    kind: str = ""
    model: str = ""
    stage: str = "eager"
    layers: int = 0
    blocks: int = 0
    operations: dict[str, int] = field(default_factory=dict)
    error: float | None = None
    problem: str = ""
    seconds: float = 0.0

    @property
    def supported(self) -> bool:
        """All programs give eager's logits to fp32 rounding."""
        return self.error is not None and self.error <= LIMIT

    def as_json(self) -> dict[str, Any]:
        """The row as plain data; JSON has no infinity, so an infinite error is null beside its problem."""
        error = self.error if self.error is not None and self.error != float("inf") else None
        return {**asdict(self), "error": error, "supported": self.supported}


def examine(name: str) -> Row:
    """The row of one architecture of `models.tiny`."""
    row = Row(name)
    begin = time.perf_counter()
    try:
        _fill(row)
    except CompileError as err:
        said = err.as_json()
        row.problem = f"{said['what']} ({err.where})" if err.where else str(said["what"])
    except Exception as err:  # a model's own code may fail in any way; the row must say how
        row.problem = f"{type(err).__name__}: {(str(err).strip().splitlines() or ['no message'])[0]}"
    row.seconds = time.perf_counter() - begin
    return row


def _fill(row: Row) -> None:
    config = tiny.config(row.architecture)
    row.kind = str(config.model_type)
    model = tiny.randomised(config)
    row.model = type(model).__name__
    row.layers = int(getattr(model.config, "num_hidden_layers", 0))
    ids = sample_ids(int(model.config.vocab_size))
    want = eager_logits(model, ids, ROWS)
    row.stage = "capture"
    captured = capture(model)
    row.stage = "passes"
    packed, _ = default().run(captured)
    programs, _ = phase_programs(packed, {})
    if not packed.caches:
        raise UnsupportedConstruct(
            construct="attention written out in the model's own code, which was not recognised",
            fix="use a model whose attention goes through Transformers' attention interface",
        )
    row.stage = "programs"
    row.blocks = sum(bool(packed.layers_of(block)) for block in packed.blocks)
    row.operations = count_operations(programs.get("decode", packed))
    weights = weights_from(model)
    row.error = max(relative(logits_of(p, weights, ids, ROWS, CHUNK), want) for p in programs.values())
    row.stage = "done"
    if not row.supported:
        row.problem = f"the programs differ from eager by {row.error:.1e} of the largest logit (limit {LIMIT:.0e})"


def sample_ids(vocab: int, count: int = TOKENS) -> list[int]:
    """Fixed random token ids."""
    ids: list[int] = torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(5)).tolist()
    return ids


def eager_logits(model: Any, ids: Sequence[int], rows: Sequence[int]) -> Tensor:
    """What the user's model itself gives for one sequence: f32 [len(rows), V]."""
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0, list(rows)]
    return logits.float()


def count_operations(program: Program) -> dict[str, int]:
    """Calls of dialect operations by name, each block counted as often as it is called; most frequent first."""
    found: Counter[str] = Counter()
    for call in program.calls():
        for node in program.blocks[str(call.target)].graph.nodes:
            op = find(node.target) if node.op == "call_function" else None
            if op is not None:
                found[op.name] += 1
    return dict(found.most_common())


__all__ = ["Row", "count_operations", "eager_logits", "examine", "sample_ids"]
