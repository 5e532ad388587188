"""Golden files: what a test printed last time, compared as text. ACCEPT=1 writes them anew."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

from deepinfer_compile.kernels import AnySpec, specs

FOLDER = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare `text` with tests/golden/<name>.txt and show the difference. With ACCEPT=1, write it instead."""
    file = FOLDER / f"{name}.txt"
    if os.environ.get("ACCEPT") == "1":
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return
    assert file.exists(), f"{file.name} does not exist; run once with ACCEPT=1 and read what it wrote"
    wanted = file.read_text()
    diff = difflib.unified_diff(wanted.splitlines(), text.splitlines(), "golden", "now", lineterm="")
    assert wanted == text, "\n".join(diff)


def kernel_golden(spec: AnySpec) -> str:
    """The golden of a kernel: by its operation, or by its own name if another kernel of the operation comes first."""
    first = next(s for s in specs() if s.op is spec.op)
    return f"kernel_{spec.op.name if first is spec else spec.name}"
