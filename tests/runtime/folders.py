"""Where the pages are that a folder holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_compile.runtime.disk import DiskPages
from deepinfer_compile.runtime.disk_files import read_name
from deepinfer_compile.runtime.disk_thread import DiskThread
from deepinfer_compile.runtime.page_rows import PageRows

LATER = 1e11


class Folder(DiskPages):
    """Pages of which each has a file of its own, or that are asked for one by one."""

    def read(self, digest: bytes, group: int) -> PageRows | None:
        """The tensors of a page by name, on the host; None where it is damaged or not there."""
        for span in self.plan([(digest, group)]):
            for rows in self.read_span(span, torch.empty((1, span.file.stride), dtype=torch.uint8)):
                return rows
        return None

    def write(
        self, digest: bytes, group: int, rows: Mapping[str, Tensor], parent: bytes = b"", until: float | None = None
    ) -> None:
        """Keep one page, whose tensors are on the host."""
        held = PageRows.of(rows)
        self.write_run([digest], group, held.form, held.content[None], parent, until)


@dataclass(frozen=True)
class Held:
    """A page's bytes in a file. parent: the one it hangs on."""

    path: Path
    start: int
    end: int
    parent: str


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.pages"))


def pages(folder: Path) -> dict[tuple[str, int], Held]:
    """By the beginning of a page's digest, in hexadecimal digits, and its group."""
    found: dict[tuple[str, int], Held] = {}
    for path in files(folder):
        file = read_name(f"{path.parent.name}/{path.name}")
        assert file is not None
        there, odd = divmod(path.stat().st_size - file.head, file.stride)
        assert 0 < there <= len(file.pages)
        assert odd == 0
        for i, (key, parent) in enumerate(list(file.links())[:there]):
            start = file.head + i * file.stride
            assert (key[33:], file.group) not in found
            found[key[33:], file.group] = Held(path, start, start + file.stride, parent[33:])
    return found


def page(folder: Path, digest: bytes, group: int = 0) -> Held:
    return pages(folder)[digest[:8].hex(), group]


def put(work: DiskThread, digest: bytes, group: int, rows: dict[str, torch.Tensor], until: float = LATER) -> None:
    """Have a page of its own written."""
    held = PageRows.of(rows)
    work.write([digest], group, held.form, held.content[None], b"", until)
