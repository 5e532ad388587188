"""Ten kinds of wrong rewrite, brought by a user through `pipeline=`: each is caught; bisection names pass and site.

A wrong pass rewrites all its sites but only one of them wrongly; the others become an equal copy, as a pass with a
fault in one corner would leave them. So it is not enough to name the pass: the site must be right too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.fx import GraphModule, Node

import deepinfer_compile as dc
from deepinfer_compile import builder
from deepinfer_compile.bisect import bisect
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import CompileError, GraphInvalid, NumericMismatch
from deepinfer_compile.facts import Fact
from deepinfer_compile.graph import Editor, argument, is_op, tensor
from deepinfer_compile.observe import NumericReplay
from deepinfer_compile.ops import ATTENTION, CACHED_ATTENTION, GATED_ACT, RMS_NORM, ROPE
from deepinfer_compile.passbase import NONE, PassContext
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import sample_length, weights_from
from deepinfer_compile.runtime.batch import PAGE_SIZE
from tests import models

A = torch.ops.aten
Change = Callable[[Editor, Any], Node]


@dataclass(frozen=True)
class Wrong:
    """Copies every site of a kind and changes the `at`-th, counted from 0 over all blocks."""

    level: ClassVar[str] = "layer"
    needs: ClassVar[frozenset[Fact]] = NONE
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    name: str
    site: Callable[[Any], bool]
    change: Change
    at: int = 0

    def run(self, gm: GraphModule, ctx: PassContext) -> None:
        for node in [n for n in gm.graph.nodes if self.site(n)]:
            if not ctx.claim(node, "copied"):
                continue
            edit = Editor(gm.graph, node)
            wrong = len(ctx.remarks) - 1 == self.at
            new = self.change(edit, node) if wrong else edit.call(node.target, *node.args, **node.kwargs)
            edit.replace(node, new)
            gm.graph.erase_node(node)


@dataclass(frozen=True)
class StaleCache:
    """Gives the second layer the cache of the first, as a buffer that was thought to be free."""

    level: ClassVar[str] = "skeleton"
    needs: ClassVar[frozenset[Fact]] = NONE
    makes: ClassVar[frozenset[Fact]] = NONE
    breaks: ClassVar[frozenset[Fact]] = NONE
    name: str = "wrong-stale-cache"

    def run_program(self, program: Program, ctx: PassContext) -> Program:
        layers = [c for c in program.calls() if c.meta["layer"] is not None]
        first = next(a for a in layers[0].args if a.name == "cache_0_0")  # type: ignore[union-attr]
        if ctx.claim(layers[1], "one cache less"):
            layers[1].args = tuple(first if a.name == "cache_1_0" else a for a in layers[1].args)  # type: ignore[union-attr]
        return program


def calls(op: Any) -> Callable[[Any], bool]:
    return lambda node: is_op(node, getattr(op, "overload", op))


def changed(index: int, how: Callable[[Editor, Any], Any]) -> Change:
    """The same call with one argument changed."""
    return lambda edit, node: edit.call(
        node.target, *(how(edit, a) if i == index else a for i, a in enumerate(node.args)), **node.kwargs
    )


def swapped(i: int, j: int) -> Change:
    """The same call with two arguments exchanged."""
    order = {i: j, j: i}
    return lambda edit, node: edit.call(node.target, *(node.args[order.get(k, k)] for k in range(len(node.args))))


def narrowed(edit: Editor, x: Node) -> Node:
    return edit.call(A.to.dtype, edit.call(A.to.dtype, x, torch.float16), tensor(x).dtype)


def linear(node: Any) -> bool:
    """A linear of a layer, not of the prefix or suffix, whose operands all are values."""
    return is_op(node, A.linear.default) and tensor(node.args[1]).shape[0] != models.VOCAB


def residual(node: Any) -> bool:
    return is_op(node, A.add.Tensor) and all(isinstance(a, Node) and tensor(a).dim() == 3 for a in node.args[:2])


def square_linear(node: Any) -> bool:
    return is_op(node, A.linear.default) and len(set(tensor(node.args[1]).shape)) == 1


def windowed(node: Any) -> bool:
    return is_op(node, ATTENTION.overload) and argument(node, "window") > 0


def one_token_ahead(edit: Editor, node: Any) -> Node:
    """Causal attention by a mask that is one too wide."""
    size = edit.call(A.sym_size.int, node.args[0], 2)
    ones = edit.call(A.ones.default, [size, size], dtype=torch.bool)
    mask = edit.call(A.tril.default, ones, 1)
    return edit.call(node.target, *node.args[:3], mask, *node.args[4:8], False)


def top_left(edit: Editor, node: Any) -> Node:
    """Cached attention that takes the tokens of this step for the whole context."""
    start = node.args[4]
    counts = edit.call(A.sub.Tensor, edit.call(A.slice.Tensor, start, 0, 1), edit.call(A.slice.Tensor, start, 0, 0, -1))
    return edit.call(node.target, *node.args[:5], counts, *node.args[6:])


def one_request(edit: Editor, node: Any) -> Node:
    """Cached attention in which every request starts where the batch starts."""
    return changed(4, lambda e, start: e.call(A.mul.Scalar, start, 0))(edit, node)


def late_write(edit: Editor, node: Any) -> Node:
    """The right result, but in the step that ends the sequence the cache gets twice the values: nobody reads them."""
    q, k, v, kv, starts, lengths, *rest = node.args
    out = edit.call(node.target, *node.args)
    ends = edit.call(A.eq.Scalar, edit.call(A.select.int, lengths, 0, 1), LENGTH)
    factor = edit.call(A.add.Scalar, edit.call(A.to.dtype, ends, torch.float32), 1.0)
    edit.call(node.target, q, k, edit.call(A.mul.Tensor, v, factor), kv, starts, lengths, *rest)
    return out


def in_place(edit: Editor, node: Any) -> Node:
    """The sum written over the residual stream, which is read again."""
    return edit.call(A.add_.Tensor, *node.args)


def scaled_weight(edit: Editor, node: Any) -> Node:
    """A factor moved into a weight, in place: right once, and wrong for all who hold the weight."""
    x, weight, *rest = node.args
    half = edit.call(A.mul.Scalar, x, 0.5)
    return edit.call(node.target, half, edit.call(A.mul_.Scalar, weight, 2.0), *rest)


@dataclass(frozen=True)
class Case:
    """A wrong rewrite: of which model, after which pass, what, and what the error says.

    site: the rewrite that bisection must name, from 1; 0 is the first.
    """

    model: str
    after: str
    wrong: Any
    says: str
    error: type[CompileError] = NumericMismatch


LENGTH = 89
"""One window and two pages: what `sample_length` asks of every model here."""
ROWS = (0, 20, 40, 77, 88)
FP64 = "in fp64 the logits differ"
NO_CACHE = "which is no cache"
CACHED = "cache-attention"
RAISED = "raise-output-projection"
KV, SLOT = 3, 7


def case(
    kind: str, model: str, after: str, site: Any, change: Change, at: int = 0, says: str = FP64, **more: Any
) -> Any:
    is_site = site if callable(site) and not hasattr(site, "_schema") else calls(site)
    return pytest.param(Case(model, after, Wrong(f"wrong-{kind}", is_site, change, at), says, **more), id=kind)


def to_clone(edit: Editor, kv: Node) -> Node:
    return edit.call(A.clone.default, kv)


def no_padding(edit: Editor, slot: Node) -> Node:
    return edit.call(A.clamp_min.default, slot, 0)


def no_last_row(edit: Editor, slot: Node) -> Node:
    last = edit.call(A.eq.Scalar, edit.call(A.remainder.Scalar, slot, PAGE_SIZE), PAGE_SIZE - 1)
    return edit.call(A.masked_fill.Scalar, slot, last, -1)


CASES = [
    case("dtype", "llama", RAISED, linear, changed(0, narrowed), 4, "the logits differ"),
    case("dtype-small", "llama", RAISED, ROPE, changed(0, narrowed), 1, "rounding grew"),
    case("residual", "llama", RAISED, residual, lambda e, n: n.args[1], 1),
    case("scale", "gpt_oss", RAISED, ATTENTION, changed(5, lambda e, scale: scale * (1 + 1e-6)), 1),
    case("dropped-write", "gpt_oss", CACHED, CACHED_ATTENTION, changed(SLOT, no_last_row), 1),
    case("write-to-copy", "gpt_oss", CACHED, CACHED_ATTENTION, changed(KV, to_clone), 1, NO_CACHE, error=GraphInvalid),
    case("late-write", "llama", CACHED, CACHED_ATTENTION, late_write, says="in fp64 what is kept in cache_0_0 differs"),
    case("stray-write", "llama", CACHED, CACHED_ATTENTION, changed(SLOT, no_padding), says="belong to no token"),
    case("eps", "llama", RAISED, RMS_NORM, changed(2, lambda e, eps: 2 * eps), 2),
    case("transposed-weight", "llama", RAISED, square_linear, changed(1, lambda e, w: e.call(A.t.default, w)), 1),
    case("mask-corner", "llama", RAISED, ATTENTION, one_token_ahead),
    case("mask-window", "gpt_oss", RAISED, windowed, changed(6, lambda e, window: window + 1)),
    case("mask-top-left", "gpt_oss", CACHED, CACHED_ATTENTION, top_left, 1),
    case("mask-requests", "llama", CACHED, CACHED_ATTENTION, one_request),
    case("rotary-style", "llama", RAISED, ROPE, changed(3, lambda e, style: "pair"), 1),
    case("swapped-arguments", "llama", RAISED, GATED_ACT, swapped(0, 1)),
    case("stale-alias", "llama", RAISED, residual, in_place, 1, NO_CACHE, error=GraphInvalid),
    case("stale-weight", "llama", RAISED, linear, scaled_weight, 2, NO_CACHE, error=GraphInvalid),
    pytest.param(Case("gpt_oss", CACHED, StaleCache(), FP64), id="stale-cache"),
]


@functools.cache
def opened(name: str) -> tuple[Any, Program]:
    """A model of two layers (of four where kinds alternate) and its captured program."""
    model = models.make(name, **({} if name == "gpt_oss" else {"num_hidden_layers": 2}))
    return model, capture(model)


@functools.cache
def staged(name: str, after: str) -> Program:
    """The program that the wrong pass is given."""
    return default().upto(after).run(opened(name)[1])[0]


def ids_for(program: Program) -> list[int]:
    assert sample_length(program) <= LENGTH
    return torch.randint(0, models.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("found", CASES)
def test_caught_and_named(found: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, before_it = opened(found.model)[0], staged(found.model, found.after)
    # the passes before the wrong one are not under test, so a build starts behind them
    monkeypatch.setattr(builder, "capture", lambda *args, **options: before_it)
    weights, ids = weights_from(model), ids_for(before_it)
    before = {k: t.clone() for k, t in weights.items()}
    pipeline = Pipeline((found.wrong,), given=before_it.facts)
    watch = NumericReplay(weights, ids, ROWS)
    with pytest.raises(found.error, match=f"pass '{found.wrong.name}'.*{found.says}"):
        dc.build(model, tmp_path / "b", native=False, pipeline=pipeline, observers=[watch])
    assert not (tmp_path / "b").exists()
    culprit = bisect(pipeline, before_it, weights, ids, ROWS)
    assert culprit is not None
    at = getattr(found.wrong, "at", 0)
    assert (culprit.name, culprit.application) == (found.wrong.name, at + 1)
    assert culprit.node == site_of(found, before_it)
    assert all(torch.equal(t, before[k]) for k, t in weights.items()), "the search wrote to the model's weights"


def site_of(found: Case, stage: Program) -> str:
    """The site that is changed, found without the tools under test."""
    if isinstance(found.wrong, StaleCache):
        return f"skeleton.{next(c.name for c in stage.calls() if c.meta['layer'] == 1)}"
    sites = [f"{name}.{n.name}" for name, gm in stage.blocks.items() for n in gm.graph.nodes if found.wrong.site(n)]
    return sites[found.wrong.at]


def test_among_all_passes_through_the_public_argument(tmp_path: Path) -> None:
    model, program = opened("llama")
    found = next(c.values[0] for c in CASES if c.id == "rotary-style")
    wrong = default().insert(p=found.wrong, after="raise-rope")
    weights, ids = weights_from(model), ids_for(program)
    with pytest.raises(NumericMismatch, match="pass 'wrong-rotary-style'"):
        dc.build(model, tmp_path / "b", native=False, pipeline=wrong, observers=[NumericReplay(weights, ids, ROWS)])
    culprit = bisect(wrong, program, weights, ids, ROWS)
    assert culprit is not None
    assert (culprit.name, culprit.application) == ("wrong-rotary-style", 2)
    assert "self_attn" in culprit.place
    assert "modeling_llama.py" in culprit.place


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_equal_copies_are_no_fault(name: str) -> None:
    model, program = opened(name)
    copies = Wrong("copies", lambda node: node.op == "call_function", lambda e, n: n, at=-1)
    ids = ids_for(program)
    assert bisect(default().insert(p=copies, after=RAISED), program, weights_from(model), ids, ROWS) is None


def test_a_pass_that_is_wrong_before_it_rewrites_anything_is_named_as_a_whole() -> None:
    @dataclass(frozen=True)
    class Silent(StaleCache):
        name: str = "silent"

        def run_program(self, program: Program, ctx: PassContext) -> Program:
            return StaleCache().run_program(program, PassContext())

    model, program = opened("gpt_oss")
    found = bisect(default().insert(p=Silent(), after=CACHED), program, weights_from(model), ids_for(program), ROWS)
    assert found is not None
    assert (found.name, found.application, found.node) == ("silent", 0, "")


def test_a_program_that_does_not_run_is_a_fault_of_the_pass() -> None:
    """Shapes agree while sizes are symbols; the reference meets an index that does not exist."""

    def out_of_reach(edit: Editor, x: Node) -> Node:
        index = edit.call(A.full.default, [edit.call(A.sym_size.int, x, 1)], 10**6, dtype=torch.int64)
        return edit.call(A.index_select.default, x, 1, index)

    far = changed(0, out_of_reach)
    model, program = opened("llama")
    pipeline = default().insert(p=Wrong("far", lambda n: is_op(n, RMS_NORM.overload), far, 1), after=RAISED)
    with pytest.raises(NumericMismatch, match=r"pass 'far' .*does not run"):
        pipeline.run(program, observers=[NumericReplay(weights_from(model), ids_for(program), ROWS)])
