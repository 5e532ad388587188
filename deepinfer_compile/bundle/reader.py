"""Opening a bundle: nothing is used, and nothing large is read or allocated, before it is checked.

`check="lazy"` verifies the manifest, the tree, all sizes, the digests of everything but tensor data, and the headers of
all weight files; `check="full"` also the tensor data. A writer may replace the bundle while it is read: then reading
starts again, so that a reader sees the old or the new bundle, never a mixture. Digests detect damage, not malice.
"""

from __future__ import annotations

import hashlib
import os
import random
import stat
import time
from pathlib import Path
from typing import Any, Literal

from deepinfer_compile.bundle import jsonio
from deepinfer_compile.bundle.checkpoint import Checkpoint
from deepinfer_compile.bundle.files import FileEntry, read_bytes, read_verified, verify_files
from deepinfer_compile.bundle.ledger import LEDGER, Ledger
from deepinfer_compile.bundle.manifest import DIGEST, MANIFEST, MAX_MANIFEST, Manifest, parse_manifest
from deepinfer_compile.bundle.paths import check_tree
from deepinfer_compile.bundle.replace import FolderLock, recover, siblings
from deepinfer_compile.bundle.weight_files import WEIGHTS, WeightFiles, verified_header
from deepinfer_compile.errors import BadOption, BundleCorrupt, BundlePath, CompileError, NotABundle, OutputBusy

Check = Literal["lazy", "full"]
Identity = tuple[int, int, int]
MAX_READ = 1 << 30
"""Largest file that is read into memory whole."""
_PATIENCE_S = 10.0
"""How long a reader starts again because writers keep replacing what it reads."""
_PAUSE_S = 0.05


class BundleFiles:
    """A bundle whose files were checked. `root` is its folder."""

    def __init__(self, root: Path, manifest: Manifest, identity: Identity) -> None:
        """Use `read_bundle`."""
        self.root = root
        self.manifest = manifest
        self._identity = identity

    def path(self, rel: str) -> Path:
        """The path of one of the bundle's files. Raises BundlePath, and BundleCorrupt when the bundle was replaced."""
        self._entry(rel)
        self._check_same()
        return self.root / rel

    def bytes(self, rel: str) -> bytes:
        """One file's content, verified again. Raises BundlePath, BundleCorrupt."""
        entry = self._entry(rel)
        try:
            return read_verified(self.root / rel, rel, entry, MAX_READ)
        except BundleCorrupt:
            self._check_same()
            raise

    def json(self, rel: str) -> Any:
        """One JSON file's value. Raises BundlePath, BundleCorrupt."""
        try:
            return jsonio.loads(self.bytes(rel))
        except jsonio.JsonError as error:
            raise BundleCorrupt(file=rel, reason=str(error)) from None

    def ledger(self) -> Ledger:
        """How the weights follow from a checkpoint. Raises BundlePath where there is no ledger, BundleCorrupt."""
        return Ledger.from_json(self.json(LEDGER))

    def weights(self, checkpoint: Path | None = None) -> WeightFiles:
        """The runtime tensors, all names, dtypes and shapes checked.

        checkpoint: the model folder, for a bundle that does not hold its weights; by default the linked one.
        Raises BundleCorrupt, WeightMismatch, MissingWeight, and what `Checkpoint.open` raises.
        """
        self._check_same()
        source = self.manifest.weights
        folder = checkpoint or (Path(source.folder) if source.folder else None)
        if source.mode == "copy" or folder is None:
            return WeightFiles(self.root, self.manifest)
        return WeightFiles(self.root, self.manifest, self.ledger(), Checkpoint.open(folder))

    def _entry(self, rel: str) -> FileEntry:
        if rel not in self.manifest.files:
            raise BundlePath(entry=rel, reason="the manifest does not name it")
        return self.manifest.files[rel]

    def _check_same(self) -> None:
        if _identity(self.root) != self._identity:
            raise BundleCorrupt(file=self.root, reason="the bundle was replaced since it was opened: open it again")


