"""Pages on their way from disk to a request that waits for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from deepinfer_compile.runtime.page_rows import PageRows

Page = tuple[bytes, int]
"""The digest of a page and its cache group."""


@dataclass(eq=False)
class Reading:
    """Pages on their way from disk.

    sizes: bytes of their files, as planned. began: when it was ordered. rows: what came, by page. read: what came from
    files. seconds: until the last page. dropped: nobody waits for the rest. heard: when the last page came.
    """

    pages: Sequence[Page]
    sizes: Sequence[int]
    began: float
    rows: dict[Page, PageRows] = field(default_factory=dict)
    read: list[Page] = field(default_factory=list)
    done: bool = False
    dropped: bool = False
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.heard = self.began
        self.size = sum(self.sizes)


__all__ = ["Page", "Reading"]
