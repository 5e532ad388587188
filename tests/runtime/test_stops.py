"""Stop strings and held-back text, however the text is cut into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_compile.runtime.stops import TextState
from tests.runtime.fakes import Pieces, plain_stop

TEXT = st.text("abc", max_size=14)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


def state(pieces: list[str], stops=(), *, include=False, streaming=True) -> TextState:
    return TextState(Pieces(pieces), tuple(stops), include_stop=include, streaming=streaming)


def feed(text: TextState, count: int) -> tuple[str | None, list[str]]:
    """Push `count` pieces one by one until a stop; return it and what was showable after each."""
    shown = []
    for end in range(1, count + 1):
        found = text.advance(list(range(count)), end)
        shown.append(text.text[: text.visible])
        if found is not None:
            return found, shown
    found = text.finish(list(range(count)), count)
    shown.append(text.text[: text.visible])
    return found, shown


@settings(max_examples=300)
@given(TEXT, STOPS, st.data(), st.booleans())
def test_cutting_into_tokens_changes_nothing(text, stops, data, include):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)])]
    grown = state(pieces, stops, include=include)
    found, shown = feed(grown, len(pieces))
    assert (found, grown.text) == plain_stop(text, stops, include)
    for before, after in pairwise(shown):
        assert after.startswith(before)
    assert shown[-1] == grown.text
    once = state([text], stops, include=include, streaming=False)
    assert feed(once, 1)[0] == found
    assert once.text == grown.text


@settings(max_examples=200)
@given(TEXT, STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(text, stops):
    grown = state(list(text), stops)
    for end in range(1, len(text) + 1):
        if grown.advance(list(range(len(text))), end) is not None:
            return
        possible = [k for stop in stops for k in range(1, len(stop)) if grown.text.endswith(stop[:k])]
        assert len(grown.text) - grown.visible == max(possible, default=0)


def test_unchecked_text_lets_a_stop_pass():
    grown = state(["ab", "ab"], ["ab"])
    assert grown.advance([0, 1], 1, checked=False) is None
    assert grown.advance([0, 1], 2) == "ab"
    assert grown.text == "ab"


@pytest.mark.parametrize(("stops", "streaming", "eager"), [((), False, False), (("a",), False, True), ((), True, True)])
def test_text_is_decoded_early_only_where_needed(stops, streaming, eager):
    assert state([], stops, streaming=streaming).eager == eager


def test_the_remainder_of_the_decoder_is_searched_too():
    grown = TextState(Pieces(["a"], tail="bc"), ("bc",), include_stop=False, streaming=True)
    assert grown.advance([0], 1) is None
    assert grown.finish([0], 1) == "bc"
    assert (grown.text, grown.visible) == ("a", 1)
