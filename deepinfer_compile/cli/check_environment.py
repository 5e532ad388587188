"""`doctor`: what this machine and this environment offer, and what each missing thing disables.

Versions come from package metadata, so that a broken package is named by the check that imports it and by no other.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from deepinfer_compile.cli.boundary import guarded, print_json
from deepinfer_compile.cli.build_bundle import JSON_OPTION
from deepinfer_compile.cli.show import size, stdout, table
from deepinfer_compile.errors import CompileError, MissingExtra

OLDEST_PYTHON = (3, 11)
PACKAGES = (
    ("torch", "2.11", True, "everything"),
    ("numpy", "1.26", True, "running bundles"),
    ("safetensors", "0.5", True, "reading checkpoints that other tools wrote"),
    ("tokenizers", "0.21", True, "text prompts (token ids work)"),
    ("jinja2", "3.1", True, "building native code, chat prompts"),
    ("networkx", "3.2", True, "building"),
    ("triton", "3.6", False, "building for NVIDIA GPUs"),
    ("onnx", "1.17", False, "exporting ONNX"),
)
"""Package, oldest version, whether nothing useful works without it, what its absence disables."""
EXTRAS = (
    ("hf", ("transformers",), "building from Hugging Face folders, explain, replay, support, verify --against"),
    ("onnx-runtime", ("onnxruntime",), "export --verify"),
    ("demo", ("gguf", "accelerate"), "make demo"),
    ("dev", ("pytest", "hypothesis", "ruff", "mypy"), "running the tests"),
)


@dataclass(frozen=True)
class Check:
    """One line of the table. needed: without it nothing useful works. disables: what is lost where it is not ok."""

    name: str
    ok: bool
    found: str
    disables: str
    needed: bool = False


@guarded
def doctor(as_json: Annotated[bool, JSON_OPTION] = False) -> None:
    """Check the environment. Exit code 3 if something is missing that everything needs."""
    checks = [_python(), *(_package(*p) for p in PACKAGES), *(_extra(*e) for e in EXTRAS)]
    checks += [_compiler(), *_instructions(), _openmp(), _memory(), _cache(), _gpu()]
    broken = [c for c in checks if c.needed and not c.ok]
    if as_json:
        print_json({"ok": not broken, "checks": [vars(c) for c in checks]})
    else:
        _print(checks)
    if broken:
        raise typer.Exit(MissingExtra.exit_code)


def _python() -> Check:
    fine = sys.version_info[:2] >= OLDEST_PYTHON
    needs = "" if fine else f", needs {'.'.join(map(str, OLDEST_PYTHON))}"
    system = f"{platform.system()} {platform.machine()}"
    return Check("python", fine, f"{platform.python_version()} on {system}{needs}", "everything", True)


def _package(name: str, oldest: str, needed: bool, disables: str) -> Check:
    found = _version(name)
    if found is None:
        return Check(name, False, "not installed", disables, needed)
    fine = _numbers(found) >= _numbers(oldest)
    return Check(name, fine, found if fine else f"{found}, needs {oldest}", disables, needed)


def _version(package: str) -> str | None:
    """The installed version of a package, or None."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: `2.13.0+cpu` -> (2, 13, 0)."""
    numbers: list[int] = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _extra(name: str, packages: tuple[str, ...], disables: str) -> Check:
    versions = {package: _version(package) for package in packages}
    lack = [package for package, found in versions.items() if found is None]
    have = [f"{package} {found}" for package, found in versions.items()]
    hint = f"missing {', '.join(lack)}: pip install 'deepinfer-compile[{name}]'" if lack else ", ".join(have)
    return Check(f"extra {name}", not lack, hint, disables)


def _compiler() -> Check:
    from deepinfer_compile.targets.cpu_kernels import find_compiler

    disables = "native code for the cpu target (build --graph-only works)"
    try:
        return Check("C++ compiler", True, find_compiler(), disables)
    except CompileError as err:
        return Check("C++ compiler", False, str(err.values.get("tried", err)), disables)


def _instructions() -> list[Check]:
    """One check for each instruction set that bundles are built for."""
    from deepinfer_compile.runtime.variants import ISA_FLAGS, missing_flags

    found = []
    for isa in ISA_FLAGS:
        missing = missing_flags({"isa": isa})
        found.append(Check(isa, not missing, f"lacks {missing}" if missing else "yes", f"native code built for {isa}"))
    return found


def _openmp() -> Check:
    import torch

    have = torch.backends.openmp.is_available()
    threads = f"{torch.get_num_threads()} threads of {os.cpu_count()} cores"
    return Check("OpenMP", have, threads if have else "torch was built without it", "more than one thread")


def _memory() -> Check:
    from deepinfer_compile.runtime.loading import free_memory

    disables = "choosing cache sizes from free memory"
    try:
        return Check("free memory", True, size(free_memory()), disables)
    except (CompileError, OSError) as err:
        return Check("free memory", False, str(err).splitlines()[0], disables)


def _cache() -> Check:
    import tempfile

    from deepinfer_compile.artifacts import default_root

    root = default_root()
    disables = "reuse of compiled code between builds (builds get slower)"
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=root):
            return Check("cache folder", True, str(root), disables)
    except OSError as err:
        return Check("cache folder", False, f"{root}: {err.strerror or err}", disables)


def _gpu() -> Check:
    import torch

    disables = "running NVIDIA bundles here (they can be built without a GPU)"
    if not torch.cuda.is_available():
        return Check("GPU", False, "none found by torch", disables)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Check("GPU", True, ", ".join(names), disables)


def _print(checks: list[Check]) -> None:
    from rich.text import Text

    shown = table("", "check", "found", "without it")
    for c in checks:
        mark = (
            Text("ok", style="green")
            if c.ok
            else Text("MISSING" if c.needed else "no", style="red" if c.needed else "yellow")
        )
        shown.add_row(mark, c.name, c.found, "" if c.ok else f"disables {c.disables}")
    stdout().print(shown)


__all__ = ["Check", "doctor"]
