"""Weights that a graph computes: as recipes they give the same bits, whole or some of their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.bundle import DictSource, Ledger, execute, with_derived
from deepinfer_compile.bundle.mapped import MappedFile
from deepinfer_compile.bundle.rows import derived_rows, stored_rows
from deepinfer_compile.bundle.safetensors_io import read_header
from deepinfer_compile.derivation import derivation
from deepinfer_compile.errors import UnsupportedConstruct
from tests.passes.stages import program_of

ROWS = ([2, 0], [1, 2], [-1, 1, 1], [])


class Weights(nn.Module):
    """x @ w, with a weight [3, 6, 5] that is made of others in several ways."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.parts = nn.ParameterList(torch.randn(3, 5) for _ in range(6))
        self.whole = nn.Parameter(torch.randn(3, 5, 6, dtype=torch.float64))

    def weight(self) -> Tensor:
        if self.form == "stacks":
            return torch.cat([torch.stack(list(self.parts[:3])), torch.stack(list(self.parts[3:]))], dim=-2)
        if self.form == "turned":
            return self.whole.float().transpose(-1, -2)
        if self.form == "permuted":
            return self.whole.permute(0, 2, 1).to(torch.float32)
        return self.whole.float().transpose(-1, -2) * 2

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("th,eoh->teo", x, self.weight())


def derived(form: str) -> tuple[Weights, dict, dict[str, Tensor]]:
    """A module, the recipe of its weight and what that reads."""
    model = Weights(form)
    program = program_of(model, x=torch.ones(2, 5))
    gm = program.blocks["prefix"]
    held = {n: replace(r, value=None) for n, r in program.weights.items()}
    refs = {n: held.get(getattr(a, "name", "")) for n, a in zip(_holes(gm), program.calls()[0].args)}
    found = [n for n in gm.graph.nodes if n.op == "call_function" and tuple(n.meta["val"].shape) == (3, 6, 5)]
    recipe, parts = derivation(found[-1], refs)
    return model, recipe, {p.name: dict(model.named_parameters())[p.name].detach() for p in parts}


def _holes(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


@pytest.mark.parametrize("form", ["stacks", "turned", "permuted"])
def test_recipes_give_what_the_graph_gives(form: str) -> None:
    model, recipe, tensors = derived(form)
    want = model.weight().detach()
    assert torch.equal(execute(recipe, DictSource(tensors)), want)
    for rows in ROWS:
        got = derived_rows(recipe, DictSource(tensors), rows)
        assert torch.equal(got, torch.stack([want[r] if r >= 0 else want[0] * 0 for r in rows]) if rows else want[:0])


def test_of_stacks_only_the_rows_are_read() -> None:
    _, recipe, tensors = derived("stacks")
    poisoned = {n: torch.full_like(t, float("nan")) if n in ("parts.1", "parts.4") else t for n, t in tensors.items()}
    assert not derived_rows(recipe, DictSource(poisoned), [0, 2]).isnan().any()
    assert derived_rows(recipe, DictSource(poisoned), [1]).isnan().all()


def test_what_takes_arithmetic_is_refused() -> None:
    with pytest.raises(UnsupportedConstruct, match=r"made by aten\.mul"):
        derived("doubled")


def test_the_ledger_keeps_what_others_want() -> None:
    """A derived tensor reads the checkpoint as its parts do, and parts that nothing else wants go."""
    ledger = Ledger({n: {"op": "cast", "to": "float32", "of": {"op": "copy", "of": f"old.{n}"}} for n in "abc"})
    made = with_derived(ledger, {"ab": {"op": "stack", "of": ["a", "b"], "dim": 0}}, ["a"])
    assert sorted(made.recipes) == ["ab", "b", "c"]
    assert made.recipes["ab"]["of"] == [ledger.recipes["a"], ledger.recipes["b"]]
    source = DictSource({f"old.{n}": torch.randn(4, dtype=torch.float64) for n in "abc"})
    assert torch.equal(execute(made.recipes["ab"], source)[1], source.tensor("old.b").float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_file(dtype: torch.dtype, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"first": torch.randn(7).to(dtype), "w": torch.randn(5, 3, 2).to(dtype), "none": torch.zeros(4, 0)}
    save_file(tensors, tmp_path / "w.safetensors")
    header, mapped = read_header(tmp_path / "w.safetensors"), MappedFile(tmp_path / "w.safetensors")
    for rows in ([1, 2, 3], [4], [3, 1], [0, -1], []):
        got = stored_rows(mapped, "w", header.entries["w"], rows)
        want = [tensors["w"][r] if r >= 0 else torch.zeros(3, 2, dtype=dtype) for r in rows]
        assert torch.equal(got, torch.stack(want) if want else tensors["w"][:0])
        assert got.untyped_storage().nbytes() == len(rows) * 6 * dtype.itemsize
    assert stored_rows(mapped, "none", header.entries["none"], [2, 0]).shape == (2, 0)
