"""`build` and what all commands share: help, usage errors, error reports, interruption, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_compile.bundle import read_bundle
from deepinfer_compile.cli import COMMANDS
from deepinfer_compile.cli.show import plural, ranges, size
from deepinfer_compile.errors import NotAModelFolder
from tests.cli.conftest import Run, Toy, document

MAIN = "import sys; from deepinfer_compile.cli import main; main()"


def tree(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_help_is_light() -> None:
    code = """
import contextlib, io, sys, time
from typer.testing import CliRunner
from deepinfer_compile.cli import app
for args in ([], ["--help"], ["build", "--help"], ["run", "--help"]):
    CliRunner().invoke(app, args)
print(time.process_time(), sorted({"torch", "transformers", "numpy", "jinja2", "tokenizers"} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, loaded = done.stdout.split(maxsplit=1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 1.0  # four helps in one process


def test_every_command_has_help(cli: Run) -> None:
    top = cli("--help").stdout
    assert len(COMMANDS) == 16
    for name in (command.__name__ for command in COMMANDS):
        assert name in top
        assert cli(name, "--help").exit_code == 0


def test_version(cli: Run) -> None:
    assert cli("--version").stdout.strip() == "0.1.0"


@pytest.mark.parametrize(
    "args", [("build", "--no-such"), ("no-such",), ("build",), ("inspect",), ("run", "x", "--top-k", "a")]
)
def test_usage_errors_are_2(cli: Run, args: tuple[str, ...]) -> None:
    result = cli(*args)
    assert result.exit_code == 2
    assert "Error" in result.stderr


def test_build_and_its_summary(cli: Run, toy: Toy, tmp_path: Path) -> None:
    out = tmp_path / "out.bundle"
    result = cli("build", toy.folder, "-o", out, "--graph-only", "--max-model-len", 200, "--weights", "link")
    assert result.exit_code == 0, result.stderr
    files = read_bundle(out, "full")
    assert files.manifest.model["max_model_len"] == 200
    assert files.manifest.weights.mode == "link"
    assert "layers 0-2" in result.stdout
    assert "graphs only" in result.stdout
    for stage in ("open", "capture", "passes", "weights", "finish"):
        assert stage in result.stderr
    assert tree(tmp_path)[0] == "out.bundle"
    assert [p.name for p in tmp_path.iterdir()] == ["out.bundle"]
    again = cli("inspect", out, "--json")
    assert document(again)["weights"]["folder"] == str(toy.folder.resolve())


def test_build_with_dump_prints_and_json(cli: Run, plain: Toy, tmp_path: Path) -> None:
    args = ("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--json")
    result = cli(*args, "--dump", tmp_path / "dump", "--print-after", "canonicalize", "--dtype", "float32")
    assert result.exit_code == 0, result.stderr
    found = document(result)
    assert found["model"]["name"] == "LlamaForCausalLM"
    assert found["variants"]["cpu"]["native"] is False
    assert set(found["stages"]) >= {"capture", "passes"}
    assert found["bytes"] == sum(
        p.stat().st_size for p in (tmp_path / "o").rglob("*") if p.is_file() and p.name[:9] != "manifest."
    )
    assert "== after canonicalize" in result.stderr
    assert any(name.endswith("-canonicalize.diff") for name in tree(tmp_path / "dump"))


def test_errors_are_red_on_stderr_with_their_own_code(cli: Run, tmp_path: Path) -> None:
    result = cli("build", tmp_path / "nope", "-o", tmp_path / "o", "--graph-only", color=True)
    assert result.exit_code == 7
    assert result.stdout == ""
    assert "is not a model folder" in result.stderr
    assert "try: " in result.stderr
    assert "Traceback" not in result.stderr
    assert tree(tmp_path) == []


def test_errors_as_json(cli: Run, tmp_path: Path) -> None:
    result = cli("build", tmp_path / "nope", "-o", tmp_path / "o", "--json")
    assert result.exit_code == 7
    assert document(result)["error"] == "NotAModelFolder"


def test_traceback_on_request(cli: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_TRACEBACK", "1")
    result = cli("build", tmp_path / "nope", "-o", tmp_path / "o")
    assert isinstance(result.exception, NotAModelFolder)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("--dtype", "int4"), 2, "dtype"),
        (("--isa", "sse2"), 2, "isa"),
        (("--weights", "zip"), 2, "weights"),
        (("--target", "abacus"), 2, "abacus"),
        (("--max-model-len", "4096"), 2, "context is 1024"),
        (("--waive", "no-such"), 6, "no-such"),
        (("--print-after", "no-such"), 6, "no-such"),
    ],
)
def test_refused_builds_leave_nothing(
    cli: Run, plain: Toy, tmp_path: Path, args: tuple[str, ...], code: int, words: str
) -> None:
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only", *args)
    assert result.exit_code == code, result.stderr
    assert words in " ".join(result.stderr.split())
    assert tree(tmp_path) == []


def test_what_is_no_bundle_is_not_replaced(cli: Run, plain: Toy, tmp_path: Path) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "thesis.txt").write_text("mine")
    result = cli("build", plain.folder, "-o", tmp_path / "o", "--graph-only")
    assert result.exit_code == 8
    assert tree(tmp_path) == ["o", "o/thesis.txt"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_interruption_leaves_nothing(plain: Toy, tmp_path: Path, number: int, code: int) -> None:
    args = ["build", str(plain.folder), "-o", str(tmp_path / "o"), "--graph-only"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", MAIN, *args]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, preexec_fn=_listen)
    assert running.stderr is not None
    assert running.stderr.readline().startswith("open")  # printed when capture begins
    running.send_signal(number)
    rest = running.stderr.read()
    assert running.wait(60) == code
    assert "Traceback" not in rest
    assert tree(tmp_path) == []


def _listen() -> None:
    """A shell starts what it puts in the background with this signal ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_sizes_and_ranges() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1536, 3 << 30)] == ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "3.0 GiB"]
    assert ranges([]) == "-"
    assert ranges([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"
    assert [plural(1, "pass"), plural(2, "pass"), plural(0, "layer")] == ["1 pass", "2 passes", "0 layers"]


def test_json_survives_a_closed_pipe(toy: Toy) -> None:
    command = f'"{sys.executable}" -c "{MAIN}" inspect "{toy.bundle}" --json | head -c 1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stdout == "{"
    assert "Traceback" not in done.stderr


def test_errors_carry_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """What observers add to an error (where a reproducer lies) reaches the user."""
    import typer

    from deepinfer_compile.cli.boundary import guarded
    from deepinfer_compile.errors import PassFailed

    @guarded
    def fail(as_json: bool = False) -> None:
        err = PassFailed(name="p", graph="g", reason="r", reproducer="")
        err.add_note("reproducer: x.json")
        raise err

    for given in (False, True):
        with pytest.raises(typer.Exit) as caught:
            fail(as_json=given)
        assert caught.value.exit_code == PassFailed.exit_code
    printed = capsys.readouterr()
    assert json.loads(printed.out)["notes"] == ["reproducer: x.json"]
    assert "reproducer: x.json" in printed.err


def test_replay_is_an_option_of_the_build(plain: Toy, cli: Run, tmp_path: Path) -> None:
    """A model in which nothing is shared is built the same; what is no choice is refused."""
    args = ("build", plain.folder, "-o", tmp_path / "o", "--graph-only", "--weights", "none", "--replay")
    assert cli(*args, "off").exit_code == 0
    missed = read_bundle(tmp_path / "o").manifest.build["passes"]["prefill"]
    assert [p["missed"] for p in missed if p["name"] == "narrow-decoder"] == [[]]
    assert cli(*args, "some").exit_code == 2
