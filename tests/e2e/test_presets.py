"""Every pass of every preset is replayed numerically, on every architecture, in fp64 and as it is."""

from __future__ import annotations

import pytest

from deepinfer_compile.observe import EXACT_TOLERANCE, NumericReplay
from deepinfer_compile.phases import phase_programs
from deepinfer_compile.presets import PACK, PHASES, RAISE, default
from deepinfer_compile.replay import weights_from
from tests import models
from tests.passes.harness import IDS, ROWS
from tests.passes.stages import captured

# per layer kind: what must be a dialect op, so that a silent miss fails here
WANTED = {
    "llama": {"rope": 2, "gated_act": 1, "cached_attention": 1},
    "qwen3": {"rope": 2, "gated_act": 1, "cached_attention": 1},
    "gemma": {"rope": 4, "gated_act": 2, "cached_attention": 2},
    "phi": {"rope": 2, "gated_act": 1, "cached_attention": 1},
    "mistral": {"rope": 2, "gated_act": 1, "cached_attention": 1},
    "mixtral": {"rope": 2, "route": 1, "experts": 1, "cached_attention": 1},
    "qwen3_moe": {"rope": 2, "route": 1, "experts": 1, "cached_attention": 1},
    "olmoe": {"rope": 2, "route": 1, "experts": 1, "cached_attention": 1},
    "gpt_oss": {"rope": 4, "route": 2, "experts": 2, "cached_attention": 2},
    "glm4_moe": {"partial_rope": 4, "route": 1, "experts": 1, "gated_act": 2, "cached_attention": 2},
    "deepseek_v2": {"rope": 4, "route": 1, "experts": 1, "gated_act": 2, "cached_latent_attention": 2},
    "deepseek_v3": {"rope": 4, "route": 1, "experts": 1, "gated_act": 2, "cached_latent_attention": 2},
}


@pytest.mark.parametrize("name", models.CONFIGS)
def test_every_pass_holds_and_every_block_is_raised(name: str) -> None:
    model, captured_program = captured(name)
    watch = NumericReplay(weights_from(model), IDS, ROWS)
    packed, records = default().run(captured_program, observers=[watch])
    programs, _ = phase_programs(packed, {}, [watch])
    assert [e[0] for e in watch.errors[: len(RAISE) + len(PACK)]] == [p.name for p in (*RAISE, *PACK)]
    assert len(watch.errors) == len(RAISE) + len(PACK) + sum(map(len, PHASES.values()))
    assert max(exact for _, exact, _ in watch.errors) < EXACT_TOLERANCE / 1000
    assert not [r for record in records for r in record.remarks if r.kind == "missed"]
    assert set(programs) == set(PHASES)
    names = [
        str(n.target).split(".")[1]
        for block, gm in packed.blocks.items()
        if block.startswith("layer")
        for n in gm.graph.nodes
        if str(n.target).startswith("deepinfer.")
    ]
    for op, count in WANTED[name].items():
        assert names.count(op) == count
    assert not any(str(n.target) == "aten.rsqrt.default" for gm in packed.blocks.values() for n in gm.graph.nodes), (
        "an RMSNorm was left in ATen"
    )
