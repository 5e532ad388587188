"""Capture of models of no library: what forward takes, how long it may be; and refusals that name the place."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.capture.source import concrete_buffers
from deepinfer_compile.errors import UnsupportedArchitecture, UnsupportedConstruct
from deepinfer_compile.replay import bind, weights_from
from tests import models
from tests.plain_model import VOCAB, PlainDecoder, make_plain


@pytest.mark.parametrize("form", ["loop", "einsum"])
def test_plain_decoder_is_captured_exactly(form: str) -> None:
    model = make_plain(form)
    program = capture(model)
    assert [n.name for n in program.inputs()] == ["input_ids"]
    assert program.layers_of("layer0") == [0, 1, 2]
    assert program.info["max_tokens"] == 256
    assert program.info["tied"] == [["embedding.weight", "output.weight"]]
    ids = torch.randint(0, VOCAB, (1, 41), generator=torch.Generator().manual_seed(0))
    for length in (1, 2, 41):
        got = program.run({**bind(program, weights_from(model)), "input_ids": ids[:, :length]})
        assert torch.equal(got, model(ids[:, :length]))


class Renamed(nn.Module):
    """The ids under another name, positions asked for, and an option with a default."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(31, 8), nn.Embedding(512, 8)

    def forward(self, tokens: Tensor, position_ids: Tensor, scale: float = 2.0) -> Tensor:
        return self.words(tokens) * scale + self.places(position_ids)


def test_inputs_get_our_names() -> None:
    model = Renamed()
    program = capture(model)
    assert [n.name for n in program.inputs()] == ["input_ids", "position_ids"]
    assert "max_tokens" not in program.info
    ids, at = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 7, 9]])
    got = program.run({**bind(program, weights_from(model)), "input_ids": ids, "position_ids": at})
    assert torch.equal(got, model(ids, at))


class Demanding(Renamed):
    def forward(self, tokens: Tensor, cache: Tensor) -> Tensor:  # type: ignore[override]
        return self.words(tokens) + cache


class Nameless(Renamed):
    def forward(self, *args: Tensor) -> Tensor:  # type: ignore[override]
        return self.words(args[0])


@pytest.mark.parametrize(("model", "reason"), [(Demanding(), "needs 'cache'"), (Nameless(), "no named argument")])
def test_a_forward_that_cannot_be_called_is_refused(model: nn.Module, reason: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=reason):
        capture(model)


class Restricted(Renamed):
    def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
        if tokens.max() > 30:
            return self.words(tokens)
        return self.places(tokens)


def test_control_flow_on_values_names_the_line() -> None:
    with pytest.raises(UnsupportedConstruct) as caught:
        capture(Restricted())
    assert re.search(r"test_capture_plain\.py:\d+ in forward", caught.value.where)


SPARSE: dict[str, tuple[str, dict[str, Any]]] = {
    "indexer": ("DeepseekV32Config", {**models.MLA, "n_group": 3, "topk_group": 2, "index_topk": 8}),
    "compressor": (
        "DeepseekV4Config",
        {"num_key_value_heads": 1, "head_dim": 32, "n_routed_experts": 4, "moe_intermediate_size": 40, "o_groups": 2,
         "o_lora_rank": 16, "q_lora_rank": 40, "index_n_heads": 2, "index_head_dim": 16,
         "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
         "mlp_layer_types": ["hash_moe", "moe", "moe"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("part", SPARSE)
@pytest.mark.parametrize("attention", ["deepinfer", "eager"])
def test_sparse_attention_is_refused_before_tracing(part: str, attention: str) -> None:
    cls, sizes = SPARSE[part]
    config = getattr(transformers, cls)(**{**models.BASE, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedConstruct) as caught:
        capture(model, attention=attention)
    assert re.search(r"model\.layers\.\d\.self_attn \(DeepseekV\d+Attention\)", str(caught.value))
    assert re.search(rf"modeling_deepseek_v\d+\.py:\d+ in DeepseekV\d+Attention, its {part}", caught.value.where)


def test_stock_implementations_can_be_traced() -> None:
    model = models.make("mixtral")
    program = capture(model, attention="sdpa", experts="grouped_mm")
    targets = {str(n.target) for gm in program.blocks.values() for n in gm.graph.nodes}
    assert "transformers.grouped_mm_fallback.default" in targets
    assert "aten.scaled_dot_product_attention.default" in targets
    assert not any(t.startswith("deepinfer.") for t in targets)
    assert model.config._experts_implementation != "deepinfer"


def test_decoder_longer_than_its_table() -> None:
    assert capture(PlainDecoder(context=64).eval()).info["max_tokens"] == 64


class Inner(nn.Module):
    """A model inside a model, which knows what its own buffers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 16
        self.register_buffer("scale", torch.empty(1, device="meta"), persistent=False)

    def _init_weights(self, module: Any) -> None:
        module.scale.fill_(self.size**-0.5)


class Outer(nn.Module):
    """Has no size, as the heads of some published models."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Inner()

    def _init_weights(self, module: Any) -> None:
        raise AssertionError("the innermost model initialises a module")


def test_buffers_are_filled_by_the_innermost_model() -> None:
    found = concrete_buffers(Outer())
    assert {name: held.tolist() for name, held in found.items()} == {"model.scale": [0.25]}
