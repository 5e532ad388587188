"""Files of pages: what they are called, and what is in them.

A file holds a few pages of one cache group, each of which hangs on the one before. Its name says which: the short
digest of the first one, the group, the bytes before the pages and of each, the page that the first one hangs on, and
the other pages. So a folder's listing tells all that is needed to find a page. In the file are a line of JSON with the
type and shape of each tensor of a page, then digest and checksum of each page, and the pages, each a run of bytes
(`page_rows.py`).

A file is written once, to a temporary name, and renamed; later it may be cut behind one of its pages. So a page's
checksum covers the line, all pages up to its end and its digest: however many are read, they are checked in one call,
which other threads do not wait for. They detect damage, not malice.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_compile.runtime.disk_index import PageFile
from deepinfer_compile.runtime.page_rows import Form, rounded

SHORT = 8
"""Bytes of a digest by which pages are called. Two pages with the same ones are told apart by their checksums."""
MOST = 16
"""Pages of a file, at most, so that its name is one that file systems take."""
SUM = 32
"""Bytes of a digest, and of a checksum."""
_B64 = "[A-Za-z0-9_-]{11}"
NAMES = re.compile(
    rf"(?P<home>[0-9a-f]{{32}})/((?P<first>{_B64})\.(?P<group>[0-9]{{1,4}})\.(?P<head>[0-9a-f]{{1,6}})"
    rf"\.(?P<stride>[0-9a-f]{{1,10}})\.(?P<parent>({_B64})?)\.(?P<more>({_B64}){{0,{MOST - 1}}})\.pages"
    rf"|(?P<draft>[0-9a-f]{{32}}\.pages\.tmp))"
)
"""What files of ours are called, from the folder on."""
_DTYPES = {
    str(one).removeprefix("torch."): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype) and not one.is_complex
}


def key_of(home: str, digest: bytes) -> str:
    """What a page is called among those of all models. home: the folder of its model."""
    return f"{home}/{digest[:SHORT].hex()}"


def name_of(home: str, group: int, head: int, stride: int, parent: str, pages: Sequence[str]) -> str:
    """The name of a file, from the folder on; pages and parent by their keys."""
    first, *more = map(_shown, pages)
    return f"{home}/{first}.{group}.{head:x}.{stride:x}.{_shown(parent) if parent else ''}.{''.join(more)}.pages"


def read_name(name: str) -> PageFile | None:
    """The file of a name, from the folder on; None where it is not one of ours, or a draft."""
    found = NAMES.fullmatch(name)
    if found is None or found["draft"]:
        return None
    home, more = found["home"], found["more"]
    shown = [found["first"], *(more[at : at + 11] for at in range(0, len(more), 11))]
    parent = _key(home, found["parent"]) if found["parent"] else ""
    head, stride = int(found["head"], 16), int(found["stride"], 16)
    pages = [_key(home, one) for one in shown]
    file = PageFile(name, int(found["group"]), parent, head, stride, pages)
    # some texts of base64 have bits to spare, so other names could mean the same pages
    same = name == name_of(home, file.group, head, stride, parent, pages)
    return file if same and stride and head else None


def listed(folder: Path, old: float) -> Iterator[tuple[PageFile, os.stat_result]]:
    """The files in a folder. Temporary ones from before a time are deleted, and what has a name that none is given.
    Raises OSError."""
    for path in folder.glob("*/*"):
        name = f"{path.parent.name}/{path.name}"
        ours = NAMES.fullmatch(name)
        if ours is None:
            continue
        try:
            held = path.stat()
        except FileNotFoundError:  # another process deleted it meanwhile
            continue
        file = read_name(name)
        if file is not None:
            yield file, held
        elif ours["draft"] is None or held.st_mtime < old:
            path.unlink(missing_ok=True)


def _shown(key: str) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(key[33:])).decode().rstrip("=")


def _key(home: str, shown: str) -> str:
    return f"{home}/{base64.urlsafe_b64decode(shown + '=').hex()}"


def line_of(form: Form) -> bytes:
    """The first line of a file: type and shape of each tensor by name."""
    kinds = {one.name: [str(one.dtype).removeprefix("torch."), list(one.shape)] for one in form.places}
    return json.dumps({"version": 1, "tensors": kinds}).encode() + b"\n"


def head_of(line: bytes, digests: Sequence[bytes], pages: Sequence[memoryview]) -> bytes:
    """What is before pages: the line, their digests and checksums, and zeros up to where tensors may begin."""
    sum_, found = hashlib.sha256(line), [line]
    for digest, page in zip(digests, pages, strict=True):
        sum_.update(page)
        found += digest, _named(sum_, digest)
    text = b"".join(found)
    return text.ljust(rounded(len(text)), b"\0")


def _named(sum_: hashlib._Hash, digest: bytes) -> bytes:
    found = sum_.copy()
    found.update(digest)
    return found.digest()


@lru_cache(maxsize=64)
def form_of(line: bytes, stride: int) -> Form | None:
    """The form that a first line says, of pages of so many bytes; None where it is damaged."""
    try:
        said = json.loads(line)
        kinds = {str(name): (_DTYPES[kind], tuple(shape)) for name, (kind, shape) in said["tensors"].items()}
        sizes = [size for _, shape in kinds.values() for size in shape]
        if said["version"] != 1 or any(type(size) is not int or size < 0 for size in sizes):
            return None
        form = Form.of(kinds)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return form if form.size == stride else None


def expect(path: Path) -> None:
    """Have the system bring a file to its memory, so that a thread that checks one file does not keep the disk from the
    next. Raises OSError."""
    if hasattr(os, "posix_fadvise"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(handle)


def read_pages(
    path: Path, file: PageFile, first: int, digests: Sequence[bytes], into: Tensor
) -> tuple[Form | None, int]:
    """Read pages of a file from number `first` on; their form, and how many, up to the first that is damaged or not
    there. into: u8[pages, stride], contiguous, whose other rows are undefined then. Raises OSError."""
    view = memoryview(into.numpy().reshape(-1).data)
    head, before = bytearray(file.head), bytearray(first * file.stride)
    handle = os.open(path, os.O_RDONLY)
    try:
        got = os.preadv(handle, [head, before, view], 0)
        while file.head + len(before) <= got < file.head + len(before) + len(view):  # a call may give less than all
            more = os.preadv(handle, [view[got - file.head - len(before) :]], got)
            if not more:
                break
            got += more
    finally:
        os.close(handle)
    line = bytes(head[: head.find(b"\n") + 1])
    form = form_of(line, file.stride) if line else None
    there = (got - file.head - len(before)) // file.stride
    if form is None or there <= 0:
        return None, 0
    sum_ = hashlib.sha256(line)
    sum_.update(before)
    whole = sum_.copy()
    whole.update(view[: there * file.stride])
    if _says(head, line, first + there - 1, digests[there - 1], whole):
        return form, there
    for i in range(there):
        sum_.update(view[i * file.stride : (i + 1) * file.stride])
        if not _says(head, line, first + i, digests[i], sum_):
            return form, i
    return form, there


def _says(head: bytearray, line: bytes, number: int, digest: bytes, sum_: hashlib._Hash) -> bool:
    """Whether a head says that the page of a number has this digest and, with those before it, this checksum."""
    at = len(line) + 2 * SUM * number
    return head[at : at + 2 * SUM] == digest + _named(sum_, digest)


def fits(form: Form, most: int) -> int:
    """How many pages of a form go into a file that should have so many bytes at most; one at least."""
    return max(1, min(MOST, most // max(1, form.size)))