def read_bundle(path: Path | str, check: Check = "lazy") -> BundleFiles:
    """Open and check the bundle at `path`, starting again for at most ten seconds while writers keep replacing it.

    Raises NotABundle, BundleCorrupt, BundlePath, BundleVersion, BadOption.
    """
    if check not in ("lazy", "full"):
        raise BadOption(name="check", value=check, reason="it is lazy or full", fix="use check='lazy'")
    root = Path(os.path.realpath(path))
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        if not os.path.lexists(root):
            _bring_back(root)
        identity = _identity(root)
        try:
            return _read(root, check, identity)
        except CompileError:
            if _identity(root) == identity and not _half_replaced(root):
                raise
        if time.monotonic() >= deadline:
            raise BundleCorrupt(file=root, reason="it was replaced each time while it was read; stop what writes it")
        # Of random length, so that a reader does not stay in step with a writer.
        time.sleep(random.uniform(0, _PAUSE_S))


def _read(root: Path, check: Check, identity: Identity | None) -> BundleFiles:
    if identity is None:
        raise NotABundle(path=root, reason="there is no such folder")
    manifest = _read_manifest(root)
    try:
        sizes = check_tree(root, [MANIFEST, DIGEST, *manifest.files])
    except OSError as error:
        raise BundleCorrupt(file=error.filename, reason=f"it cannot be read: {error.strerror}") from None
    for name, entry in manifest.files.items():
        if sizes[name] != entry.size:
            raise BundleCorrupt(file=name, reason=f"it has {sizes[name]} bytes; the manifest says {entry.size}")
        is_weights = name.startswith(WEIGHTS)
        if is_weights != bool(entry.header_sha256) or (is_weights and not name.endswith(".safetensors")):
            raise BundleCorrupt(file=name, reason=f"files in {WEIGHTS}, and no others, are *.safetensors with a header")
    for name in manifest.files:
        if name.startswith(WEIGHTS):
            verified_header(root, name, manifest)
    eager = {name: entry for name, entry in manifest.files.items() if check == "full" or not name.startswith(WEIGHTS)}
    verify_files(root, eager)
    if _identity(root) != identity:
        raise BundleCorrupt(file=root, reason="the bundle was replaced while it was read")
    return BundleFiles(root, manifest, identity)


def _read_manifest(root: Path) -> Manifest:
    """The manifest, verified by the digest that was written last. Raises NotABundle, BundleCorrupt, ..."""
    if not os.path.lexists(root / MANIFEST):
        raise NotABundle(path=root, reason=f"it has no {MANIFEST}")
    if not os.path.lexists(root / DIGEST):
        raise BundleCorrupt(file=DIGEST, reason="it is missing, so the bundle was never completed")
    for name, limit in ((MANIFEST, MAX_MANIFEST), (DIGEST, 65)):
        if _size(root / name, name) > limit:
            raise BundleCorrupt(file=name, reason=f"it has more than {limit} bytes")
    data = read_bytes(root / MANIFEST, MANIFEST, _size(root / MANIFEST, MANIFEST))
    expected = f"{hashlib.sha256(data).hexdigest()}\n".encode("ascii")
    if read_bytes(root / DIGEST, DIGEST, len(expected)) != expected:
        raise BundleCorrupt(file=MANIFEST, reason=f"its SHA-256 is not the one in {DIGEST}")
    return parse_manifest(data)


def _size(path: Path, name: str) -> int:
    """Bytes of a plain file. Raises BundlePath for anything else, BundleCorrupt when it is gone."""
    try:
        info = os.lstat(path)
    except OSError as error:
        raise BundleCorrupt(file=name, reason=f"it cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        raise BundlePath(entry=name, reason="it is not a plain file")
    return info.st_size


def _identity(root: Path) -> Identity | None:
    """What a folder is, apart from its name (numbers of removed folders are used again, times are not)."""
    try:
        info = os.lstat(root)
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_mtime_ns) if stat.S_ISDIR(info.st_mode) else None


def _half_replaced(root: Path) -> bool:
    return not os.path.lexists(root) and root.parent.is_dir() and bool(siblings(root, "old"))


def _bring_back(root: Path) -> None:
    """Undo the first half of a replacement whose process died; a living one finishes by itself."""
    if not _half_replaced(root):
        return
    try:
        lock = FolderLock(root)
    except OutputBusy:
        return
    except OSError as error:
        aside = siblings(root, "old")[0].name
        reason = f"a killed writer left it aside as {aside}, which could not be renamed back: {error.strerror}"
        raise NotABundle(path=root, reason=reason) from None
    try:
        recover(root)
    finally:
        lock.release()
