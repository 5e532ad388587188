"""House rules that can be counted: budgets, names, import directions, docstrings, tests beside what they test."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = [*(ROOT / "deepinfer_compile").glob("*.py")]
for _part in ("capture", "ops", "bundle", "runtime", "cli", "models", "eplb", "plan"):
    SOURCE += (ROOT / "deepinfer_compile" / _part).rglob("*.py")
for _part in ("passes", "targets", "templates"):
    SOURCE += (ROOT / _part).rglob("*.py")
TESTS = [*(ROOT / "tests").rglob("*.py")]
TEMPLATES = [*(ROOT / "templates").rglob("*.j2")]
PASSES = [f for f in (ROOT / "passes").glob("*.py") if f.name != "__init__.py"]

# compiler parts that a running bundle must not need
COMPILER = ("passes", "templates", "targets", "capture", "pipeline", "builder", "graph", "program", "verify", "presets")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> set[str]:
    """Modules imported anywhere in a file, TYPE_CHECKING blocks left out."""
    tree = ast.parse(path.read_text())
    skip = {
        id(n)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for n in ast.walk(block)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skip:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return found


def test_files_are_short() -> None:
    long = {name(f): lines(f) for f in SOURCE + TESTS if lines(f) > 400}
    long |= {name(f): lines(f) for f in PASSES if lines(f) > 300}
    long |= {name(f): lines(f) for f in TEMPLATES if lines(f) > 200}
    assert not long


def test_functions_are_short() -> None:
    long = {
        f"{name(f)}:{n.name}": n.end_lineno - n.lineno + 1
        for f in SOURCE + TESTS
        for n in ast.walk(ast.parse(f.read_text()))
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef)) and n.end_lineno and n.end_lineno - n.lineno + 1 > 60
    }
    assert not long


def test_public_things_have_docstrings() -> None:
    missing = []
    for f in SOURCE:
        tree = ast.parse(f.read_text())
        if not ast.get_docstring(tree):
            missing.append(name(f))
        for n in tree.body:
            public = isinstance(n, (ast.FunctionDef, ast.ClassDef)) and not n.name.startswith("_")
            if public and not ast.get_docstring(n) and "errors.py" not in f.name:  # type: ignore[arg-type]
                missing.append(f"{name(f)}:{n.name}")  # type: ignore[attr-defined]
    assert not missing


def test_one_pass_a_file_named_alike_and_tested() -> None:
    for f in PASSES:
        classes = [
            n for n in ast.parse(f.read_text()).body if isinstance(n, ast.ClassDef) and not n.name.startswith("_")
        ]
        camel = "".join(w.title() for w in f.stem.split("_"))
        assert [c.name for c in classes] == [camel], f"{name(f)} must hold the class {camel} alone"
        doc = ast.get_docstring(classes[0]) or ""
        assert "Before" in doc, f"{camel} shows no Before"
        assert "After" in doc, f"{camel} shows no After"
        assert f'"{f.stem.replace("_", "-")}"' in f.read_text(), f"{camel} is not named {f.stem.replace('_', '-')}"
        assert (ROOT / "tests" / "passes" / f"test_{f.stem}.py").exists(), f"{camel} has no test file"


def test_runtime_needs_no_compiler() -> None:
    for part in ("runtime", "bundle"):
        for f in (ROOT / "deepinfer_compile" / part).rglob("*.py"):
            bad = [
                m
                for m in imports(f)
                if m.startswith(tuple(f"deepinfer_compile.{c}" for c in COMPILER))
                or m.split(".")[0] in ("transformers", "triton")
            ]
            assert not bad, f"{name(f)} imports {bad}"


def test_passes_know_no_target_and_ops_know_no_pass() -> None:
    rules = {"passes": ("targets", "templates", "builder"), "deepinfer_compile/ops": ("passes", "targets", "pipeline")}
    for folder, banned in rules.items():
        for f in (ROOT / folder).rglob("*.py"):
            bad = [m for m in imports(f) if m.startswith(tuple(f"deepinfer_compile.{b}" for b in banned))]
            assert not bad, f"{name(f)} imports {bad}"


def test_common_code_names_no_chip() -> None:
    pattern = re.compile(r"sm_?90|sm_?100|ascend|h200|blackwell|hopper", re.I)
    common = [f for f in SOURCE if "targets" not in f.parts and "templates" not in f.parts and "cli" not in f.parts]
    assert not [name(f) for f in common if pattern.search(f.read_text())]


def test_nothing_names_this_machine() -> None:
    pattern = re.compile(r"/(wor" r"k|far" r"m|roo" r"t|hom" r"e)/")
    files = [*SOURCE, *TESTS, *TEMPLATES, ROOT / "README.md", ROOT / "Makefile", ROOT / "pyproject.toml"]
    assert not [name(f) for f in files if pattern.search(f.read_text())]


@pytest.mark.parametrize("package", ["passes", "templates", "targets"])
def test_root_packages_have_one_name(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert f"import deepinfer_compile.{package}" in done.stderr


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, deepinfer_compile; print(sorted({'torch', 'triton', 'transformers', 'jinja2'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
