"""The boundary of random shared-key decoders is found from the graph alone.

A capture takes seconds, so that the fast part draws few and shallow forms; the slow part is all of them.
"""

from __future__ import annotations

import pytest

from deepinfer_compile.boundary import Boundary, find_boundary
from tests.shared_kv import WIDTH, Form, draw, raised

FAST, ALL = 4, 200
FAST_DEPTH = 3


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


@pytest.mark.parametrize("seed", range(FAST))
def test_the_boundary_is_found(seed: int) -> None:
    form = draw(seed, FAST_DEPTH)
    check_found(form, find_boundary(raised(form)))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FAST, ALL))
def test_the_boundary_is_found_in_many(seed: int) -> None:
    form = draw(seed)
    check_found(form, find_boundary(raised(form)))
