"""Latent attention is found however it is written, keeps its scale to the bit and equals eager; misses say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import ExpectedMatchMissing
from deepinfer_compile.graph import argument, is_op, tensor
from deepinfer_compile.ops import ATTENTION, LATENT_ATTENTION
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.passes.raise_rms_norm import RaiseRmsNorm
from deepinfer_compile.passes.raise_rope import RaiseRope
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from tests import models
from tests.golden_text import check_golden
from tests.passes.harness import calls, check_equal, run_passes
from tests.passes.stages import canonical, go_on
from tests.passes.toys import before_after, check_toy, check_twice_is_once, ops, raised, reasons, toy

A = torch.ops.aten
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 10000.0,
        "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "first_k_dense_replace": 1}
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("deepseek_v2", {"q_lora_rank": 40, "v_head_dim": 12}),
    ("deepseek_v3", {"q_lora_rank": None, "v_head_dim": 4, "rope_interleave": False}),
    ("deepseek_v3", {"num_attention_heads": 1, "num_key_value_heads": 1}),
]


def latent_nodes(program: Program) -> list[Any]:
    """Calls of the op."""
    return [n for gm in program.blocks.values() for n in gm.graph.nodes if is_op(n, LATENT_ATTENTION.overload)]


def check_latent(program: Program, model: Any, records: Any) -> None:
    """Every layer's attention is the op, once a block, and the program equals eager."""
    for block in program.blocks:
        assert calls(program, "deepinfer.latent_attention", block) == int(block.startswith("layer"))
    assert calls(program, "deepinfer.attention") == 0
    assert reasons(records) == []
    check_equal(program, model)


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_architectures(name: str) -> None:
    model, before = canonical(name)
    program, records = go_on(before, RaiseLatentAttention(require=True))
    check_latent(program, model, records)
    check_twice_is_once(program, RaiseLatentAttention(require=True))
    cached, _ = go_on(program, CacheAttention())
    assert {(c.kind, c.shape) for c in cached.caches} == {("latent", (64, 32))}
    check_equal(cached, model, chunk=13)
    check_equal(cached, model, chunk=1)


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
def test_variants(name: str, changes: dict[str, Any]) -> None:
    model = models.make(name, **SMALL, **changes)
    program, records = run_passes(model, Canonicalize(), RaiseLatentAttention(require=True))
    check_latent(program, model, records)


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_other_attention_is_no_candidate(name: str) -> None:
    program, records = go_on(canonical(name)[1], RaiseLatentAttention(require=True))
    assert calls(program, "deepinfer.attention") == 1
    assert records[-1].remarks == ()


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_after_norms_and_rotation_were_raised(name: str) -> None:
    model, before = canonical(name)
    program, records = go_on(before, RaiseRmsNorm(), RaiseRope(), RaiseLatentAttention(require=True))
    check_latent(program, model, records)


def test_the_context_is_not_expanded_and_weights_are_views() -> None:
    program, _ = go_on(canonical("deepseek_v3")[1], RaiseLatentAttention())
    for node in latent_nodes(program):
        assert tensor(node.args[4]).shape == (6, 12, 24)
        assert tensor(node.args[5]).shape == (6, 24, 20)
        assert all("kv_b" not in str(n.args) for n in node.graph.nodes if is_op(n, A.linear.default))
        for weight in node.args[4:6]:
            while weight.op != "placeholder":
                assert weight.target in (A.reshape.default, A.slice.Tensor, A.transpose.int)
                weight = weight.args[0]
            assert weight.meta["weight"] == "self_attn.kv_b_proj.weight"


def test_scale_is_taken_exactly() -> None:
    before, _ = run_passes(models.make("deepseek_v3", rope_parameters=YARN, **SMALL), Canonicalize())
    after, _ = go_on(before, RaiseLatentAttention())
    scales = [
        [argument(n, "scale") for gm in p.blocks.values() for n in gm.graph.nodes if is_op(n, op.overload)]
        for p, op in ((before, ATTENTION), (after, LATENT_ATTENTION))
    ]
    assert scales[0] == scales[1]
    assert scales[0][0] != pytest.approx(20**-0.5)


H, DN, DR, DV, DL = 3, 6, 4, 5, 7


