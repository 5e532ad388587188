"""`inspect`, `verify` and `diff`, against facts counted by hand and against planted damage."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import deepinfer_compile
from deepinfer_compile.cli.facts import recipe_kind
from deepinfer_compile.cli.stored_text import graph_lines
from tests import models
from tests.bundle.support import refit
from tests.cli.conftest import Run, Toy, document, save


def flip_last_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.fixture
def copy(toy: Toy, tmp_path: Path) -> Path:
    shutil.copytree(toy.bundle, tmp_path / "copy.bundle")
    return tmp_path / "copy.bundle"


@pytest.fixture(scope="module")
def changed(toy: Toy, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder that differs from the toy's in one tensor, and its bundle."""
    root = tmp_path_factory.mktemp("changed")
    shutil.copytree(toy.folder, root / "model")
    tensors = load_file(root / "model" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 4] += 0.5
    save_file(tensors, root / "model" / "model.safetensors", {"format": "pt"})
    deepinfer_compile.build(root / "model", root / "changed.bundle", native=False)
    return root / "model", root / "changed.bundle"


def test_inspect_counts(cli: Run, toy: Toy) -> None:
    found = document(cli("inspect", toy.bundle, "--json"))
    heads, head_dim, layers = models.BASE["num_key_value_heads"], models.BASE["hidden_size"] // 6, 3
    per_token = 2 * heads * head_dim * 4
    (cache,) = found["caches"]
    assert (cache["kind"], cache["layers"], cache["bytes_per_token"]) == ("kv", [0, 1, 2], per_token)
    assert found["cache_bytes_per_token"] == per_token * layers
    assert found["cache_bytes_per_request"] == per_token * layers * models.BASE["max_position_embeddings"]
    on_disk = {str(p.relative_to(toy.bundle)): p.stat().st_size for p in toy.bundle.rglob("*") if p.is_file()}
    assert {n: s for n, s in on_disk.items() if not n.startswith("manifest.")} == found["files"]
    stored = sum(size for name, size in on_disk.items() if name.endswith(".safetensors"))
    assert found["weights"]["stored_bytes"] == stored
    parameters = sum(p.numel() * p.element_size() for p in toy.model.parameters())
    assert parameters < found["weights"]["bytes"] < parameters + 1024  # what capture computed is small
    assert 0 < stored - found["weights"]["bytes"] < 16384  # headers and padding
    assert sum(found["weights"]["recipes"].values()) >= 20
    assert {p["name"] for p in found["programs"]} == {"prefill", "decode", "verify"}
    for program in found["programs"]:
        (layer,) = [b for b in program["blocks"] if b["layers"]]
        assert (layer["layers"], layer["calls"]) == ([0, 1, 2], 3)
        assert sum(n for name, n in layer["operations"].items() if "cached_attention" in name) == 1
    assert found["tokenizer"] == {"present": True, "chat": True}
    assert found["waivers"] == []


def test_inspect_shows_it(cli: Run, toy: Toy) -> None:
    shown = cli("inspect", toy.bundle).stdout
    for part in (
        "LlamaForCausalLM",
        "vocabulary 1009, context 1024",
        "0-2",
        "graphs only",
        "no waivers",
        "ledger.json",
    ):
        assert part in shown
    assert re.search(r"recipes: copy \d+.*; computed at capture: \d+; not used: 0", shown)


def test_inspect_refuses_damage(cli: Run, copy: Path) -> None:
    flip_last_byte(copy / "ledger.json")
    result = cli("inspect", copy)
    assert result.exit_code == 8
    assert "ledger.json" in result.stderr


def test_verify_finds_damage_of_data_only_in_full(cli: Run, toy: Toy, copy: Path) -> None:
    good = cli("verify", toy.bundle, "--full")
    assert good.exit_code == 0
    assert "weight data hashed" in good.stdout
    flip_last_byte(copy / "weights" / "model-00001-of-00001.safetensors")
    assert cli("verify", copy).exit_code == 0
    full = cli("verify", copy, "--full", "--json")
    assert full.exit_code == 8
    assert document(full)["error"] == "BundleCorrupt"


def test_verify_against_the_model(cli: Run, toy: Toy, changed: tuple[Path, Path]) -> None:
    good = cli("verify", toy.bundle, "--graph-only", "--against", toy.folder, "--json")
    assert good.exit_code == 0, good.stderr
    parity = document(good)["parity"]
    assert [s["tokens"] for s in parity["samples"]] == [9, 30, 97]
    assert max(s["error"] for s in parity["samples"]) < 2e-6
    bad = cli("verify", toy.bundle, "--graph-only", "--against", changed[0])
    assert bad.exit_code == 8
    assert "beyond the limit" in bad.stdout
    assert "does not compute what" in bad.stderr
    data = cli("verify", toy.bundle, "--graph-only", "--against", changed[0], "--json")
    assert (data.exit_code, document(data)["ok"]) == (8, False)
    assert cli("verify", toy.bundle, "--graph-only", "--against", changed[0], "--tolerance", 10).exit_code == 0


