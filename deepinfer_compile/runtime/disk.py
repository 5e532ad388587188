"""Cache pages in a folder, so that a new process finds what an earlier one computed.

A page is a safetensors file of its own, named by a hash of the model and of all tokens up to the page's end, beside a
checksum of its contents. It is written to a temporary name of its own and renamed, so that no reader sees half of one.
A file that is not what it says is deleted and counted, one that cannot be read, written or deleted is a failure of the
disk: the page is then computed again. So nothing that the disk does later stops a request. The files of all models in a
folder share its capacity; what was not used for the longest time goes first. Files that are not named like pages are
left alone. Several processes may use one folder; each sees what was there when it began and what it wrote itself.
Folders are made for their owner alone, since cache rows tell what was said; checksums detect damage, not malice.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from deepinfer_compile.errors import BadOption

NAMES = re.compile(r"[0-9a-f]{32}/[0-9a-f]{64}\.[0-9]+\.safetensors(?P<draft>\.[0-9a-f]{16}\.tmp)?")
"""What files of ours are called, from the folder on."""
ABANDONED = 3600.0
"""Seconds after which a temporary file belongs to a process that was killed."""


class DiskPages:
    """Pages of one model in a folder of at most `capacity` bytes.

    identity: of everything beside the tokens that decides a page's contents. damaged: files that could not be used.
    failures: pages that could not be read, written or deleted; error: the last of them in words. evictions: pages
    deleted for their place.
    Raises BadOption for a folder that cannot be made or read.
    """

    def __init__(self, folder: Path, identity: str, capacity: int) -> None:
        self.folder, self._capacity = folder, capacity
        self.damaged = self.failures = self.evictions = 0
        self.error = ""
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self.adopt(identity)
        try:
            self._scan()
            self._make_home()
        except OSError as err:
            fix = "give a folder that this process may write to"
            raise BadOption(name="prefix_cache_folder", value=str(folder), reason=str(err), fix=fix) from None

    def adopt(self, identity: str) -> None:
        """From now on pages are those of another model."""
        self.root = hashlib.sha256(identity.encode()).digest()
        self._own = self.root.hex()[:32]

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def size(self) -> int:
        """Bytes of all files known."""
        return self._bytes

    def has(self, digest: bytes, group: int) -> bool:
        """Whether there is a file for a page."""
        return self._name(digest, group) in self._sizes

    def size_of(self, digest: bytes, group: int) -> int:
        """Bytes of a page's file, 0 where there is none."""
        return self._sizes.get(self._name(digest, group), 0)

    def read(self, digest: bytes, group: int) -> dict[str, Tensor] | None:
        """The tensors of a page by name, on the host; None, and no file any more, where it is damaged or gone."""
        name = self._name(digest, group)
        try:
            content = (self.folder / name).read_bytes()  # not mapped: a disk that fails would end the process
        except FileNotFoundError:
            self._forget(name)
            return None
        except OSError as error:
            self._fail(error)
            return None
        rows = _tensors(content, digest)
        if rows is None:
            self.discard(digest, group)
            return None
        with suppress(OSError):  # its time is for other processes, which then delete it earlier
            os.utime(self.folder / name)
        self._sizes.move_to_end(name)
        return rows

    def write(self, digest: bytes, group: int, rows: Mapping[str, Tensor]) -> None:
        """Keep a page, whose tensors are contiguous and on the host."""
        name = self._name(digest, group)
        path = self.folder / name
        draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self._make_home()
            save_file(dict(rows), draft, {"sha256": _checksum(digest, rows)})
            size = draft.stat().st_size
            if size <= self._capacity:
                self._make_room(size - self._sizes.get(name, 0))
                draft.replace(path)
                self._forget(name)
                self._sizes[name] = size
                self._bytes += size
        except (OSError, SafetensorError) as error:
            self._fail(error)
        with suppress(OSError):  # renamed, or never made
            draft.unlink()

    def discard(self, digest: bytes, group: int) -> None:
        """Delete a page that could not be used."""
        self.damaged += 1
        self.remove(digest, group)

    def remove(self, digest: bytes, group: int) -> None:
        """Delete a page if it is there."""
        self._delete(self._name(digest, group))

    def clear(self) -> None:
        """Delete all pages of this model, those of other processes too."""
        there = {f"{self._own}/{path.name}" for path in (self.folder / self._own).glob("*")}
        known = {name for name in self._sizes if name.startswith(self._own)}
        for name in sorted(there | known):
            if NAMES.fullmatch(name):
                self._delete(name)

    def _name(self, digest: bytes, group: int) -> str:
        return f"{self._own}/{digest.hex()}.{group}.safetensors"

    def _make_home(self) -> None:
        (self.folder / self._own).mkdir(mode=0o700, parents=True, exist_ok=True)

    def _scan(self) -> None:
        """Take up what is there, the longest unused first."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = []
        for path in self.folder.glob("*/*"):
            name = f"{path.parent.name}/{path.name}"
            ours = NAMES.fullmatch(name)
            if ours is None:
                continue
            try:
                held = path.stat()
            except FileNotFoundError:  # another process deleted it meanwhile
                continue
            if ours["draft"] is None:
                found.append((held.st_mtime_ns, name, held.st_size))
            elif held.st_mtime < time.time() - ABANDONED:
                path.unlink(missing_ok=True)
        self._sizes.update((name, size) for _, name, size in sorted(found))
        self._bytes = sum(self._sizes.values())
        self._make_room(0)

    def _make_room(self, size: int) -> None:
        while self._sizes and self._bytes + size > self._capacity:
            self._delete(next(iter(self._sizes)))
            self.evictions += 1

    def _delete(self, name: str) -> None:
        """Delete a file. One that stays is not used any more by this process."""
        try:
            (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            self._fail(error)
        self._forget(name)

    def _fail(self, error: Exception) -> None:
        self.failures += 1
        self.error = str(error)

    def _forget(self, name: str) -> None:
        self._bytes -= self._sizes.pop(name, 0)


def _tensors(content: bytes, digest: bytes) -> dict[str, Tensor] | None:
    """What a page's file holds; None where it is damaged, or another page's."""
    try:
        rows = load(content)
    except (SafetensorError, KeyError):  # KeyError: a type that torch lacks
        return None
    end = 8 + int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8:end]).get("__metadata__") or {}
    return rows if metadata.get("sha256") == _checksum(digest, rows) else None


def _checksum(digest: bytes, rows: Mapping[str, Tensor]) -> str:
    """Of the page's name and its tensors: names, types, shapes and bytes."""
    sum_ = hashlib.sha256(digest)
    for name in sorted(rows):
        held = rows[name]
        sum_.update(f"{name} {held.dtype} {list(held.shape)}\n".encode())
        sum_.update(held.reshape(-1).view(torch.uint8).numpy().data)
    return sum_.hexdigest()
