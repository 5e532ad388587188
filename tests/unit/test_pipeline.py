"""Order proofs, atomic passes, observers, numeric replay, bisection and reproducers, with planted faults."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch.fx import GraphModule

from deepinfer_compile.bisect import bisect, replay
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import GraphInvalid, NumericMismatch, PassFailed, PipelineOrder, UnknownPass
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, is_op, to_text
from deepinfer_compile.observe import Dump, NumericReplay, Reproducer
from deepinfer_compile.passbase import NONE, PassContext, describe, make, parse
from deepinfer_compile.passes.cache_attention import CacheAttention
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.program import Program
from deepinfer_compile.replay import weights_from
from tests import models
from tests.passes.harness import IDS, ROWS

A = torch.ops.aten


@dataclass(frozen=True)
class Planted:
    """A pass with a fault. kind: eps doubles an epsilon, from the `start`-th site on; crash; badshape."""

    name: ClassVar[str] = "planted"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = NONE
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    kind: str = "eps"
    start: int = 0

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        seen = 0
        for node in list(gm.graph.nodes):
            if not (is_op(node, A.add.Tensor) and isinstance(node.args[1], float)):
                continue
            seen += 1
            if not ctx.claim(node, "planted"):
                continue
            if self.kind == "crash":
                gm.graph.erase_node(next(iter(node.users)))
            factor = 2.0 if seen > self.start else 1.0
            edit = Editor(gm.graph, node)
            edit.replace(node, edit.call(A.add.Tensor, node.args[0], node.args[1] * factor))
            if self.kind == "badshape":
                node.graph.output_node().args[0].meta["val"] = node.meta["val"]  # type: ignore[union-attr]


@dataclass(frozen=True)
class Stale:
    """A pass that changes a call, or what is recorded of it, after an earlier pass was found right."""

    name: ClassVar[str] = "stale"
    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = NONE
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    kind: str = "operand"

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        means = [n for n in gm.graph.nodes if is_op(n, A.mean.dim)]
        if not means:
            return
        if self.kind == "operand":
            means[0].args = (next(n for n in gm.graph.nodes if is_op(n, A.linear.default)).args[1], *means[0].args[1:])
        elif self.kind == "argument":
            means[0].args = (*means[0].args[:2], False)
        elif self.kind == "operation":
            means[0].target, means[0].args = A.cumsum.default, (means[0].args[0], 0)
        else:
            means[0].meta["val"] = means[0].meta["val"].double()


@pytest.fixture(scope="module")
def llama() -> tuple[torch.nn.Module, Program]:
    model = models.make("llama")
    return model, capture(model)


def test_order_is_proven_when_the_pipeline_is_made() -> None:
    with pytest.raises(PipelineOrder, match="CANONICAL"):
        Pipeline((CacheAttention(),))
    with pytest.raises(UnknownPass, match="no-such"):
        Pipeline((Canonicalize(),)).insert(p=Planted(), after="no-such")


def test_options_round_trip_as_text() -> None:
    from deepinfer_compile.passes.select_kernels import SelectKernels

    assert describe(SelectKernels()) == "select-kernels"
    assert parse("canonicalize") == Canonicalize() == make("canonicalize")


def test_replay_names_the_wrong_pass(llama: tuple[torch.nn.Module, Program]) -> None:
    model, program = llama
    watch = NumericReplay(weights_from(model), IDS, ROWS)
    good = Pipeline((Canonicalize(), CacheAttention()))
    good.run(program, observers=[watch])
    assert [name for name, *_ in watch.errors] == ["canonicalize", "cache-attention"]
    assert max(e for _, e, _ in watch.errors) < 1e-12
    with pytest.raises(NumericMismatch, match="planted"):
        good.insert(p=Planted(), after="canonicalize").run(
            program, observers=[NumericReplay(weights_from(model), IDS, ROWS)]
        )


def test_bisect_names_pass_and_application(llama: tuple[torch.nn.Module, Program]) -> None:
    model, program = llama
    pipe = Pipeline((Canonicalize(), Planted(start=1), CacheAttention()))
    found = bisect(pipe, program, weights_from(model), IDS, ROWS)
    assert found is not None
    assert (found.name, found.application) == ("planted", 2)
    assert bisect(Pipeline((Canonicalize(),)), program, weights_from(model), IDS, ROWS) is None


def test_a_failing_pass_changes_nothing_and_leaves_a_reproducer(
    llama: tuple[torch.nn.Module, Program], tmp_path: Path
) -> None:
    _, program = llama
    before = {name: to_text(gm) for name, gm in program.graphs()}
    pipe = Pipeline((Planted(kind="crash"),))
    with pytest.raises(PassFailed, match="planted") as caught:
        pipe.run(program, observers=[Reproducer(tmp_path)])
    assert {name: to_text(gm) for name, gm in program.graphs()} == before
    file = tmp_path / "planted.reproducer.json"
    assert any(str(file) in note for note in caught.value.__notes__)
    with pytest.raises(UnknownPass):
        replay(file)  # the planted pass is not registered, and the error says so


def test_a_pass_that_lies_about_shapes_is_refused(llama: tuple[torch.nn.Module, Program]) -> None:
    with pytest.raises(GraphInvalid, match="planted"):
        Pipeline((Planted(kind="badshape"),)).run(llama[1])


@pytest.mark.parametrize("kind", ["operand", "argument", "operation", "value"])
def test_what_was_right_before_is_looked_at_again(llama: tuple[torch.nn.Module, Program], kind: str) -> None:
    with pytest.raises(GraphInvalid, match=r"after pass .stale.: .*mean_dim"):
        Pipeline((Canonicalize(), Stale(kind))).run(llama[1])


def test_dump_writes_readable_diffs(llama: tuple[torch.nn.Module, Program], tmp_path: Path) -> None:
    Pipeline((Canonicalize(), CacheAttention())).run(llama[1], observers=[Dump(tmp_path / "d")])
    names = sorted(f.name for f in (tmp_path / "d").iterdir())
    assert "002-packed-cache-attention.diff" in names
    text = (tmp_path / "d" / "002-packed-cache-attention.diff").read_text()
    assert "-%attention_default" in text
    assert "+%cached_attention_default" in text
