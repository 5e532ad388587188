"""What cannot be split is refused for what is wrong with it, and where: random decoders broken in one way each.

A capture takes seconds, so that the fast part breaks shallow forms, each in another way; the slow part is all of them.
"""

from __future__ import annotations

import pytest

from deepinfer_compile.boundary import find_boundary
from deepinfer_compile.capture import capture
from deepinfer_compile.errors import NoBoundary
from deepinfer_compile.pipeline import Pipeline
from deepinfer_compile.presets import RAISE
from tests import models
from tests.shared_kv import BREAKS, KINDS, Form, draw_broken, raised

FAST, ALL = len(BREAKS), 50
FAST_DEPTH = 2


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
@pytest.mark.parametrize("seed", range(FAST, ALL))
def test_many_that_cannot_be_split_are_refused(seed: int) -> None:
    check_refused(draw_broken(seed))
