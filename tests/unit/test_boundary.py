"""The boundary of random shared-key decoders is found from the graph alone; broken ones are refused for what is wrong.

A capture takes seconds, so that the fast part draws few and shallow forms; the slow part is all of them.
"""

from __future__ import annotations

import pytest

from deepinfer_compile.boundary import Boundary, find_boundary
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import NoBoundary
from deepinfer_compile.passes.canonicalize import Canonicalize
from deepinfer_compile.passes.raise_attention import RaiseAttention
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import RAISE
from deepinfer_compile.program import Program
from tests import models
from tests.shared_kv import KINDS, WIDTH, Decoder, Form, draw, draw_broken

FAST, ALL = 8, 200
FAST_BROKEN, ALL_BROKEN = 9, 50
FAST_DEPTH = 3


def raised(form: Form, seed: int = 0) -> Program:
    """The captured decoder with its attention raised, which is all that the analysis needs."""
    return Pipeline((Canonicalize(), RaiseAttention())).run(capture(Decoder(form, seed)))[0]


def check_found(form: Form, found: Boundary) -> None:
    depth, b = len(form.own), form.boundary
    assert found.layer == b
    assert found.below == tuple(range(b))
    assert found.above == tuple(range(b, depth))
    assert found.windows == form.windows
    assert found.halo == form.halo
    readers = sorted(r for s in found.sources for r in s.readers if r is not None)
    assert readers == [i for i, shares in enumerate(form.shares) if shares]
    assert len(found.sources) == (len(readers) if form.each else 1)
    assert all(s.layer in (b, *readers) for s in found.sources)
    wanted = 4 * (form.streams * WIDTH + (form.streams if form.shifted else 0))
    assert sum(c.bytes for c in found.crossing) == wanted
    assert all(c.layer == b - 1 for c in found.crossing)
    assert str(found.halo) in found.why


def check_refused(form: Form) -> None:
    with pytest.raises(NoBoundary) as caught:
        find_boundary(raised(form))
    assert caught.value.values["kind"] == KINDS[form.broken]
    if form.broken == "decoder only":
        assert f"layer {len(form.own) - 1}:" in caught.value.where
    elif form.broken in ("own keys above", "sees later tokens", "shift above", "convolution above", "running total"):
        assert f"layer {form.at}:" in caught.value.where
    if form.broken != "windows only":
        assert ".py" in caught.value.where


@pytest.mark.parametrize("seed", range(FAST))
def test_the_boundary_is_found(seed: int) -> None:
    form = draw(seed, FAST_DEPTH)
    check_found(form, find_boundary(raised(form)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST, ALL))
def test_the_boundary_is_found_in_many(seed: int) -> None:
    form = draw(seed)
    check_found(form, find_boundary(raised(form)))


@pytest.mark.parametrize("seed", range(FAST_BROKEN))
def test_what_cannot_be_split_is_refused(seed: int) -> None:
    check_refused(draw_broken(seed, FAST_DEPTH))


def test_windows_behind_the_last_own_keys_are_no_decoder() -> None:
    """One global layer below two windows: it reads keys of its own, so that nothing is shared."""
    with pytest.raises(NoBoundary, match="decoder only") as caught:
        find_boundary(raised(Form((0, 0, 5, 5), (False,) * 4, 1)))
    assert "layer 1:" in caught.value.where


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma", "gpt_oss", "deepseek_v3"])
def test_published_decoders_are_refused(name: str) -> None:
    program = Pipeline(RAISE).run(capture(models.make(name)))[0]
    with pytest.raises(NoBoundary, match="decoder only"):
        find_boundary(program)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST_BROKEN, ALL_BROKEN))
def test_many_that_cannot_be_split_are_refused(seed: int) -> None:
    check_refused(draw_broken(seed))