class Latent(nn.Module):
    """Latent attention without norms and rotation, with the switches that the tests turn."""

    layout, bias, per_head_rope, key, window, sinks, mask = "view first", False, False, "cat", 0, False, False

    def __init__(self, **switches: Any) -> None:
        super().__init__()
        vars(self).update(switches)
        self.q = nn.Linear(24, H * (DN + DR), bias=False)
        self.kv_a = nn.Linear(24, DL + DR * (H if self.per_head_rope else 1), bias=False)
        self.kv_b = nn.Linear(DL, H * (DN + DV), bias=self.bias)
        self.sink = nn.Parameter(torch.empty(H))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, H, DN + DR).transpose(1, 2)
        c, k_rope = self.kv_a(x).split([DL, self.kv_a.out_features - DL], dim=-1)
        k_rope = k_rope.view(batch, length, -1, DR).transpose(1, 2)
        up = self.kv_b(c).view(batch, length, H, DN + DV)
        if self.layout == "view first":
            k_nope, v = up.transpose(1, 2).split([DN, DV], dim=-1)
        elif self.layout == "slices":
            k_nope, v = up[..., :DN].transpose(1, 2), up[..., DN:].transpose(1, 2)
        else:
            k_nope, v = (t.transpose(1, 2) for t in up.split([DN, DV], dim=-1))
        k_rope = k_rope.expand(-1, H, -1, -1)
        if self.key == "cat":
            k = torch.cat([k_nope, k_rope], -1)
        elif self.key == "writes":
            k = k_nope.new_empty(batch, H, length, DN + DR)
            k[..., DN:] = k_rope
            k[..., :DN] = k_nope
        elif self.key == "sum":
            k = torch.cat([k_nope, k_rope], -1) + 1.0
        else:
            k = torch.cat([k_nope + 1.0, k_rope], -1)
        mask = torch.ones(length, length, dtype=torch.bool).tril() if self.mask else None
        sinks = self.sink if self.sinks else None
        q = torch.cat([q[..., :DN], q[..., DN:]], -1)
        return torch.ops.deepinfer.attention(q, k, v, mask, sinks, 0.3, self.window, 0.0, not self.mask)


@pytest.mark.parametrize("layout", ["view first", "split first", "slices"])
@pytest.mark.parametrize("key", ["cat", "writes"])
def test_layouts(layout: str, key: str) -> None:
    model = toy(Latent(layout=layout, key=key))
    program, records = raised(model, RaiseLatentAttention(require=True))
    assert ops(program) == ["deepinfer.latent_attention"]
    assert reasons(records, "applied") == ["latent 7, rope 4, 3 heads"]
    check_toy(program, model)


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"bias": True}, "the up-projection of the latent has a bias"),
        ({"per_head_rope": True}, "the rotary key is not one row shared by all heads"),
        ({"window": 8}, "the attention has window 8"),
        ({"sinks": True}, "the attention has sinks body_sink"),
        ({"mask": True}, "the attention has mask tril_default"),
        ({"key": "sum"}, "the key is aten.add.Tensor, not two parts side by side"),
        ({"key": "shifted"}, "aten.add.Tensor is not a head's part of an up-projection"),
    ],
)
def test_near_misses(switches: dict[str, Any], reason: str) -> None:
    model = toy(Latent(**switches))
    program, records = raised(model, RaiseLatentAttention())
    assert ops(program) == ["deepinfer.attention"]
    assert reasons(records) == [reason]
    check_toy(program, model)


def test_required_match_is_an_error_and_can_be_waived() -> None:
    model = toy(Latent(bias=True))
    with pytest.raises(ExpectedMatchMissing, match="the up-projection of the latent has a bias"):
        raised(model, RaiseLatentAttention(require=True))
    pipeline = Pipeline((Canonicalize(), RaiseLatentAttention(require=True)))
    program, records = pipeline.run(capture(model), settings={"waive": ["raise-latent-attention"]})
    assert ops(program) == ["deepinfer.attention"]
    assert "waived" in records[-1].waived
    assert "bias" in records[-1].waived


def test_golden() -> None:
    check_golden("raise_latent_attention", before_after(toy(Latent()), RaiseLatentAttention()))
