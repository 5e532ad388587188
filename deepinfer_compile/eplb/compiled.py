"""The decorator of the inner loops: Python compiled by numba, which is the extra `eplb`.

Why numba and no numpy path beside it: the loops choose one replica or one exchange at a time, a few nanoseconds each,
where a numpy call takes a microsecond. A second implementation that must agree to the bit would double what has to be
proven, and a plan that takes a second where milliseconds are expected is no help. So without numba the policies
`balanced` and `windowed` are refused with the extra's name; `published` is numpy alone.

Compiled code is kept on disk, keyed by the file of the function, not by what it calls: so a module of kernels calls no
other module's kernels. Arithmetic is IEEE (no fastmath), so results are those of the same code run by Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from deepinfer_compile.errors import MissingExtra

try:
    from numba import njit
except ImportError:
    raise MissingExtra(package="numba", purpose="planning placements of experts", extra="eplb") from None

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function, compiled when first called and run without the interpreter's lock, kept on disk if it can be."""
    try:
        return cast("F", njit(cache=True, nogil=True)(function))
    except RuntimeError as error:
        if "no locator available" not in str(error):
            raise
        return cast("F", njit(nogil=True)(function))


__all__ = ["compiled"]
