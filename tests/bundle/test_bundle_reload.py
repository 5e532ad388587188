"""New weights into live tensors: all of them or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_compile.bundle import DictSource, Ledger, WeightSource, plan_weights, read_bundle, reload_into
from deepinfer_compile.errors import MissingWeight, TiedWeightConflict, WeightMismatch
from tests.bundle.support import checkpoint, write_bundle

TABLE = torch.arange(21, dtype=torch.float32).reshape(7, 3)


def _live() -> tuple[Ledger, dict[str, torch.Tensor]]:
    ledger = Ledger(
        {
            "a": {"op": "copy", "of": "a"},
            "b": {"op": "stack", "of": ["b0", "b1"], "dim": 0},
            "c": {"op": "fp8_block", "of": "c", "scale": "s", "block": [2, 2], "layout": "row"},
            "t": {"op": "tied", "of": ["t", "u"]},
        },
        tied=(("t", "u"),),
        kept=("rope",),
    )
    live = {
        "a": torch.zeros(2),
        "b": torch.zeros(2, 3),
        "c": torch.zeros(4, 4),
        "t": torch.zeros(1),
        "rope": torch.ones(2),
    }
    return ledger, live


def _good() -> dict[str, torch.Tensor]:
    return {
        "a": torch.ones(2),
        "b0": torch.ones(3),
        "b1": torch.full((3,), 2.0),
        "c": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "s": torch.tensor([[1.0, 2], [3, 4]]),
        "u": torch.ones(1),
    }


def test_reload_in_place() -> None:
    ledger, live = _live()
    pointers = {name: tensor.data_ptr() for name, tensor in live.items()}
    live["a"] = torch.nn.Parameter(live["a"])
    reload_into(live, ledger, DictSource({**_good(), "unused": torch.zeros(1)}))
    assert live["a"].tolist() == [1, 1]
    assert live["b"].tolist() == [[1, 1, 1], [2, 2, 2]]
    assert live["c"][0].tolist() == [1, 1, 2, 2]
    assert live["c"][3].tolist() == [3, 3, 4, 4]
    assert live["t"].tolist() == [1]
    assert live["rope"].tolist() == [1, 1]
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == pointers


BAD_UPDATES = {
    "missing": ({"b1": None}, MissingWeight),
    "shape": ({"b0": torch.ones(4), "b1": torch.ones(4)}, WeightMismatch),
    "dtype": ({"a": torch.ones(2, dtype=torch.float64)}, WeightMismatch),
    "tied differ": ({"t": torch.zeros(1)}, TiedWeightConflict),
    "tied missing": ({"u": None}, MissingWeight),
    "scale shape": ({"s": torch.ones(4)}, WeightMismatch),
    "scale order": ({"s": torch.tensor([[1.0, 3], [2, 4]]).t()}, WeightMismatch),
    "fp8 lost": ({"c": torch.ones(4, 4)}, WeightMismatch),
}


@pytest.mark.parametrize("what", BAD_UPDATES)
def test_reload_is_all_or_nothing(what: str) -> None:
    changes, error = BAD_UPDATES[what]
    ledger, live = _live()
    before = {name: tensor.clone() for name, tensor in live.items()}
    update = {name: tensor for name, tensor in {**_good(), **changes}.items() if tensor is not None}
    with pytest.raises(error):
        reload_into(live, ledger, DictSource(update))
    assert all(torch.equal(live[name], before[name]) for name in live)


@pytest.mark.parametrize(
    ("name", "target", "error"),
    [
        ("zz", torch.zeros(1), MissingWeight),
        ("a", torch.zeros(3), WeightMismatch),
        ("a", torch.zeros(2, dtype=torch.bfloat16), WeightMismatch),
        ("a", torch.zeros(2, device="meta"), WeightMismatch),
        ("a", torch.zeros(1).expand(2), WeightMismatch),
        ("a", None, WeightMismatch),
    ],
)
def test_reload_checks_its_targets(name: str, target: torch.Tensor | None, error: type) -> None:
    ledger, live = _live()
    live.pop(name, None)
    if target is not None:
        live[name] = target
    with pytest.raises(error, match=f"'{name}'"):
        reload_into(live, ledger, DictSource(_good()))
    assert not live["b"].any()


def test_reload_of_a_part() -> None:
    ledger, live = _live()
    part = ledger.select(["b", "u"])
    reload_into({"b": live["b"], "u": live["t"]}, part, DictSource(_good()))
    assert live["b"].sum() == 9
    assert live["t"].tolist() == [1]
    assert not live["a"].any()


def test_reload_a_mapped_bundle_leaves_its_files(tmp_path: Path) -> None:
    wanted = {"a": (torch.float32, (7, 3))}
    source = checkpoint(tmp_path / "hf", {"a": TABLE})
    ledger = plan_weights(wanted, source)
    write_bundle(tmp_path / "b", wanted, ledger, source, WeightSource())
    weights = read_bundle(tmp_path / "b").weights()
    held = weights["a"]
    reload_into(weights, ledger, checkpoint(tmp_path / "hf2", {"a": TABLE + 1}))
    assert torch.equal(held, TABLE + 1)
    assert torch.equal(read_bundle(tmp_path / "b", check="full").weights()["a"], TABLE)
