"""The wheel holds what the repository holds, and nothing of it is found under two names."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_holds_every_source_file(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {n for n in zipfile.ZipFile(wheel).namelist() if n.startswith("deepinfer_compile/")}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    wanted = set()
    for file in listed:
        top = file.split("/")[0]
        if not file.endswith((".py", ".j2", ".json", "py.typed")):
            continue
        if top in ("passes", "templates", "targets"):
            wanted.add(f"deepinfer_compile/{file}")
        elif top == "deepinfer_compile":
            wanted.add(file)
    assert packed == wanted
