"""Which pages of a request that ends go to disk, and which of them together."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import takewhile

from deepinfer_compile.runtime.batch import PAGE_SIZE
from deepinfer_compile.runtime.pages import GroupTable
from deepinfer_compile.runtime.prefix_nodes import Node

Has = Callable[[bytes, int], bool]
"""Whether a page is on disk, or about to be, by its digest and group."""


def spans_of(groups: Sequence[GroupTable], path: Sequence[Node], ends: tuple[int, int], has: Has) -> list[list[range]]:
    """For each group the pages that may have to be written, so that a request may go on behind each of `ends`. Nobody
    keeps a page without those before it, so of whole contexts these are the pages behind the last one that is there."""
    whole = [i for i, group in enumerate(groups) if group.reach is None]
    first = bisect_left(path, True, key=lambda one: not all(has(one.digest, i) for i in whole))
    found = []
    for group in groups:
        begins = [first if group.reach is None else group.first(end * PAGE_SIZE) for end in ends]
        found.append([range(begin, end) for begin, end in zip(begins, ends)])
    return found


def runs_of(
    groups: Sequence[GroupTable],
    path: Sequence[Node],
    spans: Sequence[Sequence[range]],
    pages: Sequence[int],
    most: Sequence[int],
    has: Has,
) -> tuple[list[tuple[int, range]], int]:
    """Which of some pages each group has to write, those in a row together, so many at most; whole contexts, on which
    others hang, first. Up to a page of a whole context that is not in the pools any more, whose number is returned too,
    or that of the page behind all."""
    lacking, end = dict[int, list[int]](), pages[-1] + 1
    for i in sorted(range(len(groups)), key=lambda i: groups[i].reach is not None):
        needed = [page for page in pages if any(page in span for span in spans[i])]
        needed = [page for page in needed if not has(path[page].digest, i)]
        lacking[i] = [page for page in needed if path[page].pages[i] >= 0]
        if groups[i].reach is None:
            end = min([end, *(page for page in needed if path[page].pages[i] < 0)])
    runs = list[tuple[int, range]]()
    for i, needed in lacking.items():
        for page in takewhile(lambda page: page < end, needed):
            group, last = runs[-1] if runs else (-1, range(0))
            if (group, last.stop) == (i, page) and len(last) < most[i]:
                runs[-1] = i, range(last.start, page + 1)
            else:
                runs.append((i, range(page, page + 1)))
    return runs, end
