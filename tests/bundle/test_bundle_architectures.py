"""Each architecture's checkpoint gives bit for bit what Transformers loads from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from deepinfer_compile.bundle import Checkpoint, execute, plan_weights
from deepinfer_compile.bundle.execute import same_bits
from tests.models import BASE, CONFIGS, make

MINIMAX = {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 2}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("MiniMaxConfig", {**MINIMAX, "layer_types": ["full_attention", "linear_attention"]}),
    "minimax_m2": ("MiniMaxM2Config", MINIMAX),
    "phimoe": ("PhimoeConfig", {"num_local_experts": 4, "num_hidden_layers": 2}),
    "llama_tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", {"n_embd": 96, "n_head": 6, "n_layer": 2}),
}


def _model(name: str) -> Any:
    if name in CONFIGS:
        return make(name, dtype=torch.bfloat16)
    cls, extra = OTHERS[name]
    torch.manual_seed(0)
    config = getattr(transformers, cls)(**{**BASE, **extra})
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def _check(folder: Path, loaded: Any) -> list[str]:
    """Plan and run every recipe and compare with the loaded model; returns the notes."""
    state = loaded.state_dict()
    groups: dict[tuple[int, torch.Size], list[str]] = {}
    for name, tensor in state.items():
        groups.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
    tied = [names for names in groups.values() if len(names) > 1]
    checkpoint = Checkpoint.open(folder)
    ledger = plan_weights({n: (t.dtype, tuple(t.shape)) for n, t in state.items()}, checkpoint, tied)
    assert {name for name in state if ledger.canonical(name) in ledger.recipes} == set(state)
    for name, tensor in state.items():
        assert same_bits(execute(ledger.recipe(name), checkpoint), tensor), name
    return list(ledger.notes)


@pytest.mark.parametrize("name", [*CONFIGS, *OTHERS])
def test_saved_by_transformers(tmp_path: Path, name: str) -> None:
    _model(name).save_pretrained(tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    for dtype in (torch.bfloat16, torch.float32):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert _check(tmp_path, loaded) == []


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3", "minimax_m2"])
def test_published_names_are_per_expert(tmp_path: Path, name: str) -> None:
    """The files these tests read have the published form, not the class's."""
    _model(name).save_pretrained(tmp_path)
    names = Checkpoint.open(tmp_path).names()
    assert any(".experts.0." in item for item in names)
    assert not any(item.endswith("experts.gate_up_proj") for item in names)


def test_base_class_checkpoint_and_extra_layers(tmp_path: Path) -> None:
    """Without the `model.` prefix, and with a layer the config does not have (a draft layer)."""
    _model("llama_tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    renamed["layers.3.mlp.up_proj.weight"] = torch.zeros(2, 2)
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    notes = _check(tmp_path, loaded)
    assert notes == ["1 tensors of the checkpoint are not used by the model, the first is layers.3.mlp.up_proj.weight"]


def _configure(folder: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))


def test_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """The published GPT-OSS form: packed blocks and scales for the experts."""
    make("gpt_oss", dtype=torch.bfloat16, hidden_size=128).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gen = torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inner, outer = tensors.pop(name).shape
        shape = (experts, outer, inner // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 126, shape[:-1], generator=gen, dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _configure(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    dequantize = transformers.Mxfp4Config(dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=dequantize
    )
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}
    assert _check(tmp_path, loaded) == []


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
@pytest.mark.parametrize(("scale", "block"), [("_scale_inv", 32), (".scale", 32), ("_scale_inv", 128)])
def test_fp8_checkpoints(tmp_path: Path, name: str, scale: str, block: int) -> None:
    """The published DeepSeek form: FP8 matrices with a grid of scales, ragged at the edges."""
    _model(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gen = torch.Generator().manual_seed(0)
    expected = {}
    for key in [k for k in tensors if k.endswith("_proj.weight") or ".experts." in k]:
        rows, columns = tensors[key].shape
        grid = torch.rand(-(-rows // block), -(-columns // block), generator=gen) * 0.01
        tensors[key] = tensors[key].mul(100).to(torch.float8_e4m3fn)
        tensors[key + scale if scale[0] == "_" else key.removesuffix(".weight") + scale] = grid
        spread = grid.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
        expected[key] = (tensors[key].float() * spread).to(torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [block, block]})
    checkpoint = Checkpoint.open(tmp_path)
    wanted = {n: (t.dtype, tuple(t.shape)) for n, t in _model(name).state_dict().items()}
    ledger = plan_weights(wanted, checkpoint)
    assert ledger.ignored == ()
    for key in wanted:
        got = execute(ledger.recipe(key), checkpoint)
        if key in expected:
            assert same_bits(got, expected[key]), key
        elif key.endswith("experts.gate_up_proj"):
            stem = key.removesuffix("gate_up_proj")
            for e in range(wanted[key][1][0]):
                parts = [expected[f"{stem}{e}.{part}_proj.weight"] for part in ("gate", "up")]
                assert same_bits(got[e], torch.cat(parts)), (key, e)
        elif key.endswith("experts.down_proj"):
            stem = key.removesuffix("down_proj")
            for e in range(wanted[key][1][0]):
                assert same_bits(got[e], expected[f"{stem}{e}.down_proj.weight"]), (key, e)


def test_fp8_equals_transformers(tmp_path: Path) -> None:
    """Dequantised while loading, with sizes that the blocks divide (Transformers needs that)."""
    sizes = {"hidden_size": 96, "intermediate_size": 160, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"head_dim": 32, "num_attention_heads": 3, "num_key_value_heads": 1}
    make("qwen3_moe", dtype=torch.bfloat16, **sizes).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for key in [k for k in tensors if k.endswith("_proj.weight")]:
        rows, columns = tensors[key].shape
        tensors[key] = tensors[key].mul(100).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.rand(rows // 32, columns // 32) * 0.01
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _configure(tmp_path, {"quant_method": "fp8", "weight_block_size": [32, 32]})
    config = transformers.FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=config
    )
    assert {tensor.dtype for tensor in loaded.state_dict().values()} == {torch.bfloat16}
    assert _check(tmp_path, loaded) == []
