"""`explain` of a configuration alone, of an architecture that is defined here: layers, boundary, bytes, operations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_compile.cli import explain_prefill
from deepinfer_compile.cli.explain_prefill import explain_own
from deepinfer_compile.cli.show import stdout
from deepinfer_compile.errors import BadModelConfig
from deepinfer_compile.models import own
from deepinfer_compile.models.deepseek_v41 import tiny
from deepinfer_compile.prefill_work import PrefillWork
from tests.cli.conftest import Run
from tests.shared_kv import Form, raised
from tests.unit.test_prefill_work import SHORT, WITHIN, by_hand

FULL = {"model_type": "deepseek_v41", "text_config": {"model_type": "deepseek_v41_text", "num_hidden_layers": 40}}
MAP = [
    ("0-1", "0", "-", "-", "memory before layer 1"),
    ("2-7", "2", "2", "2", ""),
    ("8-13", "2", "8", "8", ""),
    ("14-19", "2", "14", "14", "memory before layer 14"),
    ("20-23", "1", "20", "20", "layer 20 publishes candidates, boundary"),
    ("24-27", "1", "20", "24", ""),
    ("28-31", "1", "20", "28", ""),
    ("32-35", "1", "20", "32", ""),
    ("36-39", "1", "20", "36", ""),
]


def write(folder: Path, raw: dict[str, Any]) -> Path:
    """A config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(raw))
    return path


def small(folder: Path) -> Path:
    """The config.json of a tiny model with all that counts."""
    config = tiny.config(**SHORT)
    text = {k: v for k, v in vars(config).items() if k != "yarn"}
    return write(folder, {"model_type": "deepseek_v41_text", **text})


def test_a_small_configuration_is_explained(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny.config(**SHORT)
    monkeypatch.setattr(explain_prefill, "LENGTHS", (64, config.max_position_embeddings, 1 << 10))
    result = cli("explain", small(tmp_path), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert found["boundary"] == 1
    assert [row["layers"] for row in found["layers"]] == ["0", "1", "2"]
    # a window of 16 and a draft of 5, of which one more can be taken back; the context ends before 1 << 10
    assert found["keep"] == 16 + 6
    assert [row["tokens"] for row in found["prefill"]] == [64, config.max_position_embeddings]
    check_counts(found, config)


def check_counts(found: dict[str, Any], config: own.DeepseekV41Config) -> None:
    for row in found["prefill"]:
        wanted = by_hand(config, row["tokens"], found["keep"])
        for name, number in zip(("whole", "cut inside", "cut after"), wanted, strict=True):
            assert abs(row[name] - number) <= WITHIN * number


def test_what_is_found_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    work = PrefillWork(raised(Form((0, 4, None), (False, True, True), 1)))
    found = explain_prefill.explain_prefill(work, 3, (1000,))
    layers = [{"layers": "0", "notes": ""}, {"layers": "1-2", "notes": "boundary"}]
    explain_prefill.print_own({"model": "Toy", "layers": layers, "kv_bytes_per_token": 12.5, **found}, stdout())
    said = capsys.readouterr().out
    for words in ("boundary: layer 1, found in the graph", "12.5 bytes a token", "the last 7 rows", "1-2"):
        assert words in said
    assert f"{found['prefill'][0]['saved inside']:.1%}" in said


def test_the_published_layers_and_bytes() -> None:
    config = own.DeepseekV41Config.read(FULL)
    rows = own.roles.table(config)
    assert [tuple(v for k, v in row.items() if k != "window") for row in rows] == MAP
    assert {row["window"] for row in rows} == {"128"}
    assert own.kv_bytes_per_token(config) == 890


def test_a_boundary_that_is_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    program = raised(Form((0, 4, None), (False, True, True), 1))
    monkeypatch.setattr("deepinfer_compile.capture.capture", lambda model: program)
    claims = own.Own("Toy", torch.nn.Identity(), 1000, 2, ({"layers": "0-2"},), 1.0, 3)
    with pytest.raises(BadModelConfig, match="the graph is cut at layer 1"):
        explain_own(claims)


def test_other_files_are_not_taken_for_definitions(tmp_path: Path) -> None:
    assert own.find("llama") is None
    assert own.find(tmp_path) is None
    assert own.find(write(tmp_path, {"model_type": "llama"})) is None


@pytest.mark.slow
def test_the_published_configuration_is_explained(cli: Run, tmp_path: Path) -> None:
    path = write(tmp_path, FULL)
    result = cli("explain", path, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    config = own.DeepseekV41Config.read(FULL)
    assert (found["boundary"], found["kv_bytes_per_token"], found["keep"]) == (20, 890, 134)
    assert [row["tokens"] for row in found["prefill"]] == [1 << 10, 1 << 12, 1 << 15, 1 << 17, 1 << 20]
    check_counts(found, config)
    at = next(row for row in found["prefill"] if row["tokens"] == 1 << 15)
    assert 0.49 <= at["saved inside"] <= 0.50
    assert 0.46 <= at["saved after"] <= 0.48
