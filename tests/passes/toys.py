"""Small modules around one construct, captured like any model: for near misses and for forms no library model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.graph import to_text
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline, Record
from deepinfer_compile.program import Program
from deepinfer_compile.replay import bind, weights_from

WORDS = 97


class Around(nn.Module):
    """input_ids [1, T] -> what `body` makes of embeddings [1, T, H]."""

    def __init__(self, body: nn.Module, width: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width, dtype=dtype)
        self.body = body

    def forward(self, input_ids: Tensor) -> Any:
        return self.body(self.embedding(input_ids))


def toy(body: nn.Module, width: int = 24, seed: int = 0, dtype: torch.dtype = torch.float32) -> Around:
    """A body behind an embedding, all parameters random, in eval mode."""
    torch.manual_seed(seed)
    model = Around(body, width).to(dtype).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 1 if p.dim() == 1 or p.shape[0] == WORDS else p.shape[-1] ** -0.5)
    return model


def raised(model: nn.Module, *passes: Any) -> tuple[Program, list[Record]]:
    """Capture, canonicalize and run the passes."""
    return Pipeline((Canonicalize(), *passes)).run(capture(model))


def reasons(records: Sequence[Record], kind: str = "missed") -> list[str]:
    """Reasons of the last pass's remarks of a kind."""
    return [r.reason for r in records[-1].remarks if r.kind == kind]


def check_toy(program: Program, model: nn.Module, tol: float = 1e-6, lengths: Sequence[int] = (1, 2, 13)) -> None:
    """The program gives what the module gives, at every length, with NaN where nothing was written."""
    for length in lengths:
        ids = torch.randint(0, WORDS, (1, length), generator=torch.Generator().manual_seed(length))
        with torch.no_grad():
            want = model(ids)
        got = program.run({**bind(program, weights_from(model)), "input_ids": ids})
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        assert (got - want).abs().max() <= tol * max(1.0, want.abs().max().item())


def ops(program: Program) -> list[str]:
    """Names of all calls of the dialect."""
    return [
        str(n.target).removesuffix(".default")
        for gm in program.blocks.values()
        for n in gm.graph.nodes
        if str(n.target).startswith("deepinfer.")
    ]


def check_twice_is_once(program: Program, *passes: Any) -> None:
    """Running the passes again changes no graph and claims nothing."""
    again, records = Pipeline(passes, given=program.facts).run(program)
    assert {n: to_text(g) for n, g in again.graphs()} == {n: to_text(g) for n, g in program.graphs()}
    assert all(record.count("applied") == 0 for record in records)


def before_after(model: nn.Module, *passes: Any) -> str:
    """The text of every block before and after the passes, for golden files."""
    (before, _), (after, _) = raised(model), raised(model, *passes)
    return "\n".join(
        f"{when} {name}\n{to_text(gm)}"
        for when, p in (("Before", before), ("After", after))
        for name, gm in p.blocks.items()
    )
