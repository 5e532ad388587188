"""An engineer who distrusts compilers: wrong rewrites are caught, misses are errors, explanations are complete."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.fx import GraphModule

import deepinfer_compile as dc
from deepinfer_compile.arena import peak_bytes
from deepinfer_compile.bisect import bisect
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import ExpectedMatchMissing, NumericMismatch
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, is_op
from deepinfer_compile.observe import NumericReplay
from deepinfer_compile.ops import RMS_NORM
from deepinfer_compile.passbase import NONE, PassContext
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_latent_attention import RaiseLatentAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import default
from deepinfer_compile.replay import weights_from
from tests import models
from tests.passes.harness import IDS, ROWS


@dataclass(frozen=True)
class DoubleEps:
    """A wrong rewrite: a norm's epsilon is doubled, a change of 5e-7 in the result."""

    name: ClassVar[str] = "double-eps"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = frozenset({Fact.RAISED})
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in list(gm.graph.nodes):
            if is_op(node, RMS_NORM.overload) and node.args[2] < 1.5e-6 and ctx.claim(node, "wrong"):  # type: ignore[operator]
                edit = Editor(gm.graph, node)
                x, weight, eps, *rest = node.args
                edit.replace(node, edit.call(RMS_NORM.overload, x, weight, 2 * eps, *rest))  # type: ignore[operator]


def test_a_wrong_rewrite_through_the_public_argument_is_caught_and_named(tmp_path: Path) -> None:
    model = models.make("llama")
    wrong = default().insert(p=DoubleEps(), after="raise-rope")
    watch = NumericReplay(weights_from(model), IDS, ROWS)
    with pytest.raises(NumericMismatch, match="double-eps"):
        dc.build(model, tmp_path / "b", native=False, pipeline=wrong, observers=[watch])
    assert not (tmp_path / "b").exists()
    found = bisect(wrong, capture(model), weights_from(model), IDS, ROWS)
    assert found is not None
    assert found.name == "double-eps"
    assert found.application == 1


def test_a_required_match_that_is_missing_is_an_error_unless_waived() -> None:
    model = models.make("deepseek_v3")
    program = capture(model)
    blocked = Pipeline((Canonicalize(), RaiseLatentAttention(require=True)))
    with pytest.raises(ExpectedMatchMissing, match="raise-latent-attention"):
        blocked.run(program, limits={"raise-latent-attention": 0})
    _, records = blocked.run(
        program, limits={"raise-latent-attention": 0}, settings={"waive": ("raise-latent-attention",)}
    )
    assert "waived" in records[-1].waived


def test_the_arena_peak_is_what_liveness_says() -> None:
    model = models.make("llama")
    packed, _ = default().run(capture(model))
    width, rotary = 96 * 4, 2 * 16 * 4
    # the prefix's tables and state, and the first layer's output
    assert peak_bytes(packed) == {"per_token": 2 * width + rotary, "per_row": models.VOCAB * 4}
    assert torch.float32.itemsize == 4
