"""Kept rows in a program: equal to eager where all are kept; what is no candidate is left alone."""

from __future__ import annotations

import functools

import pytest
import torch

from deepinfer_compile.capture import capture
from deepinfer_compile.errors import BadOption, NotRowwise
from deepinfer_compile.graph import to_text
from deepinfer_compile.ops import CACHED_ATTENTION, KEPT_BATCH
from deepinfer_compile.passes.keep_last_rows import KeepLastRows
from deepinfer_compile.passes.narrow_decoder import NarrowDecoder
from deepinfer_compile.presets import default
from deepinfer_compile.program import Program
from deepinfer_compile.replay import trace_of, weights_from
from deepinfer_compile.rowwise import analyse
from tests.passes.stages import go_on
from tests.yoco_model import VOCAB, Form, Yoco, make_yoco

IDS = torch.randint(0, VOCAB, (75,), generator=torch.Generator().manual_seed(3)).tolist()
ROWS = (0, 12, 40, 74)
KEEP = {"keep": 9}


@functools.cache
def packed(form: Form) -> tuple[Yoco, Program]:
    model = make_yoco(form)
    return model, default().run(capture(model))[0]


WINDOWS, NONE = Form(lower=(0,), upper=(0, 5, 9)), Form(lower=(0,), upper=(0, 0))


@pytest.mark.parametrize("chunk", [1, 13, 75])
def test_all_rows_kept_equal_eager(chunk: int) -> None:
    model, program = packed(WINDOWS)
    after, records = go_on(program, KeepLastRows(), settings=KEEP)
    assert [r.kind for r in records[0].remarks] == ["applied"]
    with torch.no_grad():
        want = model(torch.tensor([IDS]))[0, list(ROWS)]
    trace = trace_of(after, weights_from(model), IDS, ROWS, chunk)
    assert not trace.stray
    assert float((trace.logits - want).abs().max()) < 2e-5


def test_windows_begin_where_rows_are_kept_and_shared_keys_at_the_start() -> None:
    after, _ = go_on(packed(WINDOWS)[1], KeepLastRows(), settings=KEEP)
    batches = [n for n in after.blocks["select"].graph.nodes if n.target is KEPT_BATCH.overload]
    assert {n.args[1] is None for n in batches} == {True, False}
    layer = after.blocks[str(next(c.target for c in after.calls() if c.meta["layer"] == 2))]
    own = next(n for n in layer.graph.nodes if n.target is CACHED_ATTENTION.overload)
    assert [str(a) for a in own.args[5:7]] == ["late_0", "late_1"]
    assert after.info["split"]["keep"] == 9
    assert not after.info["split"]["exact"]


@pytest.mark.parametrize(("form", "settings"), [(WINDOWS, {}), (WINDOWS, {**KEEP, "replay": "off"}), (NONE, KEEP)])
def test_what_is_left_alone(form: Form, settings: dict[str, object]) -> None:
    """Without the request, with replay off, and where no layer above keeps a window, which narrow-decoder sees to."""
    program = packed(form)[1]
    after, records = go_on(program, KeepLastRows(), settings=settings)
    assert {n: to_text(g) for n, g in after.graphs()} == {n: to_text(g) for n, g in program.graphs()}
    assert not records[0].remarks


def test_it_goes_before_the_exact_pass() -> None:
    after, records = go_on(packed(WINDOWS)[1], KeepLastRows(), NarrowDecoder(), settings=KEEP)
    assert after.info["split"]["keep"] == 9
    assert not records[1].remarks


def test_fewer_rows_than_a_window_are_refused() -> None:
    with pytest.raises(BadOption, match="a window above the boundary is 9"):
        go_on(packed(WINDOWS)[1], KeepLastRows(), settings={"keep": 8})


def test_metadata_of_all_tokens_is_refused_for_some() -> None:
    after, _ = go_on(packed(WINDOWS)[1], KeepLastRows(), settings=KEEP)
    call = next(c for c in after.calls() if c.meta["layer"] == 2)
    places = [n.name for n in after.blocks[str(call.target)].graph.nodes if n.op == "placeholder"]
    seq_len = next(n for n in after.inputs() if n.name == "seq_len")
    call.args = tuple(seq_len if p == "late_0" else a for p, a in zip(places, call.args))
    with pytest.raises(NotRowwise, match="not the metadata of the kept"):
        analyse(after)
