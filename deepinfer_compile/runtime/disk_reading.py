"""Pages on their way from disk to a request that waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_compile.runtime.disk_index import PageFile
from deepinfer_compile.runtime.page_rows import PageRows

Page = tuple[bytes, int]
"""The digest of a page and its cache group."""
BLOCK = 64 << 20
"""Bytes of a piece of memory that pages are read into, at most, but for a span that is larger."""


@dataclass(eq=False)
class Span:
    """Pages that lie one behind the other in a file, from number `first` on, by their digests."""

    file: PageFile
    first: int
    digests: list[bytes]

    @property
    def size(self) -> int:
        """Bytes of the pages."""
        return self.file.stride * len(self.digests)


@dataclass(eq=False)
class Reading:
    """Pages on their way from disk.

    size: bytes of them, as planned. began: when it was ordered. rows: what came, by page. read: what came from files.
    seconds: until the last page. dropped: nobody waits for the rest. heard: when the last page came. known: what was in
    the pools when it was ordered, of whoever ordered it.
    """

    pages: Sequence[Page]
    size: int
    began: float
    rows: dict[Page, PageRows] = field(default_factory=dict)
    read: list[Page] = field(default_factory=list)
    done: bool = False
    dropped: bool = False
    seconds: float = 0.0
    known: object = None

    def __post_init__(self) -> None:
        self.heard = self.began


def memory_of(spans: Sequence[Span], memory: Callable[[int], Tensor]) -> list[Tensor]:
    """Where the pages of spans are to lie, u8[pages, stride] each: one behind the other, so that pages of one size go
    on in few copies. memory: gives so many bytes."""
    found, block = list[Tensor](), torch.empty(0, dtype=torch.uint8)
    left = sum(span.size for span in spans)
    for span in spans:
        if len(block) < span.size:
            block = memory(max(span.size, min(left, BLOCK)))
        found.append(block[: span.size].view(-1, span.file.stride))
        block, left = block[span.size :], left - span.size
    return found


def together(step: Callable[[], bool], others: int, name: str) -> BaseException | None:
    """Call `step` until it returns False, from so many other threads too, which end before this does. Returns what went
    wrong first; the others stop then."""
    faults = list[BaseException]()

    def work() -> None:
        try:
            while not faults and step():
                pass
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, name=name, daemon=True) for _ in range(others)]
    for one in threads:
        one.start()
    work()
    for one in threads:
        one.join()
    return faults[0] if faults else None