def test_verify_against_a_bf16_model(cli: Run, tmp_path: Path) -> None:
    save(models.make("llama", num_hidden_layers=1).to(torch.bfloat16), tmp_path / "m", tokenizer=False)
    assert cli("build", tmp_path / "m", "-o", tmp_path / "b", "--graph-only", "--weights", "none").exit_code == 0
    alone = cli("verify", tmp_path / "b")
    assert "no tensor was checked" in alone.stdout
    result = cli("verify", tmp_path / "b", "--graph-only", "--against", tmp_path / "m", "--json")
    assert result.exit_code == 0, result.stdout
    parity = document(result)["parity"]
    assert "eager bfloat16" in parity["limit_is"]
    assert 1e-4 < max(s["error"] for s in parity["samples"]) <= parity["limit"] < 0.1


def test_verify_against_another_model(cli: Run, toy: Toy, tmp_path: Path) -> None:
    save(models.make("llama", num_hidden_layers=1, vocab_size=500), tmp_path / "m", tokenizer=False)
    result = cli("verify", toy.bundle, "--graph-only", "--against", tmp_path / "m", "--json")
    assert result.exit_code != 0
    assert cli("verify", toy.bundle, "--against", tmp_path / "nothing").exit_code == 7


def test_diff_of_equals(cli: Run, toy: Toy, copy: Path) -> None:
    result = cli("diff", toy.bundle, copy)
    assert (result.exit_code, result.stdout.strip()) == (0, "the bundles are the same")


def test_diff_names_the_changed_tensor(cli: Run, toy: Toy, changed: tuple[Path, Path]) -> None:
    result = cli("diff", toy.bundle, changed[1], "--json")
    found = document(result)
    assert (result.exit_code, found["same"]) == (1, False)
    assert found["weights"]["changed"] == ["model.layers.1.mlp.down_proj.weight"]
    assert (found["manifest"], found["programs"], found["files"]) == ([], [], {})
    assert "model.layers.1.mlp.down_proj.weight" in cli("diff", toy.bundle, changed[1]).stdout


def test_diff_shows_graphs_and_fields(cli: Run, toy: Toy, plain: Toy) -> None:
    found = document(cli("diff", toy.bundle, plain.bundle, "--json"))
    fields = {entry["field"]: (entry["a"], entry["b"]) for entry in found["manifest"]}
    assert fields["caches.inputs"][1] == ["cache_0_0"]
    layer = next(e for e in found["programs"] if (e["program"], e["block"]) == ("decode", "layer0"))
    assert any(line.startswith("-") and "1e-06" in line for line in layer["diff"])
    assert any(line.startswith("+") and "0.001" in line for line in layer["diff"])
    assert "model.layers.2.mlp.down_proj.weight" in found["weights"]["only_a"]
    assert found["files"]["tokenizer/tokenizer.json"] == "only in a"
    shown = cli("diff", toy.bundle, plain.bundle).stdout
    assert "only in a" in shown
    assert "@@" in shown


def test_stored_graphs_read_like_graphs() -> None:
    val = {"dtype": "float32", "shape": [1, "d0", 96]}
    pair = {"items": [val, {"number": "d0"}]}
    to, cat = [{"ref": "x"}, {"dtype": "bfloat16"}], [[{"ref": "y"}, None], -1]
    nodes = [
        {"name": "x", "op": "input", "val": val},
        {"name": "w", "op": "input", "val": val, "weight": "a.weight"},
        {"name": "y", "op": "call", "target": "aten.to.dtype", "args": to, "val": val},
        {"name": "z", "op": "call", "target": "aten.cat.default", "args": cat, "kwargs": {"k": 1.5}, "val": pair},
        {"name": "b", "op": "block", "target": "layer0", "args": [{"tuple": [{"ref": "z"}]}], "val": val, "layer": 4},
        {"name": "output", "op": "output", "args": [{"ref": "b"}]},
    ]
    assert graph_lines({"nodes": nodes}) == [
        "%x: f32[1, d0, 96] = input",
        "%w: f32[1, d0, 96] = input  # a.weight",
        "%y: f32[1, d0, 96] = aten.to.dtype(%x, bf16)",
        "%z: (f32[1, d0, 96], d0) = aten.cat([%y, None], -1, k=1.5)",
        "%b: f32[1, d0, 96] = layer0((%z))  # layer 4",
        "return %b",
    ]


def test_recipes_in_words() -> None:
    copied = {"op": "copy", "of": "a"}
    assert recipe_kind(copied) == "copy"
    assert recipe_kind({"op": "tied", "of": [copied, copied]}) == "tied of copy"
    stacked = {"op": "stack", "dim": 0, "of": [{"op": "cast", "to": "float32", "of": copied}]}
    assert recipe_kind(stacked) == "stack of cast of copy"


@pytest.mark.parametrize("command", ["verify", "inspect", "explain"])
def test_a_bundle_whose_digests_fit_and_whose_programs_do_not(
    cli: Run, plain: Toy, tmp_path: Path, command: str
) -> None:
    """Whoever made it made it well; the commands still end in words that name the file."""
    root = tmp_path / "b"
    shutil.copytree(plain.bundle, root)
    program = json.loads((root / "programs" / "decode.json").read_text())
    del program["skeleton"]["nodes"][-2]["args"]
    (root / "programs" / "decode.json").write_text(json.dumps(program))
    refit(root)
    result = cli(command, root)
    assert result.exit_code == 8
    assert "programs/decode.json" in result.stderr
    assert "lacks the key 'args'" in result.stderr
