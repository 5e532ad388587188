"""Kernel libraries in this process: each namespace of operations is registered once.

A library registers its operations under a namespace that names its source, written beside it in `kernels.json`. Two
bundles with the same kernels share one library; bundles with different kernels live side by side.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import torch

from deepinfer_compile.errors import BundleCorrupt

RECORD = "kernels.json"
_loaded: set[str] = set()
_lock = threading.Lock()


def load_kernels(library: Path) -> str:
    """Load a kernel library unless its namespace is in the process already; returns the namespace.

    Raises BundleCorrupt if the record beside the library names none, or the library does not load.
    """
    try:
        namespace = json.loads((library.parent / RECORD).read_text())["namespace"]
    except (OSError, ValueError, KeyError) as err:
        raise BundleCorrupt(file=library.parent / RECORD, reason=f"it names no namespace: {err}") from None
    with _lock:
        if namespace not in _loaded:
            try:
                torch.ops.load_library(str(library))
            except OSError as err:
                raise BundleCorrupt(file=library, reason=f"it does not load: {err}") from None
            _loaded.add(namespace)
    return str(namespace)


def processor_flags() -> list[str]:
    """The processor's feature flags as Linux names them, sorted; empty where they cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return []
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return sorted(found[1].split()) if found else []
