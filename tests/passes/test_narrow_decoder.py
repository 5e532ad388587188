"""The upper half on the wanted rows equals eager wherever it can be cut, and is left alone where it cannot."""

from __future__ import annotations

import functools

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import NotRowwise
from deepinfer_compile.graph import to_text
from deepinfer_compile.ops import ROW_BATCH, WRITE_KV
from deepinfer_compile.passes.narrow_decoder import NarrowDecoder
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import trace_of, weights_from
from deepinfer_compile.rowwise import analyse
from tests.passes.harness import calls
from tests.passes.stages import go_on
from tests.yoco_model import VOCAB, Form, Yoco, make_yoco

TOLERANCE = 2e-5
"""Of fp32 logits of size 1."""
IDS = torch.randint(0, VOCAB, (75,), generator=torch.Generator().manual_seed(3)).tolist()
ROWS = (0, 12, 13, 40, 74)
FORMS = {
    "one list": (Form(), 3),
    "two lists": (Form(one_list=False), 3),
    "one reader": (Form(lower=(0,), upper=(0,)), 0),
    "window between": (Form(upper=(0, 5, 0)), 1),
    "window last": (Form(lower=(0,), upper=(0, 5)), 0),
}
"""Forms, and how many of their layers run on wanted rows. One reader alone is a layer with keys of its own."""


@functools.cache
def packed(name: str) -> tuple[Yoco, Program]:
    model = make_yoco(FORMS[name][0])
    return model, default().run(capture(model))[0]


def narrowed_layers(program: Program) -> int:
    parts = program.info["split"]["parts"]
    return sum(parts[c.name] == "decoder" and c.meta["layer"] is not None for c in program.calls())


SLOW = ("two lists", "one reader")


@pytest.mark.parametrize("chunk", [1, 13, 75])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n, form in FORMS.items() if form[1]]
)
def test_wanted_rows_equal_eager(name: str, chunk: int) -> None:
    """A prompt in chunks, some without a wanted row, between other requests, on poisoned pages."""
    model, program = packed(name)
    after, records = go_on(program, NarrowDecoder())
    assert [r.kind for r in records[0].remarks] == ["applied"]
    assert narrowed_layers(after) == FORMS[name][1]
    with torch.no_grad():
        want = model(torch.tensor([IDS]))[0, list(ROWS)]
    for stage in (program, after):
        trace = trace_of(stage, weights_from(model), IDS, ROWS, chunk)
        assert not trace.stray
        assert float((trace.logits - want).abs().max()) < TOLERANCE
    assert trace.kept.keys() == {c.name for c in program.caches}


def test_blocks_of_the_decoder_have_a_row_for_each_wanted_one() -> None:
    after, _ = go_on(packed("one list")[1], NarrowDecoder())
    rows = next(n for n in after.inputs() if n.name == "rows").meta["val"].shape[0]
    assert {str(c.meta["val"].shape[-2]) for c in after.calls() if c.name.startswith("layer3")} == {str(rows)}
    assert calls(after, "deepinfer.output_projection") == 0
    assert calls(after, "deepinfer.row_batch") == 1


@pytest.mark.slow
def test_a_block_that_both_sides_call_is_copied() -> None:
    """Layers 2 and 4 are one block; layer 3 keeps a window, so that layer 2 must run on all rows and 4 need not."""
    form = Form(lower=(0,), upper=(0, 0, 5, 0))
    program = default().run(capture(make_yoco(form)))[0]
    after, _ = go_on(program, NarrowDecoder())
    assert narrowed_layers(after) == 1
    targets = {c.meta["layer"]: str(c.target) for c in after.calls() if c.meta["layer"] is not None}
    assert targets[4] == f"{targets[2]}_rows"


def test_what_it_saves_is_told() -> None:
    split = go_on(packed("one list")[1], NarrowDecoder())[0].info["split"]
    layer = 2 * (2 * 36 * 72 + 3 * 36 * 52)
    keys = 2 * 36 * 48
    assert split["flops"] == [2 * (layer + keys) + keys, 3 * layer]


def test_it_runs_once() -> None:
    after, _ = go_on(packed("one list")[1], NarrowDecoder())
    again, records = go_on(after, NarrowDecoder())
    assert to_text(again.skeleton) == to_text(after.skeleton)
    assert not records[0].remarks


@pytest.mark.parametrize(
    ("name", "replay", "reason"),
    [("one list", "off", "replay is off"), ("window last", "compact", "layer 2 keeps keys of its own")],
)
def test_what_is_left_alone(name: str, replay: str, reason: str) -> None:
    program = packed(name)[1]
    after, records = go_on(program, NarrowDecoder(), settings={"replay": replay})
    assert {n: to_text(g) for n, g in after.graphs()} == {n: to_text(g) for n, g in program.graphs()}
    assert [(r.kind, reason in r.reason) for r in records[0].remarks] == [("missed", True)]


@pytest.mark.slow
def test_a_model_without_a_boundary_is_left_alone() -> None:
    _, program = packed("one reader")
    assert "split" not in program.info
    after, records = go_on(program, NarrowDecoder())
    assert to_text(after.skeleton) == to_text(program.skeleton)
    assert not records[0].remarks


def test_metadata_of_all_rows_is_refused_for_some() -> None:
    """Had a reader kept the batch's own metadata, it would take rows for tokens: the proof says so."""
    after, _ = go_on(packed("one list")[1], NarrowDecoder())
    select = after.blocks["select"]
    batch = next(n for n in select.graph.nodes if n.target is ROW_BATCH.overload)
    holes = {n.name: n for n in select.graph.nodes if n.op == "placeholder"}
    for item, name in zip(sorted(batch.users, key=lambda n: n.args[1]), ("query_start", "seq_len", "block_table_0")):
        item.replace_all_uses_with(holes[name])
    with pytest.raises(NotRowwise, match="not the metadata of the rows"):
        analyse(after)


def test_keys_are_written_for_all_tokens() -> None:
    """In the boundary, which reads what the encoder gives for every token."""
    after, _ = go_on(packed("one list")[1], NarrowDecoder())
    parts = after.info["split"]["parts"]
    writers = [
        c for c in after.calls() if any(n.target is WRITE_KV.overload for n in after.blocks[str(c.target)].graph.nodes)
    ]
    assert [parts[c.name] for c in writers] == ["boundary"]
